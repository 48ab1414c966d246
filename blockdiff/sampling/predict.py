"""From hidden states to the statistics of every position that a denoising step needs, computed only here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels import Kernels
from blockdiff.kernels.vocabulary import ClassStats, Penalty, Shaping, Stats
from blockdiff.sampling.canvas_control import CanvasControl
from blockdiff.sampling.constraints.paths import paths
from blockdiff.sampling.constraints.token_automaton import TokenAutomaton
from blockdiff.sampling.strategy import Shape
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel


@dataclass(frozen=True)
class PredictInputs:
    """The inputs of the statistics of a step over B canvases.

    hidden_BLD: the model's hidden states; tokens_BL: the step's input tokens; temperature: one number or one per
    canvas; uniform_BL: the numbers in [0, 1) that pick the samples; step_B: the step number of each canvas, int64, on
    which the draws of canvases under controls depend.
    """

    hidden_BLD: Tensor
    tokens_BL: Tensor
    temperature: Tensor | float
    uniform_BL: Tensor
    step_B: Tensor | None = None

    def select(self, rows: Sequence[int]) -> PredictInputs:
        """Return the inputs of the canvases at `rows`."""
        chosen = torch.tensor(rows, device=self.tokens_BL.device)
        return PredictInputs(
            hidden_BLD=self.hidden_BLD[chosen],
            tokens_BL=self.tokens_BL[chosen],
            temperature=self.temperature[chosen] if isinstance(self.temperature, Tensor) else self.temperature,
            uniform_BL=self.uniform_BL[chosen],
            step_B=None if self.step_B is None else self.step_B[chosen],
        )


def predict(
    model: BlockDiffusionModel,
    inputs: PredictInputs,
    controls: Sequence[CanvasControl] = (),
    shapes: Sequence[Shape] | None = None,
    mask_id: int | None = None,
) -> Stats:
    """Compute the statistics of a step over B canvases, each [B, L] (the soft embedding [B, L, D]).

    controls: the allowed tokens of rows that have a control; shapes: the filters of the other rows, and whether they
    draw (None: they draw without filters). Under mask noise the mask is never predicted, and a token that is not a mask
    is predicted as itself.
    """
    distinct = {id(shape): shape for shape in shapes or ()}.values()
    if all(shape.is_plain and not shape.greedy for shape in distinct):
        shapes = None
    if not controls:
        return _free(model, inputs, shapes, mask_id)

    def controlled(each: CanvasControl) -> Stats:
        some = inputs if each.rows is None else inputs.select(each.rows)
        greedy = None if shapes is None else [shapes[row].greedy for row in each.rows or range(len(shapes))]
        return controlled_stats(model, some, each, mask_id, greedy)

    if controls[0].rows is None:
        return controlled(controls[0])
    parts = [controlled(each) for each in controls]
    order = [row for each in controls for row in each.rows or ()]
    if free := sorted(set(range(len(inputs.tokens_BL))).difference(order)):
        of_rows = None if shapes is None else [shapes[row] for row in free]
        parts.append(_free(model, inputs.select(free), of_rows, mask_id))
    return _in_order(parts, order + free)


def _in_order(parts: Sequence[Stats], order: Sequence[int]) -> Stats:
    """Concatenate parts and sort their rows; `order` has the row numbers of all parts in turn."""
    if len(parts) == 1 and list(order) == sorted(order):
        return parts[0]
    back = torch.tensor(order, device=parts[0].argmax.device).argsort()
    return Stats(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))


def _free(
    model: BlockDiffusionModel,
    inputs: PredictInputs,
    shapes: Sequence[Shape] | None,
    mask_id: int | None,
) -> Stats:
    """Compute the statistics of rows without control; rows whose shapes have the same filters are computed together."""
    if shapes is None:
        return _alike(model, inputs, mask_id)
    rows_of: dict[Shape, list[int]] = {}
    for row, shape in enumerate(shapes):
        rows_of.setdefault(_at_any_temperature(shape), []).append(row)
    parts = []
    for shape, rows in rows_of.items():
        some = inputs if len(rows_of) == 1 else inputs.select(rows)
        shaping = Shaping(shape.top_k, shape.top_p, shape.min_p)
        parts.append(_alike(model, some, mask_id, shaping if shaping.has_filters else None, shape.greedy))
    return _in_order(parts, [row for rows in rows_of.values() for row in rows])


@functools.lru_cache(maxsize=1024)
def _at_any_temperature(shape: Shape) -> Shape:
    """Return the shape at temperature 1, the key under which rows of any temperature are grouped."""
    return replace(shape, temperature=1.0)


def _alike(
    model: BlockDiffusionModel,
    inputs: PredictInputs,
    mask_id: int | None,
    shaping: Shaping | None = None,
    greedy: bool = False,
) -> Stats:
    """Compute the statistics of rows without control that all have the same filters."""
    vocabulary, tokens_BL, allowed_BLW = model.vocabulary, inputs.tokens_BL, None
    if mask_id is not None:
        allowed_BLW = vocabulary.all_but(mask_id, tokens_BL.device).expand(*tokens_BL.shape, -1)
    stats = vocabulary.stats(inputs.hidden_BLD, inputs.temperature, inputs.uniform_BL, allowed_BLW, shaping)
    if greedy:
        stats = stats._replace(sample=stats.best, log_probability=stats.best_log_probability)
    return stats if mask_id is None else carried_over(stats, tokens_BL, mask_id)


def carried_over(stats: Stats, tokens_BL: Tensor, mask_id: int) -> Stats:
    """Make tokens that are not masked certain: each is its own argmax and sample, with entropy 0.

    Under mask noise a visible token is the true one, so the reverse process never changes it (carry-over unmasking,
    arXiv 2406.07524): accepted tokens stay, and masks are filled in the order of their entropies. `best` still has the
    model's own prediction.
    """
    is_masked_BL = tokens_BL == mask_id
    return stats._replace(
        entropy=stats.entropy * is_masked_BL,
        log_probability=stats.log_probability * is_masked_BL,
        argmax=stats.argmax.where(is_masked_BL, tokens_BL),
        sample=stats.sample.where(is_masked_BL, tokens_BL),
    )


def with_given(stats: Stats, given_BL: Tensor) -> Stats:
    """Make given tokens certain (-1: none is given), in argmax and sample, with entropy 0."""
    is_open_BL = given_BL < 0
    return stats._replace(
        entropy=stats.entropy * is_open_BL,
        log_probability=stats.log_probability * is_open_BL,
        argmax=stats.argmax.where(is_open_BL, given_BL),
        sample=stats.sample.where(is_open_BL, given_BL),
    )


def controlled_stats(
    model: BlockDiffusionModel,
    inputs: PredictInputs,
    control: CanvasControl,
    mask_id: int | None = None,
    greedy: Sequence[bool] | None = None,
) -> Stats:
    """Compute the statistics of canvases under a control, without waiting for the device.

    greedy: for each canvas whether nothing is drawn (None: all draw); greedy canvases get their samples from a second
    call at temperature 1.
    """
    stats = _controlled(model, inputs, control, mask_id)
    if greedy is None or not any(greedy):
        return stats
    greedy_stats = _controlled(model, replace(inputs, temperature=1.0), control, mask_id, draws=False)
    columns = ("sample", "log_probability", "best_log_probability")
    if all(greedy):
        return stats._replace(**{name: getattr(greedy_stats, name) for name in columns})
    is_greedy_B1 = torch.tensor(greedy, device=stats.sample.device)[:, None]
    return stats._replace(
        **{name: getattr(greedy_stats, name).where(is_greedy_B1, getattr(stats, name)) for name in columns}
    )


def _controlled(
    model: BlockDiffusionModel,
    inputs: PredictInputs,
    control: CanvasControl,
    mask_id: int | None,
    draws: bool = True,
) -> Stats:
    """Compute the statistics of canvases under a control, at their temperatures.

    draws: whether the sample is drawn; else it is the argmax. Without a constraint, argmax is the likeliest allowed
    token of each position. Under a constraint, visible tokens are given, argmax is the best canvas that satisfies it,
    the sample is a canvas drawn from the model's distribution conditioned on it, and the entropy is that of each
    position's marginal.
    """
    assert control.classes is not None and inputs.step_B is not None, "canvases under a control draw by their steps"
    stats = model.vocabulary.class_stats(
        inputs.hidden_BLD, inputs.temperature, inputs.uniform_BL, control.classes, _penalty(control), mask_id
    )
    pinned_BL, tokens_BL = control.pinned_BL, inputs.tokens_BL
    if mask_id is not None:  # under mask noise visible tokens are given, too
        pinned_BL = pinned_BL.where(pinned_BL >= 0, tokens_BL.where(tokens_BL != mask_id, -1))
    best_log_p_BLC = stats.maximum - stats.log_sum
    if control.automaton is None:
        best_BL = random_BL = torch.zeros_like(pinned_BL)
        entropy_BL, log_share_BLC, given_BL = stats.entropy[..., 0], torch.zeros_like(best_log_p_BLC), control.pinned_BL
    else:
        best_BL, random_BL, entropy_BL, log_share_BLC = _constrained(
            model.kernels, stats, control, control.automaton, pinned_BL, inputs.step_B
        )
        given_BL = pinned_BL
    argmax_BL, best_log_p_BL, sample_BL, log_p_BL = (
        column.gather(-1, place_BL[..., None]).squeeze(-1)
        for column, place_BL in (
            (stats.argmax, best_BL), (log_share_BLC + best_log_p_BLC, best_BL),
            (stats.sample, random_BL), (log_share_BLC + stats.log_probability, random_BL),
        )
    )  # fmt: skip
    if not draws:
        sample_BL, log_p_BL = argmax_BL, best_log_p_BL
    is_pinned_BL = pinned_BL >= 0
    own_BL, argmax_BL = argmax_BL, pinned_BL.where(is_pinned_BL, argmax_BL)
    best_BL, is_given_BL = argmax_BL, is_pinned_BL
    if given_BL is not pinned_BL:  # visible tokens, which nothing but the strategy holds
        is_given_BL = given_BL >= 0
        best_BL = given_BL.where(is_given_BL, own_BL)
    return Stats(
        entropy=(entropy_BL * ~is_pinned_BL).float(),
        argmax=argmax_BL,
        sample=pinned_BL.where(is_pinned_BL, sample_BL),
        soft_embedding=stats.soft_embedding,
        log_probability=log_p_BL.masked_fill(is_pinned_BL, 0.0).float(),
        best=best_BL,
        best_log_probability=best_log_p_BL.masked_fill(is_given_BL, 0.0).float(),
    )


def _penalty(control: CanvasControl) -> Penalty | None:
    if control.is_seen_BV is None or control.factor_B is None:
        return None
    B, L = control.pinned_BL.shape
    row_BL = torch.arange(B, device=control.factor_B.device)[:, None].expand(B, L)
    return Penalty(control.is_seen_BV, control.factor_B, row_BL.reshape(-1))


def _constrained(
    kernels: Kernels,
    stats: ClassStats,
    control: CanvasControl,
    automaton: TokenAutomaton,
    pinned_BL: Tensor,
    step_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best and a random canvas as classes [B, L], entropies, and log-probabilities of classes [B, L, C]."""
    assert control.is_text_BL is not None and control.state_B is not None and control.is_final_BS is not None
    assert control.seed_B is not None and control.number_B is not None
    is_text_BL, tail = control.is_text_BL, control.tail
    if tail:  # the prompt's, which is no part of the response
        stats = ClassStats(*(x[:, tail:] for x in stats))
        pinned_BL, is_text_BL = pinned_BL[:, tail:], is_text_BL[:, tail:]
    B, L = pinned_BL.shape
    log_sum, maximum = _given((stats.log_sum, stats.maximum), automaton, pinned_BL, is_text_BL)
    # two numbers for each position pick the path of the random canvas through the automaton
    uniform_BL2 = uniform(control.seed_B, Stream.CONSTRAINT, (control.number_B, step_B), 2 * L).view(B, L, 2)
    result = paths(automaton, log_sum, maximum, control.state_B, control.is_final_BS, uniform_BL2, kernels)
    share = result.share_BLC
    entropy_BL = torch.special.entr(share).sum(-1) + (share * stats.entropy).where(share > 0, 0.0).sum(-1)
    entropy_BL = entropy_BL.masked_fill(~result.is_possible_B[:, None], torch.nan)  # logits that are not finite
    best_BL, random_BL, of_class_BLC = result.best_BL, result.random_BL, share.log()
    if tail:
        best_BL, random_BL, entropy_BL = (F.pad(x, (tail, 0)) for x in (best_BL, random_BL, entropy_BL))
        of_class_BLC = F.pad(of_class_BLC, (0, 0, tail, 0))
    return best_BL, random_BL, entropy_BL, of_class_BLC


def _given(
    weights: tuple[Tensor, Tensor], automaton: TokenAutomaton, pinned_BL: Tensor, is_text_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Mask log weights of classes [B, L, C]: no end within the text, and only the pin's class at pinned positions."""
    first_BLC, second_BLC = (
        each.masked_fill(is_text_BL[..., None] & automaton.is_end_C, -torch.inf) for each in weights
    )
    place_BL = automaton.class_V[pinned_BL.clamp(min=0)].clamp_(max=first_BLC.shape[-1] - 1)
    certain_BLC = torch.full_like(first_BLC, -torch.inf).scatter_(-1, place_BL[..., None], 0.0)
    is_pinned_BL1 = (pinned_BL >= 0)[..., None]
    return certain_BLC.where(is_pinned_BL1, first_BLC), certain_BLC.where(is_pinned_BL1, second_BLC)
