"""The objective: it encodes clean rows, denoises canvases without and with the signal, and gives both losses.

DDP wraps the objective, the trainer trains it, and held-out evaluation measures it token by token. Noise levels and
coins come with the batch, and the training step divides the sums that the objective returns.
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

from blockdiff.canvas import CANVAS_FIELDS, Batch, sent
from blockdiff.diffusion.corruption import Corruption, UniformCorruption
from blockdiff.diffusion.prediction import leave_one_out_bonus
from blockdiff.diffusion.schedule import Schedule
from blockdiff.diffusion.weight import NoWeight, Weight
from blockdiff.errors import RecipeError
from blockdiff.images import RowImages
from blockdiff.layers.attention import KV
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.layer_kind import LayerKind
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.spans import Spans, Sweep
from blockdiff.tensor_pieces import is_spread

ROW_FIELDS = ("tokens_BS", "positions_BS", "doc_start_BS", "is_ar_scored_BS", "ar_weight_BS")  # of clean columns


# The sums of an objective's losses by name, fp32 scalars with gradient. "canvas" and "ar" are in nats, and the
# objective's `canvas_count(batch)` and the batch's `ar_count()` divide them.
Losses = dict[str, Tensor]


class Evaluation(NamedTuple):
    """Losses and hits of every token; losses in nats, unweighted, fp32, 0 where nothing is scored.

    Every canvas is run twice, whatever its coin: `loss`, `is_correct` without the self-conditioning signal,
    `signal_loss`, `signal_is_correct` with it. An argmax is correct when it is the true token. `factor_BCL` is what
    training multiplies a position's loss by (0 where it is not scored): `(factor * loss).sum() / canvas_count` is
    the canvas loss. For the leave-one-out objective losses and argmax are of the logits with the bonus.
    """

    is_corrupted_BCL: Tensor
    loss_BCL: Tensor
    is_correct_BCL: Tensor
    signal_loss_BCL: Tensor
    signal_is_correct_BCL: Tensor
    ar_loss_BS: Tensor
    ar_is_correct_BS: Tensor
    factor_BCL: Tensor


class _Factors:
    """The factors of canvas positions [B, C, L], and their places on the way to the host.

    Made before the passes, so that the host waits for this copy alone and not for the passes queued after it.
    """

    def __init__(self, factor_BCL: Tensor):
        self.of_all_N, self.device, self._copied = factor_BCL.flatten(), factor_BCL.device, None
        self._counts_N = self.of_all_N != 0
        if factor_BCL.is_cuda:
            on_host_N = torch.empty(self._counts_N.shape, dtype=torch.bool, pin_memory=True)
            self._counts_N = on_host_N.copy_(self._counts_N, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def places(self) -> Tensor:
        """The places [N] of the factors that are not 0, on the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return _marked(self._counts_N, self.device)


class _Scored(NamedTuple):
    """The N positions of a loss, with their true tokens and the factor of each position's loss.

    of_token_N: the hidden states [N, D], or in a sweep their places among all tokens of the call [N]. observed_N,
    bonus_N: the noisy tokens and what their logits gain (both or neither).
    """

    of_token_N: Tensor
    target_N: Tensor
    factor_N: Tensor
    observed_N: Tensor | None = None
    bonus_N: Tensor | None = None


class Objective(nn.Module):
    """The sums of a batch's losses, "canvas" and "ar": `objective(batch) -> Losses` (formulas: docs/objective.md).

    The defaults are Google's DiffusionGemma recipe. Which parameters train is not decided here.

    seed: of the corruption draws, which are addressed by the batch's `address_BC3`. weight: the factor of the canvas
    loss; None = 1. prediction: whether the logits are the posterior given the whole noisy canvas, or (leave_one_out)
    predict each token from all others. positions: the positions of a canvas that have a loss. divisor: the positions
    that `canvas_count` counts, all scored ones or the corrupted of them. stop_gradient: whether the canvas loss leaves
    the encoder alone. sweep: whether clean rows are encoded in the calls of both denoise passes instead of in one of
    their own: every layer then runs twice and not three times, and sharded weights are gathered twice.

    A causal model has the loss "ar" alone; its batches have no canvases. Raises RecipeError for leave_one_out with
    other than uniform noise, for which its bonus gives no posterior.
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
                    "objective.prediction: leave_one_out is defined for objective.corruption: uniform only; "
                    "with mask corruption a masked position tells nothing of itself, use posterior"
                )
            self.bonus_vocabulary = corruption.vocab_size

    def forward(self, batch: Batch) -> Losses:
        """Return the sum of each loss over a batch."""
        batch = self._with_features(batch)
        if not self.model.denoises:
            return {"ar": _loss(self.model.vocabulary, _pairs(self._encode_alone(batch)[0], batch))}
        batch = complete(batch)
        vocabulary = self.model.vocabulary
        if self.sweep:
            return self._losses_of_sweep(batch)
        noisy, is_corrupted_BCL = self._corrupted(batch)
        factors = _Factors(self._factor(batch, is_corrupted_BCL))
        hidden_BSD, past = self._encode(batch)
        ar_sum = _loss(vocabulary, _pairs(hidden_BSD, batch))
        hidden_BTD = self._denoise(noisy, past, self._signal(noisy, past))
        return {"canvas": _loss(vocabulary, self._scored(hidden_BTD, batch, noisy, factors)), "ar": ar_sum}

    def canvas_count(self, batch: Batch) -> float:
        """The divisor of the canvas loss of a batch."""
        counts_corrupted = self.divisor == "corrupted" and batch.start_BC.numel() > 0
        return batch.canvas_count(self._corrupted(batch)[1] if counts_corrupted else None)

    def _losses_of_sweep(self, batch: Batch) -> Losses:
        """Both sums from one call of the vocabulary, so that its table is gathered once and gets its gradient once."""
        noisy, is_corrupted_BCL = self._corrupted(batch)
        factors = _Factors(self._factor(batch, is_corrupted_BCL))
        has_pairs = bool(batch.on_host.is_ar_scored_BS.any())
        hidden_BTD = self._sweep(noisy, self._signal(noisy, None), has_pairs)
        (B, T, _), (_, S), canvases = hidden_BTD.shape, batch.tokens_BS.shape, noisy.canvas_BCL[0].numel()
        place_BT = torch.arange(B * T, device=hidden_BTD.device).view(B, T)
        scored = [self._scored(place_BT[:, T - canvases :], batch, noisy, factors)]
        if has_pairs:
            scored.append(_pairs(place_BT[:, :S], batch))
        place_N = torch.cat([each.of_token_N for each in scored])
        hidden_ND = F.embedding(place_N, hidden_BTD.flatten(0, 1))  # its gradient is made in one pass
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
        """The batch with the features of its images, made once for all passes.

        Ranks gather the weights of a sharded image side equally often: one whose rows have no image looks at a blank.
        """
        images, side = batch.images, self.model.image_side
        if images is None and side is not None and any(is_spread(parameter) for parameter in side.parameters()):
            images = RowImages.nowhere(side.blank(), *batch.tokens_BS.shape).to(batch.tokens_BS.device)
        if images is None:
            return batch
        return replace(batch, images=images.with_features(self.model.image_features(images.inputs)))

    def _corrupted(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The batch with noise in its canvases, or the states visited, and its corrupted positions [B, C, L]."""
        if batch.visited is not None:
            tokens_BCL = batch.visited.tokens_BCL
            return replace(batch, canvas_BCL=tokens_BCL), tokens_BCL != batch.canvas_BCL
        return corrupted(batch, self.schedule, self.corruption, self.seed, self.model.vocab_size)

    def _encode(self, batch: Batch) -> tuple[Tensor, list[KV]]:
        """Run the clean rows: hidden states [B, S, D], and the prefix that canvases see."""
        hidden_BSD, kv = self._encode_alone(batch)
        columns = _columns_seen(batch)
        return hidden_BSD, [tuple((x.detach() if self.stop_gradient else x)[:, :columns] for x in of) for of in kv]

    def _encode_alone(self, batch: Batch) -> tuple[Tensor, list[KV]]:
        """Run the clean rows: hidden states [B, S, D] and every layer's kv."""
        kinds = self.model.kinds.items()
        spans = {name: kind.encode_spans(batch.doc_start_BS, None, batch.images) for name, kind in kinds}
        hidden_BSD, kv = self.model(batch.tokens_BS, batch.positions_BS, spans, images=batch.images)
        return hidden_BSD, kv

    def _signal(self, noisy: Batch, past: list[KV] | None) -> Tensor | None:
        """The self-conditioning signal [B, C * L, D]: soft embeddings from pass one of the coin canvases, 0 elsewhere.

        None if the model reads none.

        past: the prefix (None: pass one encodes it itself). With several processes a rank without a coin canvas runs
        pass one over one canvas and uses none of its result: the ranks of a sharded model must gather its weights
        equally often, forward and backward. States that a sampler visited bring the signal that it had.
        """
        if self.model.self_conditioning is None:
            return None
        if noisy.visited is not None:
            return noisy.visited.signal_BCLD.flatten(1, 2)
        has_signal_BC = noisy.on_host.coin_BC & (noisy.on_host.length_BC > 0)
        D = self.model.vocabulary.table.shape[1]
        (B, C, L), place_N = noisy.canvas_BCL.shape, _marked(has_signal_BC, self.model.device)
        soft_NLD = torch.zeros(B * C, L, D, dtype=self.model.dtype, device=self.model.device)
        if len(place_N):
            kept, rows = noisy.select(has_signal_BC)
            prefix = None if past is None else [tuple(x[rows] for x in layer) for layer in past]
            soft_NLD[place_N] = self._pass_one(kept, prefix)
        elif torch.distributed.is_initialized():
            others = ("images", "visited", "host")
            of_rows = {f.name: getattr(noisy, f.name)[:1] for f in fields(noisy) if f.name not in others}
            first = Batch(**of_rows | {name: of_rows[name][:, :1] for name in CANVAS_FIELDS})
            prefix = None if past is None else [tuple(x[:1] for x in layer) for layer in past]
            soft_NLD[place_N] = self._pass_one(first, prefix)[:0]
        return soft_NLD.view(B, C * L, D)

    def _pass_one(self, noisy: Batch, past: list[KV] | None) -> Tensor:
        """Soft embeddings [canvases, L, D] of the canvases present, in row-major order.

        The logits carry no gradient; the table that embeds them does.
        """
        with torch.no_grad():
            if past is None:
                columns = max(1, _columns_seen(noisy))
                seen = {name: getattr(noisy, name)[:, :columns] for name in ROW_FIELDS}
                images = None if noisy.images is None else noisy.images.first_columns(columns)
                beginning = replace(noisy, **seen, images=images)
                hidden_BTD = self._sweep(beginning, None, False)[:, -noisy.canvas_BCL[0].numel() :]
            else:
                hidden_BTD = self._denoise(noisy, past, None)
        soft_BTD = self.model.vocabulary.soft_embedding(hidden_BTD)
        place_N = _marked(noisy.on_host.length_BC > 0, soft_BTD.device)
        return soft_BTD.view(-1, noisy.canvas_BCL.shape[-1], soft_BTD.shape[-1])[place_N]

    def _denoise(self, noisy: Batch, past: list[KV], soft_BTD: Tensor | None) -> Tensor:
        """Run the noisy canvases side by side against the prefix: hidden states [B, C * L, D]."""
        spans = {name: spans_of_canvases(kind, noisy) for name, kind in self.model.kinds.items()}
        hidden_BTD, _ = self.model(noisy.canvas_BCL.flatten(1), positions(noisy), spans, past, True, soft_BTD)
        return hidden_BTD

    def _sweep(self, noisy: Batch, soft_BTD: Tensor | None, wants_clean: bool) -> Tensor:
        """Run the clean rows and the noisy canvases in one call: hidden states [B, S + C * L, D].

        Without `wants_clean` the hidden states of the clean rows may be missing.
        """
        columns = _columns_seen(noisy)
        spans = {
            name: Sweep(
                kind.encode_spans(noisy.doc_start_BS, None, noisy.images),
                spans_of_canvases(kind, noisy),
                columns,
                self.stop_gradient,
                wants_clean,
            )
            for name, kind in self.model.kinds.items()
        }
        tokens_BT = torch.cat([noisy.tokens_BS, noisy.canvas_BCL.flatten(1)], 1)
        positions_BT = torch.cat([noisy.positions_BS, positions(noisy)], 1)
        hidden_BTD: Tensor = self.model(tokens_BT, positions_BT, spans, soft_BTD=soft_BTD, images=noisy.images)[0]
        return hidden_BTD

    def _scored(self, of_token_BT: Tensor, batch: Batch, noisy: Batch, factors: _Factors) -> _Scored:
        """The tokens of the canvas loss: every position of the canvases whose factor is not 0."""
        bonus_BC, place_N = self._bonus(batch), factors.places()
        observed_N = bonus_N = None
        if bonus_BC is not None:
            observed_N = noisy.canvas_BCL.flatten()[place_N]
            bonus_N = bonus_BC[..., None].expand_as(noisy.canvas_BCL).flatten()[place_N]
        target_N, factor_N = batch.canvas_BCL.flatten()[place_N], factors.of_all_N[place_N]
        return _Scored(of_token_BT.flatten(0, 1)[place_N], target_N, factor_N, observed_N, bonus_N)

    def _factor(self, batch: Batch, is_corrupted_BCL: Tensor) -> Tensor:
        """The factor of each canvas position's loss, fp32 [B, C, L]; 0 where it has none."""
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
            shapes = f"{shape} instead of {[*has_loss_BCL.shape]} or {[*batch.t_BC.shape, 1]}"
            raise RecipeError(f"objective.weight: {type(self.weight).__name__} gave weights {shapes}; reshape them")
        return batch.weight_BC[..., None] * weight_BCL * has_loss_BCL

    def _bonus(self, batch: Batch) -> Tensor | None:
        """The gain of the observed tokens' logits, fp32 [B, C], or None; the signal is always made without it."""
        if self.bonus_vocabulary is None:
            return None
        return leave_one_out_bonus(self.schedule, batch.t_BC, self.bonus_vocabulary)

    def evaluate(self, batch: Batch) -> Evaluation:
        """Losses and hits of every token of a batch, in eval mode and without gradients.

        Three passes, as in training: encode, denoise every canvas without a signal, denoise every canvas with it; for a
        model that reads no signal two.
        """
        with evaluating(self):
            batch = self._with_features(batch)
            return self._evaluate(complete(batch) if self.model.denoises else batch)

    def _evaluate(self, batch: Batch) -> Evaluation:
        vocabulary, next_BS = self.model.vocabulary, batch.tokens_BS.roll(-1, dims=1)
        if not self.model.denoises:
            hidden_BSD, _ = self._encode_alone(batch)
            ar_loss_BS, ar_is_correct_BS = _scores(vocabulary, hidden_BSD, next_BS, batch.is_ar_scored_BS)
            nothing = torch.zeros_like(batch.is_scored_BCL)
            return Evaluation(nothing, nothing, nothing, nothing, nothing, ar_loss_BS, ar_is_correct_BS, nothing)
        (noisy, is_corrupted_BCL), (hidden_BSD, past) = self._corrupted(batch), self._encode(batch)
        ar_loss_BS, ar_is_correct_BS = _scores(vocabulary, hidden_BSD, next_BS, batch.is_ar_scored_BS)
        first_BTD = self._denoise(noisy, past, None)
        target_BCL, is_scored_BCL, bonus_BC = batch.canvas_BCL, batch.is_scored_BCL, self._bonus(batch)
        bonus_BCL = None if bonus_BC is None else bonus_BC[..., None].expand_as(target_BCL)
        loss_BCL, is_correct_BCL = _scores(
            vocabulary, first_BTD, target_BCL, is_scored_BCL, noisy.canvas_BCL, bonus_BCL
        )
        signal_loss_BCL, signal_is_correct_BCL = loss_BCL, is_correct_BCL
        if self.model.self_conditioning is not None:
            second_BTD = self._denoise(noisy, past, vocabulary.soft_embedding(first_BTD))
            signal_loss_BCL, signal_is_correct_BCL = _scores(
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


def _pairs(of_token_BS: Tensor, batch: Batch) -> _Scored:
    """The tokens of the AR loss: every scored pair of a token and the next one of the clean rows."""
    target_BS = batch.tokens_BS.roll(-1, dims=1)
    place_N = _marked(batch.on_host.is_ar_scored_BS, target_BS.device)
    target_N, weight_N = target_BS.flatten()[place_N], batch.ar_weight_BS.flatten()[place_N]
    return _Scored(of_token_BS.flatten(0, 1)[place_N], target_N, weight_N)


def _marked(is_marked: Tensor, device: torch.device) -> Tensor:
    """The places [N] of what is True, in row-major order, on a device; for marks on a GPU the host would wait."""
    return sent(is_marked.flatten().nonzero()[:, 0], device)


def _loss(vocabulary: Vocabulary, scored: _Scored) -> Tensor:
    """The sum in nats of the cross-entropies of the true tokens, each times its factor, an fp32 scalar."""
    loss_N = vocabulary.cross_entropy(scored.of_token_N, scored.target_N, scored.observed_N, scored.bonus_N)
    return (scored.factor_N * loss_N).sum()


def _columns_seen(batch: Batch) -> int:
    """The largest number of row columns that a canvas sees: no canvas sees a clean token at or after its start."""
    return int(batch.on_host.start_BC.max())


def spans_of_canvases(kind: LayerKind, noisy: Batch) -> Spans:
    """The spans of the canvases' tokens in layers of a kind."""
    return kind.denoise_spans(noisy.start_BC, noisy.doc_start_BC, noisy.length_BC, noisy.canvas_BCL.shape[-1])


def positions(noisy: Batch) -> Tensor:
    """The positions [B, C * L] of the canvases' tokens in their documents."""
    return ((noisy.start_BC - noisy.doc_start_BC)[..., None] + places(noisy)).flatten(1)


def places(batch: Batch) -> Tensor:
    """The places [L] of tokens in a canvas."""
    return torch.arange(batch.canvas_BCL.shape[-1], device=batch.start_BC.device)


def corrupted(
    batch: Batch, schedule: Schedule, corruption: Corruption, seed: int, vocab_size: int
) -> tuple[Batch, Tensor]:
    """The batch with noise in its canvases, but in their pinned places, and its corrupted positions [B, C, L]."""
    # copies, for parts from Python may write into their arguments
    alpha_BC = schedule.alpha(batch.t_BC.clone())
    made = corruption.corrupt(batch.canvas_BCL.clone(), alpha_BC, batch.address_BC3.clone(), seed)
    noisy_BCL, is_corrupted_BCL = _noise(made, batch.canvas_BCL, corruption, vocab_size)
    noisy_BCL = batch.canvas_BCL.where(batch.is_pinned_BCL, noisy_BCL)
    return replace(batch, canvas_BCL=noisy_BCL), is_corrupted_BCL & ~batch.is_pinned_BCL


def _noise(
    made: tuple[Tensor, Tensor], canvas_BCL: Tensor, corruption: Corruption, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The noisy canvases and the marks that a corruption made; RecipeError where they are of another form.

    That the vocabulary has the tokens is checked on a CPU alone, where nothing has to wait for the answer.
    """
    expected = [(canvas_BCL.shape, canvas_BCL.dtype), (canvas_BCL.shape, torch.bool)]
    if not isinstance(made, tuple) or [(getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in made] != expected:
        parts = made if isinstance(made, tuple) else (made,)
        given = " and ".join(f"{x.dtype} {[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        shape = [*canvas_BCL.shape]
        raise RecipeError(
            f"objective.corruption: {type(corruption).__name__} gave {given}, not noisy tokens torch.int64 {shape} and "
            f"marks torch.bool {shape}; change its corrupt()"
        )
    if canvas_BCL.is_cpu and canvas_BCL.numel():
        ends = [int(token) for token in made[0].aminmax()]
        if outside := [token for token in ends if not 0 <= token < vocab_size]:
            raise RecipeError(
                f"objective.corruption: {type(corruption).__name__} gave token {outside[0]}, which is none of the "
                f"model's {vocab_size}; change its corrupt()"
            )
    return made


def complete(batch: Batch) -> Batch:
    """The batch, with an absent canvas per row where it has none, so that every parameter is used."""
    if batch.start_BC.numel():
        return batch
    empty = {name: getattr(batch, name) for name in CANVAS_FIELDS}
    host = None if batch.host is None else complete(batch.host)
    return replace(batch, **{name: x.new_zeros(x.shape[0], 1, *x.shape[2:]) for name, x in empty.items()}, host=host)


def _scores(
    vocabulary: Vocabulary,
    hidden: Tensor,
    target: Tensor,
    is_scored: Tensor,
    observed: Tensor | None = None,
    bonus: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The losses, and True where the argmax is the target, in the shape of `target`; 0 and False where not scored.

    hidden: the hidden states of all tokens in that order [..., D]. observed, bonus: noisy tokens and the gain of their
    logits (None: 0).
    """
    hidden_ND = hidden.view(*target.shape, -1)[is_scored]
    observed_N, bonus_N = (None, None) if observed is None or bonus is None else (observed[is_scored], bonus[is_scored])
    loss_N, argmax_N = vocabulary.scores(hidden_ND, target[is_scored], observed_N, bonus_N)
    loss = loss_N.new_zeros(target.shape)
    is_correct = torch.zeros_like(is_scored)
    loss[is_scored], is_correct[is_scored] = loss_N, argmax_N == target[is_scored]
    return loss, is_correct


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Surrounds an evaluation: no gradient, every part in eval mode; afterwards each returns to its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
