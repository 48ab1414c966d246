"""The losses: weighted sums over what is scored. Whoever has the global counts divides, in one place (the loop)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blockdiff.canvas import Batch
from blockdiff.layers.vocabulary import Vocabulary


class Losses(NamedTuple):
    """Sums in nats, fp32 scalars with gradient; their counts are `batch.canvas_count()` and `batch.ar_count()`."""

    canvas_sum: Tensor
    ar_sum: Tensor


def canvas_loss(
    vocabulary: Vocabulary,
    hidden_BTD: Tensor,
    batch: Batch,
    factor_BCL: Tensor,
    observed_BCL: Tensor | None = None,
    bonus_BC: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the true token at every canvas position whose factor is not 0, times that factor.

    hidden_BTD: of pass two, T = C * L. observed_BCL, bonus_BC: the noisy tokens and what their logits gain (both or
    neither). Returns the sum in nats, an fp32 scalar.
    """
    is_needed_BT = (factor_BCL != 0).flatten(1)
    target_N, factor_N = batch.canvas_BCL.flatten(1)[is_needed_BT], factor_BCL.flatten(1)[is_needed_BT]
    observed_N = bonus_N = None
    if observed_BCL is not None and bonus_BC is not None:
        observed_N = observed_BCL.flatten(1)[is_needed_BT]
        bonus_N = bonus_BC[..., None].expand_as(factor_BCL).flatten(1)[is_needed_BT]
    loss_N = vocabulary.cross_entropy(hidden_BTD[is_needed_BT], target_N, observed_N, bonus_N)
    return (factor_N * loss_N).sum()


def ar_loss(vocabulary: Vocabulary, hidden_BSD: Tensor, batch: Batch) -> Tensor:
    """Next-token cross-entropy of the encode pass over every scored pair of the clean rows, times its weight.

    hidden_BSD: after the final norm. Returns the sum in nats, an fp32 scalar.
    """
    is_scored_BS = batch.is_ar_scored_BS
    target_BS = batch.tokens_BS.roll(-1, dims=1)
    loss_N = vocabulary.cross_entropy(hidden_BSD[is_scored_BS], target_BS[is_scored_BS])
    return (batch.ar_weight_BS[is_scored_BS] * loss_N).sum()
