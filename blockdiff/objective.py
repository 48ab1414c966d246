"""The training objective: encode clean rows, denoise their canvases, and sum the losses.

DDP wraps `Objective`, the trainer trains it, and held-out evaluation measures it token by token. Noise levels and
coins are in the batch. The training step divides the sums that the objective returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.canvas import CANVAS_FIELDS, Batch
from blockdiff.canvas_inputs import canvas_positions, canvas_spans, corrupt_canvases, with_canvases
from blockdiff.diffusion.corruption import Corruption, UniformCorruption
from blockdiff.diffusion.prediction import leave_one_out_bonus
from blockdiff.diffusion.schedule import Schedule
from blockdiff.diffusion.weight import NoWeight, Weight
from blockdiff.errors import RecipeError
from blockdiff.images import RowImages
from blockdiff.layers.attention import KV
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.scored_positions import (
    LossFactors,
    ScoredPositions,
    marked_indices,
    next_token_pairs,
    summed_loss,
    token_losses,
)
from blockdiff.spans import Sweep
from blockdiff.tensor_pieces import is_spread

ROW_FIELDS = ("tokens_BS", "positions_BS", "doc_start_BS", "is_ar_scored_BS", "ar_weight_BS")  # of clean columns


# The sums of an objective's losses by name, fp32 scalars with gradient. "canvas" and "ar" are in nats; their divisors
# are the objective's `canvas_count(batch)` and the batch's `ar_count()`.
Losses = dict[str, Tensor]


class Evaluation(NamedTuple):
    """The loss and hit of every token. Losses are unweighted, in nats, fp32, and 0 at unscored positions.

    Every canvas is denoised twice, whatever its coin: without the self-conditioning signal (`loss`, `is_correct`) and
    with it (`signal_loss`, `signal_is_correct`). A hit is an argmax that equals the true token. `factor_BCL` is the
    factor of each position's loss in training, 0 if it is not scored: `(factor * loss).sum() / canvas_count` is the
    canvas loss. With the leave-one-out objective, losses and argmax are of the logits with the bonus.
    """

    is_corrupted_BCL: Tensor
    loss_BCL: Tensor
    is_correct_BCL: Tensor
    signal_loss_BCL: Tensor
    signal_is_correct_BCL: Tensor
    ar_loss_BS: Tensor
    ar_is_correct_BS: Tensor
    factor_BCL: Tensor


class Objective(nn.Module):
    """The module that computes the losses "canvas" and "ar": `objective(batch) -> Losses` (docs/objective.md).

    The defaults are those of Google's DiffusionGemma recipe. `requires_grad` of the model's parameters decides what
    trains.

    seed: the seed of the corruption draws, whose addresses are the batch's `address_BC3`.
    weight: the factor of the canvas loss (None: 1).
    prediction: the logits are the posterior given the whole noisy canvas, or predict each token from all others
        (leave_one_out).
    positions: the scored positions of a canvas that have a loss.
    divisor: the positions that `canvas_count` counts, all scored ones or only the corrupted.
    stop_gradient: stop the gradient of the canvas loss at the prefix, so that it does not train the encoder.
    sweep: encode clean rows within both denoise passes. Layers then run twice instead of three times, and sharded
        weights are gathered twice.

    A causal model has only the loss "ar"; its batches have no canvases. Raises RecipeError for leave_one_out unless
    the noise is uniform: its bonus gives a posterior for no other.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        schedule: Schedule,
        corruption: Corruption,
        seed: int = 0,
        *,
        weight: Weight | None = None,
        prediction: Literal["posterior", "leave_one_out"] = "posterior",
        positions: Literal["all", "corrupted"] = "all",
        divisor: Literal["scored", "corrupted"] = "scored",
        stop_gradient: bool = False,
        sweep: bool = False,
    ):
        super().__init__()
        self.model, self.schedule, self.corruption, self.seed = model, schedule, corruption, seed
        self.weight: Weight = weight or NoWeight()
        self.prediction, self.positions, self.stop_gradient = prediction, positions, stop_gradient
        self.sweep, self.divisor = sweep, divisor
        self.bonus_vocabulary: int | None = None  # V of the leave-one-out bonus; None: no bonus
        if prediction == "leave_one_out":
            if not isinstance(corruption, UniformCorruption):
                raise RecipeError(
                    "objective.prediction: leave_one_out is defined for objective.corruption: uniform only, because "
                    "a masked token carries no information; set objective.prediction: posterior"
                )
            self.bonus_vocabulary = corruption.vocab_size

    def forward(self, batch: Batch) -> Losses:
        """Return the sum of each loss over a batch."""
        batch = self._with_features(batch)
        if not self.model.denoises:
            return {"ar": summed_loss(self.model.vocabulary, next_token_pairs(self._encode(batch)[0], batch))}
        batch = with_canvases(batch)
        vocabulary = self.model.vocabulary
        if self.sweep:
            return self._sweep_losses(batch)
        noisy, is_corrupted_BCL = self._corrupted(batch)
        factors = LossFactors(self._factor(batch, is_corrupted_BCL))
        hidden_BSD, past = self._encode_prefix(batch)
        ar_sum = summed_loss(vocabulary, next_token_pairs(hidden_BSD, batch))
        hidden_BTD = self._denoise(noisy, past, self._signal(noisy, past))
        return {"canvas": summed_loss(vocabulary, self._scored(hidden_BTD, batch, noisy, factors)), "ar": ar_sum}

    def canvas_count(self, batch: Batch) -> float:
        """The divisor of the canvas loss of a batch."""
        counts_corrupted = self.divisor == "corrupted" and batch.start_BC.numel() > 0
        return batch.canvas_count(self._corrupted(batch)[1] if counts_corrupted else None)

    def _sweep_losses(self, batch: Batch) -> Losses:
        """Both losses from one sweep and one cross-entropy, which gathers a sharded embedding table only once."""
        noisy, is_corrupted_BCL = self._corrupted(batch)
        factors = LossFactors(self._factor(batch, is_corrupted_BCL))
        has_pairs = bool(batch.on_host.is_ar_scored_BS.any())
        hidden_BTD = self._sweep(noisy, self._signal(noisy, None), has_pairs)
        (B, T, _), (_, S), canvases = hidden_BTD.shape, batch.tokens_BS.shape, noisy.canvas_BCL[0].numel()
        index_BT = torch.arange(B * T, device=hidden_BTD.device).view(B, T)
        scored = [self._scored(index_BT[:, T - canvases :], batch, noisy, factors)]
        if has_pairs:
            scored.append(next_token_pairs(index_BT[:, :S], batch))
        index_N = torch.cat([each.of_token_N for each in scored])
        hidden_ND = F.embedding(index_N, hidden_BTD.flatten(0, 1))  # one pass computes its gradient
        target_N = torch.cat([each.target_N for each in scored])
        observed_N, bonus_N = scored[0].observed_N, scored[0].bonus_N
        if observed_N is not None and bonus_N is not None:  # next tokens have no bonus
            after = len(target_N) - len(bonus_N)
            observed_N, bonus_N = F.pad(observed_N, (0, after)), F.pad(bonus_N, (0, after))
        loss_N = self.model.vocabulary.cross_entropy(hidden_ND, target_N, observed_N, bonus_N)
        parts = loss_N.split([len(each.target_N) for each in scored])
        canvas_sum, *ar_sums = ((each.factor_N * loss).sum() for each, loss in zip(scored, parts, strict=True))
        return {"canvas": canvas_sum, "ar": ar_sums[0] if has_pairs else canvas_sum.new_zeros(())}

    def _with_features(self, batch: Batch) -> Batch:
        """Add the features of a batch's images, which all passes share.

        All ranks must gather the weights of a sharded image side equally often, so a rank without images runs a blank.
        """
        images, side = batch.images, self.model.image_side
        if images is None and side is not None and any(is_spread(parameter) for parameter in side.parameters()):
            images = RowImages.nowhere(side.blank(), *batch.tokens_BS.shape).to(batch.tokens_BS.device)
        if images is None:
            return batch
        return replace(batch, images=images.with_features(self.model.image_features(images.inputs)))

    def _corrupted(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The batch with noisy canvases, or with a sampler's states, and which positions are corrupted [B, C, L]."""
        if batch.visited is not None:
            tokens_BCL = batch.visited.tokens_BCL
            return replace(batch, canvas_BCL=tokens_BCL), tokens_BCL != batch.canvas_BCL
        return corrupt_canvases(batch, self.schedule, self.corruption, self.seed, self.model.vocab_size)

    def _encode_prefix(self, batch: Batch) -> tuple[Tensor, list[KV]]:
        """Encode the clean rows: hidden states [B, S, D], and each layer's kv of the columns that canvases see."""
        hidden_BSD, kv = self._encode(batch)
        columns = _columns_seen(batch)
        past = [tuple((x.detach() if self.stop_gradient else x)[:, :columns] for x in layer) for layer in kv]
        return hidden_BSD, past

    def _encode(self, batch: Batch) -> tuple[Tensor, list[KV]]:
        """Encode the clean rows: hidden states [B, S, D] and each layer's kv."""
        kinds = self.model.kinds.items()
        spans = {name: kind.encode_spans(batch.doc_start_BS, None, batch.images) for name, kind in kinds}
        hidden_BSD, kv = self.model(batch.tokens_BS, batch.positions_BS, spans, images=batch.images)
        return hidden_BSD, kv

    def _signal(self, noisy: Batch, past: list[KV] | None) -> Tensor | None:
        """The self-conditioning signal [B, C * L, D], or None if the model reads none.

        Canvases with a coin get the soft embeddings of pass one, others 0. States that a sampler visited have the
        sampler's signal. past: the prefix (None: pass one encodes it).

        All ranks of a sharded model must gather its weights equally often, forward and backward. A rank without a coin
        therefore runs pass one over one canvas and drops the result.
        """
        if self.model.self_conditioning is None:
            return None
        if noisy.visited is not None:
            return noisy.visited.signal_BCLD.flatten(1, 2)
        has_signal_BC = noisy.on_host.coin_BC & (noisy.on_host.length_BC > 0)
        D = self.model.vocabulary.table.shape[1]
        (B, C, L), index_N = noisy.canvas_BCL.shape, marked_indices(has_signal_BC, self.model.device)
        soft_NLD = torch.zeros(B * C, L, D, dtype=self.model.dtype, device=self.model.device)
        if len(index_N):
            with_coin, rows = noisy.select(has_signal_BC)
            prefix = None if past is None else [tuple(x[rows] for x in layer) for layer in past]
            soft_NLD[index_N] = self._pass_one(with_coin, prefix)
        elif torch.distributed.is_initialized():
            others = ("images", "visited", "host")
            tensors = {f.name: getattr(noisy, f.name)[:1] for f in fields(noisy) if f.name not in others}
            first = Batch(**tensors | {name: tensors[name][:, :1] for name in CANVAS_FIELDS})
            prefix = None if past is None else [tuple(x[:1] for x in layer) for layer in past]
            soft_NLD[index_N] = self._pass_one(first, prefix)[:0]
        return soft_NLD.view(B, C * L, D)

    def _pass_one(self, noisy: Batch, past: list[KV] | None) -> Tensor:
        """The soft embeddings [canvases, L, D] of the canvases that are not absent, in row-major order.

        Gradient flows to the table that embeds the predictions, not through the predictions.
        """
        with torch.no_grad():
            if past is None:
                columns = max(1, _columns_seen(noisy))
                prefix_fields = {name: getattr(noisy, name)[:, :columns] for name in ROW_FIELDS}
                images = None if noisy.images is None else noisy.images.first_columns(columns)
                prefix = replace(noisy, **prefix_fields, images=images)
                hidden_BTD = self._sweep(prefix, None, False)[:, -noisy.canvas_BCL[0].numel() :]
            else:
                hidden_BTD = self._denoise(noisy, past, None)
        soft_BTD = self.model.vocabulary.soft_embedding(hidden_BTD)
        index_N = marked_indices(noisy.on_host.length_BC > 0, soft_BTD.device)
        return soft_BTD.view(-1, noisy.canvas_BCL.shape[-1], soft_BTD.shape[-1])[index_N]

    def _denoise(self, noisy: Batch, past: list[KV], soft_BTD: Tensor | None) -> Tensor:
        """Run the noisy canvases against the prefix: hidden states [B, C * L, D]."""
        spans = {name: canvas_spans(kind, noisy) for name, kind in self.model.kinds.items()}
        hidden_BTD, _ = self.model(noisy.canvas_BCL.flatten(1), canvas_positions(noisy), spans, past, True, soft_BTD)
        return hidden_BTD

    def _sweep(self, noisy: Batch, soft_BTD: Tensor | None, wants_clean: bool) -> Tensor:
        """Run the clean rows and the noisy canvases in one call: hidden states [B, S + C * L, D].

        Unless `wants_clean`, the hidden states of the clean rows may be left out of the result.
        """
        columns = _columns_seen(noisy)
        spans = {
            name: Sweep(
                kind.encode_spans(noisy.doc_start_BS, None, noisy.images),
                canvas_spans(kind, noisy),
                columns,
                self.stop_gradient,
                wants_clean,
            )
            for name, kind in self.model.kinds.items()
        }
        tokens_BT = torch.cat([noisy.tokens_BS, noisy.canvas_BCL.flatten(1)], 1)
        positions_BT = torch.cat([noisy.positions_BS, canvas_positions(noisy)], 1)
        hidden_BTD: Tensor = self.model(tokens_BT, positions_BT, spans, soft_BTD=soft_BTD, images=noisy.images)[0]
        return hidden_BTD

    def _scored(self, of_token_BT: Tensor, batch: Batch, noisy: Batch, factors: LossFactors) -> ScoredPositions:
        """The scored positions of the canvas loss: those whose factor is not 0.

        of_token_BT: hidden states [B, C * L, D] or indices [B, C * L] of the canvases' tokens.
        """
        bonus_BC, index_N = self._bonus(batch), factors.indices()
        observed_N = bonus_N = None
        if bonus_BC is not None:
            observed_N = noisy.canvas_BCL.flatten()[index_N]
            bonus_N = bonus_BC[..., None].expand_as(noisy.canvas_BCL).flatten()[index_N]
        target_N, factor_N = batch.canvas_BCL.flatten()[index_N], factors.factor_N[index_N]
        return ScoredPositions(of_token_BT.flatten(0, 1)[index_N], target_N, factor_N, observed_N, bonus_N)

    def _factor(self, batch: Batch, is_corrupted_BCL: Tensor) -> Tensor:
        """The factor of each canvas position's loss, fp32 [B, C, L]; 0 if the position is not scored.

        Raises RecipeError if a weight from Python returns another shape.
        """
        has_loss_BCL = batch.is_scored_BCL
        if self.positions == "corrupted":
            has_loss_BCL = has_loss_BCL & is_corrupted_BCL
        copies = (x.clone() for x in (batch.t_BC, batch.canvas_BCL, is_corrupted_BCL))
        weight_BCL = self.weight.weigh(self.schedule, *copies)
        if (
            not isinstance(weight_BCL, Tensor)
            or weight_BCL.dim() != 3
            or any(n not in (1, size) for n, size in zip(weight_BCL.shape, has_loss_BCL.shape, strict=True))
        ):
            shape = [*weight_BCL.shape] if isinstance(weight_BCL, Tensor) else f"as a {type(weight_BCL).__name__}"
            shapes = f"{shape}; it should return {[*has_loss_BCL.shape]} or {[*batch.t_BC.shape, 1]}"
            raise RecipeError(f"objective.weight: {type(self.weight).__name__}.weigh() returned weights {shapes}")
        return batch.weight_BC[..., None] * weight_BCL * has_loss_BCL

    def _bonus(self, batch: Batch) -> Tensor | None:
        """The bonus on the logits of the observed tokens, fp32 [B, C], or None. The signal never has it."""
        if self.bonus_vocabulary is None:
            return None
        return leave_one_out_bonus(self.schedule, batch.t_BC, self.bonus_vocabulary)

    def evaluate(self, batch: Batch) -> Evaluation:
        """Return the loss and hit of every token of a batch, in eval mode and without gradients.

        There are three passes: encode, denoise every canvas without the signal, denoise every canvas with it. A model
        that reads no signal needs only the first two.
        """
        with evaluating(self):
            batch = self._with_features(batch)
            return self._evaluate(with_canvases(batch) if self.model.denoises else batch)

    def _evaluate(self, batch: Batch) -> Evaluation:
        vocabulary, next_BS = self.model.vocabulary, batch.tokens_BS.roll(-1, dims=1)
        if not self.model.denoises:
            hidden_BSD, _ = self._encode(batch)
            ar_loss_BS, ar_is_correct_BS = token_losses(vocabulary, hidden_BSD, next_BS, batch.is_ar_scored_BS)
            zero = torch.zeros_like(batch.is_scored_BCL)
            return Evaluation(zero, zero, zero, zero, zero, ar_loss_BS, ar_is_correct_BS, zero)
        (noisy, is_corrupted_BCL), (hidden_BSD, past) = self._corrupted(batch), self._encode_prefix(batch)
        ar_loss_BS, ar_is_correct_BS = token_losses(vocabulary, hidden_BSD, next_BS, batch.is_ar_scored_BS)
        first_BTD = self._denoise(noisy, past, None)
        target_BCL, is_scored_BCL, bonus_BC = batch.canvas_BCL, batch.is_scored_BCL, self._bonus(batch)
        bonus_BCL = None if bonus_BC is None else bonus_BC[..., None].expand_as(target_BCL)
        loss_BCL, is_correct_BCL = token_losses(
            vocabulary, first_BTD, target_BCL, is_scored_BCL, noisy.canvas_BCL, bonus_BCL
        )
        signal_loss_BCL, signal_is_correct_BCL = loss_BCL, is_correct_BCL
        if self.model.self_conditioning is not None:
            second_BTD = self._denoise(noisy, past, vocabulary.soft_embedding(first_BTD))
            signal_loss_BCL, signal_is_correct_BCL = token_losses(
                vocabulary, second_BTD, target_BCL, is_scored_BCL, noisy.canvas_BCL, bonus_BCL
            )
        return Evaluation(
            is_corrupted_BCL=is_corrupted_BCL,
            loss_BCL=loss_BCL,
            is_correct_BCL=is_correct_BCL,
            signal_loss_BCL=signal_loss_BCL,
            signal_is_correct_BCL=signal_is_correct_BCL,
            ar_loss_BS=ar_loss_BS,
            ar_is_correct_BS=ar_is_correct_BS,
            factor_BCL=self._factor(batch, is_corrupted_BCL),
        )


def _columns_seen(batch: Batch) -> int:
    """The number of leading columns that any canvas sees: a canvas sees no clean token at or after its start."""
    return int(batch.on_host.start_BC.max())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a block without gradients and with every submodule in eval mode; restore each one's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
