"""The objective of a drafter: blocks behind anchors, scored by the row's tokens or by the target's predictions.

The target reads the clean rows once, without gradient, and shows the outputs of some layers; the drafter makes its
context of them and predicts all blocks of a row side by side. A block is a canvas of which the first token, the anchor,
stands, and all others are masks. Formulas: docs/drafters.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockdiff.canvas import Batch
from blockdiff.models.drafted import with_features
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Losses, complete, evaluating, places, positions, spans_of_canvases

SMOOTHING = 0.5  # alpha of D-PACE
DECAYS = {8: 4.0, 10: 5.0, 16: 7.0}  # block -> gamma, of the paper; a block between has that of the next longer one


class DraftEvaluation(NamedTuple):
    """The cross-entropy in nats and the hits of every place of every block [B, C, L], 0 where none is scored."""

    loss_BCL: Tensor
    is_correct_BCL: Tensor


class BlockMask:
    """The corruption of blocks: masks behind the first token, whatever the noise level."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The blocks, and the marks of their masks."""
        is_masked_BCL = (torch.arange(canvas_BCL.shape[-1], device=canvas_BCL.device) > 0).expand_as(canvas_BCL)
        return canvas_BCL.masked_fill(is_masked_BCL, self.mask_id), is_masked_BCL


class DraftObjective(nn.Module):
    """The loss of a batch of blocks, "draft": `objective(batch) -> Losses`; the batch's `canvas_count()` divides it.

    model: the drafter; target: the model that it drafts for, which stands still and is no part of this module. loss:
    the weights of the places k >= 1 of a block, "decay" (exp(-(k - 1) / gamma)) or "dpace" (what the loss of a place
    decides of the expected accepted length, arXiv 2605.18810); targets: cross-entropy to the row's tokens, or the KL
    divergence from the target's predictions.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        target: BlockDiffusionModel,
        loss: Literal["dpace", "decay"] = "dpace",
        targets: Literal["tokens", "distribution"] = "tokens",
    ) -> None:
        super().__init__()
        self.model, self.corruption, self.loss, self.targets = model, BlockMask(model.mask_id), loss, targets
        self.draft_for(target)

    @property
    def target(self) -> BlockDiffusionModel:
        """The model that is drafted for."""
        return self._target[0]

    def draft_for(self, target: BlockDiffusionModel) -> None:
        """Take another target, or the same one with its weights; BlockdiffError for one that is not the drafter's."""
        self.model.drafts_for(target)
        self._target = (target.requires_grad_(False).eval(),)

    def forward(self, batch: Batch) -> Losses:
        """The sum of the losses of a batch's blocks."""
        batch = complete(batch)
        hidden_BTD, predicting_BSD = self._blocks(batch)
        is_scored_BCL = batch.is_scored_BCL
        hidden_ND = hidden_BTD[is_scored_BCL.flatten(1)]
        if self.targets == "tokens":
            loss_N = self.model.vocabulary.cross_entropy(hidden_ND, batch.canvas_BCL[is_scored_BCL])
        else:
            before_BT = (batch.start_BC[..., None] + places(batch) - 1).clamp(0, predicting_BSD.shape[1] - 1).flatten(1)
            given_BTD = predicting_BSD.gather(1, before_BT[..., None].expand(-1, -1, predicting_BSD.shape[-1]))
            loss_N = self.model.vocabulary.divergence(hidden_ND, given_BTD[is_scored_BCL.flatten(1)])
        weight_BCL = self._weights(loss_N.detach(), is_scored_BCL) * batch.weight_BC[..., None]
        return {"draft": (weight_BCL[is_scored_BCL].to(loss_N.dtype) * loss_N).sum()}

    def evaluate(self, batch: Batch) -> DraftEvaluation:
        """Losses and hits of every place, in eval mode and without gradients."""
        with evaluating(self):
            batch = complete(batch)
            is_scored_BCL = batch.is_scored_BCL
            hidden_ND = self._blocks(batch)[0][is_scored_BCL.flatten(1)]
            loss_N, argmax_N = self.model.vocabulary.scores(hidden_ND, batch.canvas_BCL[is_scored_BCL])
            loss_BCL, is_correct_BCL = loss_N.new_zeros(is_scored_BCL.shape), torch.zeros_like(is_scored_BCL)
            loss_BCL[is_scored_BCL] = loss_N
            is_correct_BCL[is_scored_BCL] = argmax_N == batch.canvas_BCL[is_scored_BCL]
            return DraftEvaluation(loss_BCL, is_correct_BCL)

    def _blocks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The hidden states of the blocks [B, C * L, D], and those of the target's clean tokens [B, S, D]."""
        model, target = self.model, self.target
        with torch.no_grad():
            spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in target.kinds.items()}
            shown = model.target_layers
            predicting_BSD, features_BSF = with_features(
                target(batch.tokens_BS, batch.positions_BS, spans, shown=shown)[0], len(shown)
            )
        spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in model.kinds.items()}
        _, context = model(features_BSF, batch.positions_BS, spans)
        noisy_BCL, _ = self.corruption.corrupt(batch.canvas_BCL, batch.t_BC, batch.address_BC3, 0)
        spans = {name: spans_of_canvases(kind, batch) for name, kind in model.kinds.items()}
        hidden_BTD, _ = model(noisy_BCL.flatten(1), positions(batch), spans, context, True)
        return hidden_BTD, predicting_BSD

    def _weights(self, loss_N: Tensor, is_scored_BCL: Tensor) -> Tensor:
        """The weight of every place [B, C, L], of which those without a score count nothing."""
        L = is_scored_BCL.shape[-1]
        if self.loss == "decay":
            gamma = next((gamma for block, gamma in DECAYS.items() if L <= block), max(DECAYS.values()))
            place_L = torch.arange(L, dtype=loss_N.dtype, device=loss_N.device)
            return torch.exp((1 - place_L) / gamma).expand(is_scored_BCL.shape)
        confidence_BCL = loss_N.new_ones(is_scored_BCL.shape)
        confidence_BCL[is_scored_BCL] = SMOOTHING + (1 - SMOOTHING) * torch.exp(-loss_N)
        reached_BCL = confidence_BCL.cumprod(-1) * is_scored_BCL
        return reached_BCL.flip(-1).cumsum(-1).flip(-1)
