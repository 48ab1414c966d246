"""The objective of a drafter, which learns to predict blocks of tokens for its target model.

The target encodes the clean rows once, without gradient, and returns the outputs of some layers. The drafter encodes
these as its context and predicts all blocks of a row in one call. A block is a canvas whose first token, the anchor, is
given and whose other tokens are masks. Formulas: docs/drafters.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockdiff.canvas import Batch
from blockdiff.canvas_inputs import canvas_offsets, canvas_positions, canvas_spans, with_canvases
from blockdiff.models.drafted import with_features
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Losses, evaluating

SMOOTHING = 0.5  # alpha of D-PACE
DECAYS = {8: 4.0, 10: 5.0, 16: 7.0}  # block length -> gamma (of the paper); lengths between use the next longer one


class DraftEvaluation(NamedTuple):
    """The cross-entropy in nats and the hit of every token of every block [B, C, L]; 0 and False if not scored."""

    loss_BCL: Tensor
    is_correct_BCL: Tensor


class BlockMask:
    """The corruption of blocks: every token after the first is a mask, at any noise level."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return the masked blocks and which of their tokens are masks, [B, C, L] each."""
        is_masked_BCL = (torch.arange(canvas_BCL.shape[-1], device=canvas_BCL.device) > 0).expand_as(canvas_BCL)
        return canvas_BCL.masked_fill(is_masked_BCL, self.mask_id), is_masked_BCL


class DraftObjective(nn.Module):
    """The module that computes the loss "draft": `objective(batch) -> Losses`; `batch.canvas_count()` is its divisor.

    model: the drafter.
    target: the model that it drafts for. It is frozen and not a submodule.
    loss: the weight of the k-th token of a block, k >= 1: "decay" is exp(-(k - 1) / gamma), "dpace" the token's share
        in the expected accepted length (arXiv 2605.18810).
    targets: cross-entropy to the row's tokens, or KL divergence from the target's predictions.
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
        """The frozen model for which the drafter drafts."""
        return self._target[0]

    def draft_for(self, target: BlockDiffusionModel) -> None:
        """Set the target and freeze it. Raises BlockdiffError for a model that the drafter was not made for."""
        self.model.drafts_for(target)
        self._target = (target.requires_grad_(False).eval(),)

    def forward(self, batch: Batch) -> Losses:
        """Return the weighted sum of the losses of a batch's blocks."""
        batch = with_canvases(batch)
        hidden_BTD, target_BSD = self._blocks(batch)
        is_scored_BCL = batch.is_scored_BCL
        hidden_ND = hidden_BTD[is_scored_BCL.flatten(1)]
        if self.targets == "tokens":
            loss_N = self.model.vocabulary.cross_entropy(hidden_ND, batch.canvas_BCL[is_scored_BCL])
        else:
            S, D = target_BSD.shape[1:]
            before_BT = (batch.start_BC[..., None] + canvas_offsets(batch) - 1).clamp(0, S - 1).flatten(1)
            target_BTD = target_BSD.gather(1, before_BT[..., None].expand(-1, -1, D))
            loss_N = self.model.vocabulary.divergence(hidden_ND, target_BTD[is_scored_BCL.flatten(1)])
        weight_BCL = self._weights(loss_N.detach(), is_scored_BCL) * batch.weight_BC[..., None]
        return {"draft": (weight_BCL[is_scored_BCL].to(loss_N.dtype) * loss_N).sum()}

    def evaluate(self, batch: Batch) -> DraftEvaluation:
        """Return the loss and hit of every token of the blocks, in eval mode and without gradients."""
        with evaluating(self):
            batch = with_canvases(batch)
            is_scored_BCL = batch.is_scored_BCL
            hidden_ND = self._blocks(batch)[0][is_scored_BCL.flatten(1)]
            loss_N, argmax_N = self.model.vocabulary.scores(hidden_ND, batch.canvas_BCL[is_scored_BCL])
            loss_BCL, is_correct_BCL = loss_N.new_zeros(is_scored_BCL.shape), torch.zeros_like(is_scored_BCL)
            loss_BCL[is_scored_BCL] = loss_N
            is_correct_BCL[is_scored_BCL] = argmax_N == batch.canvas_BCL[is_scored_BCL]
            return DraftEvaluation(loss_BCL, is_correct_BCL)

    def _blocks(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The drafter's hidden states of the blocks [B, C * L, D], and the target's of the clean tokens [B, S, D]."""
        model, target = self.model, self.target
        with torch.no_grad():
            spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in target.kinds.items()}
            shown = model.target_layers
            target_BSD, features_BSF = with_features(
                target(batch.tokens_BS, batch.positions_BS, spans, shown=shown)[0], len(shown)
            )
        spans = {name: kind.encode_spans(batch.doc_start_BS) for name, kind in model.kinds.items()}
        _, context = model(features_BSF, batch.positions_BS, spans)
        noisy_BCL, _ = self.corruption.corrupt(batch.canvas_BCL, batch.t_BC, batch.address_BC3, 0)
        spans = {name: canvas_spans(kind, batch) for name, kind in model.kinds.items()}
        hidden_BTD, _ = model(noisy_BCL.flatten(1), canvas_positions(batch), spans, context, True)
        return hidden_BTD, target_BSD

    def _weights(self, loss_N: Tensor, is_scored_BCL: Tensor) -> Tensor:
        """The weight of every token's loss [B, C, L]; values at unscored tokens mean nothing."""
        L = is_scored_BCL.shape[-1]
        if self.loss == "decay":
            gamma = next((gamma for block, gamma in DECAYS.items() if L <= block), max(DECAYS.values()))
            k_L = torch.arange(L, dtype=loss_N.dtype, device=loss_N.device)
            return torch.exp((1 - k_L) / gamma).expand(is_scored_BCL.shape)
        confidence_BCL = loss_N.new_ones(is_scored_BCL.shape)
        confidence_BCL[is_scored_BCL] = SMOOTHING + (1 - SMOOTHING) * torch.exp(-loss_N)
        reached_BCL = confidence_BCL.cumprod(-1) * is_scored_BCL
        return reached_BCL.flip(-1).cumsum(-1).flip(-1)
