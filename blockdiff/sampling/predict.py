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
from blockdiff.kernels.vocabulary import Shaping, Stats, pack_allowed
from blockdiff.sampling.canvas_controls import CanvasControls, controlled_stats
from blockdiff.sampling.strategy import Shape

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel


def predict(
    model: BlockDiffusionModel,
    hidden_BLD: Tensor,
    canvas_BL: Tensor,
    temperature: Tensor | float,
    uniform_BL: Tensor,
    mask_id: int | None = None,
    controls: Sequence[CanvasControls] = (),
    step_B: Tensor | None = None,
    shapes: Sequence[Shape] | None = None,
    prediction: str = "posterior",
    other_BLD: Tensor | None = None,
) -> Stats:
    """The statistics of a step over B canvases, each [B, L] (the soft embedding [B, L, D]).

    `canvas_BL` is what the step saw; `temperature` is one number or one per row; `uniform_BL` picks the samples. With
    mask noise the mask is never predicted, and a token that is not a mask stays what it is. `controls` say what may
    stand in rows, where not every token may, and then `step_B` (int64) which step of its canvas each row is at.
    `shapes` say what else is done to the distributions of the other rows; `prediction` is what the model was trained
    for, and `other_BLD` are its hidden states without the prompts, where a shape asks for guidance.
    """
    if shapes is not None and all(shape.is_plain for shape in {id(shape): shape for shape in shapes}.values()):
        shapes = None
    if not controls:
        return _free(model, hidden_BLD, canvas_BL, temperature, uniform_BL, mask_id, shapes, prediction, other_BLD)
    assert step_B is not None, "rows under controls draw by their steps"
    if controls[0].rows is None:
        return controlled_stats(model, hidden_BLD, canvas_BL, temperature, uniform_BL, step_B, mask_id, controls[0])
    parts, order = [], [row for each in controls for row in each.rows or ()]
    for each in controls:
        inputs = _some(each.rows or (), hidden_BLD, canvas_BL, temperature, uniform_BL)
        parts.append(controlled_stats(model, *inputs, step_B[each.rows], mask_id, each))
    if free := sorted(set(range(len(canvas_BL))).difference(order)):
        inputs = _some(free, hidden_BLD, canvas_BL, temperature, uniform_BL)
        of_rows = None if shapes is None else [shapes[row] for row in free]
        others = None if other_BLD is None else other_BLD[free]
        parts.append(_free(model, *inputs, mask_id, of_rows, prediction, others))
    return _in_order(parts, order + free)


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
    """The changes that a shape makes to the distributions; None for none."""
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
