"""The losses: sums over what is scored. Whoever has the global counts divides, in one place (the loop)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blockdiff.canvas import Batch
from blockdiff.layers.vocabulary import Vocabulary


class Losses(NamedTuple):
    """Sums in nats, fp32 scalars with gradient; their counts are `batch.canvas_count()` and `batch.ar_count()`."""

    canvas_sum: Tensor
    ar_sum: Tensor


def canvas_loss(vocabulary: Vocabulary, hidden_BTD: Tensor, batch: Batch) -> Tensor:
    """Plain cross-entropy of the true token at every scored canvas position, corrupted and kept alike.

    hidden_BTD: of pass two, T = C * L. Returns the sum in nats, an fp32 scalar.
    """
    is_scored_BT = batch.is_scored_BCL.flatten(1)
    return vocabulary.cross_entropy(hidden_BTD[is_scored_BT], batch.canvas_BCL.flatten(1)[is_scored_BT]).sum()


def ar_loss(vocabulary: Vocabulary, hidden_BSD: Tensor, batch: Batch) -> Tensor:
    """Next-token cross-entropy of the encode pass over every scored pair of the clean rows.

    hidden_BSD: after the final norm. Returns the sum in nats, an fp32 scalar.
    """
    is_scored_BS = batch.is_ar_scored_BS
    target_BS = batch.tokens_BS.roll(-1, dims=1)
    return vocabulary.cross_entropy(hidden_BSD[is_scored_BS], target_BS[is_scored_BS]).sum()
