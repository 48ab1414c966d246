"""The scored positions of a batch: where they are, their tokens and factors, and the losses at them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.canvas import Batch, to_device
from blockdiff.layers.vocabulary import Vocabulary


class LossFactors:
    """The factors of the losses of all canvas positions, flattened from [B, C, L], and the indices that are not 0.

    Construct it before the passes: the copy of the indices to the host then does not wait for the passes' kernels.
    """

    def __init__(self, factor_BCL: Tensor):
        self.factor_N, self._device, self._copied = factor_BCL.flatten(), factor_BCL.device, None
        self._is_scored_N = self.factor_N != 0
        if factor_BCL.is_cuda:
            on_host_N = torch.empty(self._is_scored_N.shape, dtype=torch.bool, pin_memory=True)
            self._is_scored_N = on_host_N.copy_(self._is_scored_N, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def indices(self) -> Tensor:
        """The indices [N] of the factors that are not 0, on the factors' device."""
        if self._copied is not None:
            self._copied.synchronize()
        return marked_indices(self._is_scored_N, self._device)


class ScoredPositions(NamedTuple):
    """The N scored positions of one loss, with the true token and the loss factor of each.

    of_token_N: the hidden states [N, D], or in a sweep the positions' indices [N] among all tokens of the call.
    observed_N, bonus_N: the noisy tokens and what is added to their logits (both or neither).
    """

    of_token_N: Tensor
    target_N: Tensor
    factor_N: Tensor
    observed_N: Tensor | None = None
    bonus_N: Tensor | None = None


def next_token_pairs(of_token_BS: Tensor, batch: Batch) -> ScoredPositions:
    """The scored positions of the AR loss: the clean tokens whose next token is scored.

    of_token_BS: hidden states [B, S, D] or indices [B, S] of the clean tokens.
    """
    target_BS = batch.tokens_BS.roll(-1, dims=1)
    index_N = marked_indices(batch.on_host.is_ar_scored_BS, target_BS.device)
    target_N, weight_N = target_BS.flatten()[index_N], batch.ar_weight_BS.flatten()[index_N]
    return ScoredPositions(of_token_BS.flatten(0, 1)[index_N], target_N, weight_N)


def marked_indices(is_marked: Tensor, device: torch.device) -> Tensor:
    """The flat indices [N] of the True elements, on `device`. With marks on a GPU the host waits for the device."""
    return to_device(is_marked.flatten().nonzero()[:, 0], device)


def summed_loss(vocabulary: Vocabulary, scored: ScoredPositions) -> Tensor:
    """The sum of the cross-entropies in nats, each multiplied by its factor, as an fp32 scalar."""
    loss_N = vocabulary.cross_entropy(scored.of_token_N, scored.target_N, scored.observed_N, scored.bonus_N)
    return (scored.factor_N * loss_N).sum()


def token_losses(
    vocabulary: Vocabulary,
    hidden: Tensor,
    target: Tensor,
    is_scored: Tensor,
    observed: Tensor | None = None,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's loss in nats and whether the argmax is its target, in the shape of `target`.

    If `is_scored` is False, the loss is 0 and the hit False. hidden: the hidden states of all tokens [..., D], in the
    order of `target`. observed, bonus: noisy tokens and the numbers added to their logits (None: nothing).
    """
    hidden_ND = hidden.view(*target.shape, -1)[is_scored]
    observed_N, bonus_N = (None, None) if observed is None or bonus is None else (observed[is_scored], bonus[is_scored])
    loss_N, argmax_N = vocabulary.scores(hidden_ND, target[is_scored], observed_N, bonus_N)
    loss = loss_N.new_zeros(target.shape)
    is_correct = torch.zeros_like(is_scored)
    loss[is_scored], is_correct[is_scored] = loss_N, argmax_N == target[is_scored]
    return loss, is_correct
