"""From hidden states to what a denoising step needs of every position: the one place where this happens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.diffusion.prediction import leave_one_out_bonus
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels.vocabulary import Penalty, Shaping, Stats, pack_allowed
from blockdiff.sampling.constraints.automaton import TokenAutomaton
from blockdiff.sampling.constraints.paths import paths
from blockdiff.sampling.control import CanvasControl
from blockdiff.sampling.draws import signed
from blockdiff.sampling.strategy import Shape
from blockdiff.seeding import Stream, uniform

NUMBERS = 4 << 20  # of (position, class): as many live at once in each column of the statistics of classes

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel


def predict(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None = None,
    controls: Sequence[CanvasControl | None] | None = None,
    steps: Sequence[int] | None = None,
    shapes: Sequence[Shape] | None = None,
    prediction: str = "posterior",
    other_BLD: Tensor | None = None,
) -> Stats:
    """The statistics of a step over B canvases, each [B, L] (the soft embedding [B, L, D]).

    `canvas_BL` is what the step saw; `temperature` is one number or one per row; `uniform_BL` picks the samples. With
    mask noise the mask is never predicted, and a token that is not a mask stays what it is. `controls` and `steps` are
    those of the rows: what may stand in them, and which step of its canvas each is at. `shapes` say what else is done
    to the distributions of the rows that nothing controls; `prediction` is what the model was trained for, and
    `other_BLD` are its hidden states without the prompts, where a shape asks for guidance.
    """
    groups = _groups(controls, canvas_BL.shape[1])
    if shapes is not None and all(shape.is_plain for shape in {id(shape): shape for shape in shapes}.values()):
        shapes = None
    if not groups:
        return _free(model, hidden_BLD, canvas_BL, temperature, uniform_BL, mask_id, shapes, prediction, other_BLD)
    assert controls is not None and steps is not None
    parts, order = [], []
    free = [row for row, control in enumerate(controls) if control is None or control.is_plain]
    for rows in [free, *groups] if free else groups:
        inputs = _some(rows, hidden_BLD, canvas_BL, temperature, uniform_BL)
        if rows is free:
            of_rows = None if shapes is None else [shapes[row] for row in rows]
            others = None if other_BLD is None else other_BLD[rows]
            parts.append(_free(model, *inputs, mask_id, of_rows, prediction, others))
        else:
            held = [control for control in (controls[row] for row in rows) if control is not None]
            parts.append(_held(model, *inputs, mask_id, held, [steps[row] for row in rows]))
        order += rows
    return _in_order(parts, order)


def _some(
    rows: Sequence[int], hidden_BLD: Tensor, canvas_BL: Tensor, temperature: Tensor | float, uniform_BL: Tensor
) -> tuple[Tensor, Tensor, Tensor | float, Tensor]:
    chosen = torch.tensor(rows, device=canvas_BL.device)
    of_rows = temperature[chosen] if isinstance(temperature, Tensor) else temperature
    return hidden_BLD[chosen], canvas_BL[chosen], of_rows, uniform_BL[chosen]


def _in_order(parts: Sequence[Stats], order: Sequence[int]) -> Stats:
    """The parts as one, in which part i has the next rows of `order`."""
    if len(parts) == 1 and list(order) == sorted(order):
        return parts[0]
    back = torch.tensor(order, device=parts[0].argmax.device).argsort()
    return Stats(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))


def _groups(controls: Sequence[CanvasControl | None] | None, length: int) -> list[list[int]]:
    """The controlled rows, together where the same classes of tokens are told apart, but not too many of them."""
    groups: dict[int, list[int]] = {}
    most: dict[int, int] = {}
    for row, control in enumerate(controls or ()):
        if control is not None and control.classes is not None:
            groups.setdefault(id(control.classes), []).append(row)
            most[id(control.classes)] = max(1, NUMBERS // (length * len(control.classes.end_C)))
    return [rows[lo : lo + most[of]] for of, rows in groups.items() for lo in range(0, len(rows), most[of])]


def _free(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None,
    shapes: Sequence[Shape] | None,
    prediction: str,
    other_BLD: Tensor | None,
) -> Stats:
    """The statistics of rows in which every token can stand anywhere; those of like shapes are computed together."""
    if shapes is None:
        return _own(model, hidden_BLD, canvas_BL, temperature, uniform_BL, mask_id)
    alike: dict[Shape, list[int]] = {}
    for row, shape in enumerate(shapes):
        alike.setdefault(replace(shape, temperature=1.0), []).append(row)
    parts = []
    for shape, rows in alike.items():
        inputs, others = (hidden_BLD, canvas_BL, temperature, uniform_BL), other_BLD
        if len(alike) > 1:
            inputs, others = _some(rows, *inputs), None if other_BLD is None else other_BLD[rows]
        shaping = _shaping(shape, inputs[1], model.vocab_size, mask_id, prediction, others)
        parts.append(_own(model, *inputs, mask_id, shaping, inputs[1] if shape.is_of_seen else None, shape.race))
    return _in_order(parts, [row for rows in alike.values() for row in rows])


def _shaping(
    shape: Shape, canvas_BL: Tensor, vocab_size: int, mask_id: int | None, prediction: str, other_BLD: Tensor | None
) -> Shaping | None:
    """What a shape does to the distributions; None where nothing."""
    shaping = Shaping(shape.top_k, shape.top_p, shape.min_p)
    if shape.guidance:
        if other_BLD is None:
            raise ValueError("guidance needs the hidden states without the prompts, other_BLD")
        shaping = shaping._replace(other_ND=other_BLD, guidance=shape.guidance)
    if shape.alpha is not None and shape.corrects(prediction, mask_id):
        bonus = float(leave_one_out_bonus(Linear(), torch.tensor([[1 - shape.alpha]]), vocab_size))
        bonus_BL = torch.full(canvas_BL.shape, -bonus if shape.is_of_others else bonus, device=canvas_BL.device)
        shaping = shaping._replace(observed_N=canvas_BL, bonus_N=bonus_BL)
    is_changed = shaping.has_filters or shaping.other_ND is not None or shaping.bonus_N is not None
    return shaping if is_changed else None


def _own(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None,
    shaping: Shaping | None = None,
    given_BL: Tensor | None = None,
    is_race: bool = False,
) -> Stats:
    """The statistics of rows in which every token can stand anywhere, and whose distributions are shaped alike."""
    vocabulary, allowed_BLW, sample_BL = model.vocabulary, None, None
    if mask_id is not None:
        allowed_BLW = _all_but(mask_id, model.vocab_size, canvas_BL.device).expand(*canvas_BL.shape, -1)
    if is_race:
        sample_BL = vocabulary.race(hidden_BLD, temperature, uniform_BL, allowed_BLW, shaping)
        given_BL = sample_BL if given_BL is None else given_BL
    found = vocabulary.stats(hidden_BLD, temperature, uniform_BL, given_BL, allowed_BLW, shaping)
    found = found if sample_BL is None else found._replace(sample=sample_BL)
    return found if mask_id is None else carried_over(found, canvas_BL, mask_id)


def _held(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None,
    controls: Sequence[CanvasControl],
    steps: Sequence[int],
) -> Stats:
    """The statistics of rows whose controls tell the same classes of tokens apart.

    Under a constraint argmax is the best canvas that satisfies it, the sample a canvas drawn from the model's
    distribution given that it is satisfied, and the entropy that of each position's marginal of that distribution.
    """
    (B, L), device = canvas_BL.shape, canvas_BL.device
    classes, automaton = controls[0].classes, controls[0].automaton
    assert classes is not None
    stats = model.vocabulary.class_stats(
        hidden_BLD, temperature, uniform_BL, classes, _penalty(controls, L, model.vocab_size, device), mask_id
    )
    pinned_BL = canvas_BL.new_full((B, L), -1)
    for row, control in enumerate(controls):
        if control.pinned_L is not None:
            pinned_BL[row] = control.pinned_L
    if mask_id is not None:  # under mask noise what is visible is given, too
        pinned_BL = pinned_BL.where(pinned_BL >= 0, canvas_BL.where(canvas_BL != mask_id, -1))
    is_pinned_BL = pinned_BL >= 0

    if automaton is None:
        best_BL1 = random_BL1 = pinned_BL.new_zeros(B, L, 1)
        entropy_BL, of_class_BL = stats.entropy[..., 0], torch.zeros_like(stats.entropy[..., 0])
    else:
        is_text_BL = torch.stack([_is_text(control, L, device) for control in controls])
        log_sum, maximum = _given((stats.log_sum, stats.maximum), automaton, pinned_BL, is_text_BL)
        found = paths(
            automaton,
            log_sum,
            maximum,
            torch.tensor([control.state for control in controls], device=device),
            torch.stack([control.is_final_S for control in controls if control.is_final_S is not None]),
            _path_numbers(controls, steps, L, device),
        )
        best_BL1, random_BL1 = found.best_BL[..., None], found.random_BL[..., None]
        share = found.share_BLC
        entropy_BL = torch.special.entr(share).sum(-1) + (share * stats.entropy).where(share > 0, 0.0).sum(-1)
        entropy_BL = entropy_BL.masked_fill(~found.is_possible_B[:, None], torch.nan)  # logits that are not finite
        of_class_BL = share.gather(-1, random_BL1).squeeze(-1).log()

    argmax_BL, sample_BL, log_p_BL = (
        column.gather(-1, place).squeeze(-1)
        for column, place in (
            (stats.argmax, best_BL1), (stats.sample, random_BL1), (stats.log_probability, random_BL1)
        )
    )  # fmt: skip
    return Stats(
        entropy=(entropy_BL * ~is_pinned_BL).float(),
        argmax=pinned_BL.where(is_pinned_BL, argmax_BL),
        sample=pinned_BL.where(is_pinned_BL, sample_BL),
        soft_embedding=stats.soft_embedding,
        log_probability=(of_class_BL + log_p_BL).masked_fill(is_pinned_BL, 0.0).float(),
    )


def _given(
    weights: tuple[Tensor, Tensor], automaton: TokenAutomaton, pinned_BL: Tensor, is_text_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithmic weights of classes [B, L, C], without ends where text stands, and at pins of their class alone."""
    first_BLC, second_BLC = (
        each.masked_fill(is_text_BL[..., None] & automaton.is_end_C, -torch.inf) for each in weights
    )
    place_BL = automaton.class_V[pinned_BL.clamp(min=0)].clamp_(max=first_BLC.shape[-1] - 1)
    certain_BLC = torch.full_like(first_BLC, -torch.inf).scatter_(-1, place_BL[..., None], 0.0)
    is_pinned_BL1 = (pinned_BL >= 0)[..., None]
    return certain_BLC.where(is_pinned_BL1, first_BLC), certain_BLC.where(is_pinned_BL1, second_BLC)


def _is_text(control: CanvasControl, length: int, device: torch.device) -> Tensor:
    return torch.zeros(length, dtype=torch.bool, device=device) if control.is_text_L is None else control.is_text_L


def _path_numbers(controls: Sequence[CanvasControl], steps: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Two uniform numbers per position, [B, L, 2], that pick the way of a random canvas through its automaton."""
    seed_B, number_B, step_B = torch.tensor(
        [[signed(control.seed), control.number, step] for control, step in zip(controls, steps, strict=True)],
        device=device,
    ).unbind(-1)
    return uniform(seed_B, Stream.CONSTRAINT, (number_B, step_B), 2 * length).view(len(controls), length, 2)


def _penalty(controls: Sequence[CanvasControl], length: int, vocab_size: int, device: torch.device) -> Penalty | None:
    """The repetition penalties of the rows; None where no row has one."""
    if all(control.seen_V is None for control in controls):
        return None
    nothing_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    return Penalty(
        torch.stack([nothing_V if control.seen_V is None else control.seen_V for control in controls]),
        torch.tensor([control.penalty for control in controls], device=device),
        torch.arange(len(controls), device=device).repeat_interleave(length),
    )


def carried_over(stats: Stats, canvas_BL: Tensor, mask_id: int) -> Stats:
    """Statistics in which a token that is not masked stays what it is, with certainty (entropy 0).

    Under mask noise a visible token is the true one, so the reverse process never changes it (carry-over unmasking,
    arXiv 2406.07524): what is accepted stays, and masks are filled in the order of their entropies.
    """
    is_masked_BL = canvas_BL == mask_id
    return stats._replace(
        entropy=stats.entropy * is_masked_BL,
        log_probability=stats.log_probability * is_masked_BL,
        argmax=stats.argmax.where(is_masked_BL, canvas_BL),
        sample=stats.sample.where(is_masked_BL, canvas_BL),
    )


@functools.lru_cache(maxsize=4)
def _all_but(token: int, vocab_size: int, device: torch.device) -> Tensor:
    """The packed set [1, W] of all tokens but one."""
    return pack_allowed((torch.arange(vocab_size, device=device) != token)[None])
