"""The sampling loop in lockstep: encode, denoise a canvas of every row, commit it, go on. It is the engine's oracle.

It answers by the rules of transformers' `generate`. Rows wait for the slowest canvas of their batch, and nothing is
shared, chunked or preempted; the engine answers the same with the same draws.
"""

from __future__ import annotations

from collections import abc
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.sampling.canvas_control import grouped
from blockdiff.sampling.predict import PredictInputs, predict, with_given
from blockdiff.sampling.rounds import CanvasRound
from blockdiff.sampling.sequence import NOT_FINITE, Sequence
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.step import STEPS_AHEAD, draw_ahead, second_draws
from blockdiff.sampling.strategy import Canvases, checked_decision
from blockdiff.seeding import signed

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.prefix import Prefix


class Draws:
    """The draws of canvases that run in lockstep: the same canvas and step of every row."""

    def __init__(self, seed_B: Tensor, canvas: int, length: int, vocab_size: int):
        self.seed_B, self.canvas_B = seed_B, torch.full_like(seed_B, canvas)
        self.length, self.vocab_size = length, vocab_size
        self._first, self._uniform_BTL, self._noise_BTL = 0, *self._draw(0)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Uniform float32 [B, L] in [0, 1) and noise tokens int64 [B, L] of a step, counted from 0."""
        if not self._first <= step < self._first + STEPS_AHEAD:
            self._first, self._uniform_BTL, self._noise_BTL = step, *self._draw(step)
        return self._uniform_BTL[:, step - self._first], self._noise_BTL[:, step - self._first]

    def second(self, step: int) -> Tensor:
        """A second uniform number per position, float32 [B, L]."""
        return second_draws(self.seed_B, self.canvas_B, torch.full_like(self.seed_B, step), self.length)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        self.seed_B, self.canvas_B = self.seed_B[rows], self.canvas_B[rows]
        self._uniform_BTL, self._noise_BTL = self._uniform_BTL[rows], self._noise_BTL[rows]

    def _draw(self, first: int) -> tuple[Tensor, Tensor]:
        """The numbers of STEPS_AHEAD steps from `first` on."""
        return draw_ahead(self.seed_B, self.canvas_B, torch.full_like(self.seed_B, first), self.length, self.vocab_size)


@torch.no_grad()
def generate_in_lockstep(
    model: BlockDiffusionModel, settings: SamplingSettings, asked: abc.Sequence[Sequence], batch_size: int = 32
) -> None:
    """Answer requests, `batch_size` at a time and only those of equal settings together."""
    # Prompts of similar length share a batch: less padding.
    order = sorted(asked, key=lambda each: (*_settings(each), len(each.prompt_tokens)))
    for _, group in groupby(order, key=_settings):
        alike = list(group)
        for first in range(0, len(alike), batch_size):
            _answer(model, settings, alike[first : first + batch_size])


def _settings(each: Sequence) -> tuple[int, int, str, int, int, float]:
    """The settings that the rows of a batch have in common."""
    control = each.control
    starts = (0, 0.0) if control is None else (len(control.start), control.noise)
    return each.max_tokens, each.max_steps, repr(each.strategy), len(each.tail), *starts


def _answer(model: BlockDiffusionModel, settings: SamplingSettings, batch: list[Sequence]) -> None:
    """Fill in the responses of a batch: canvas after canvas, until an eos or the last canvas."""
    prefix = _encode_prompts(model, settings, batch)
    for number in range(-(-batch[0].max_tokens // model.canvas_length)):
        canvas_BL, steps = _denoise(model, settings, prefix, batch, number)
        for each, tokens, count in zip(batch, canvas_BL.tolist(), steps, strict=True):
            if each.error is None:
                each.commit(tokens[len(each.tail) :], count, settings)
        unfinished = [row for row, each in enumerate(batch) if each.finish_reason is None and not each.error]
        if not unfinished:
            return
        if len(unfinished) < len(batch):
            batch = [batch[row] for row in unfinished]
            kept_rows = torch.tensor(unfinished, device=canvas_BL.device)
            prefix, canvas_BL = prefix.select(kept_rows), canvas_BL[kept_rows]
        prefix = model.encode(canvas_BL, prefix=prefix)


def _encode_prompts(model: BlockDiffusionModel, settings: SamplingSettings, batch: abc.Sequence[Sequence]) -> Prefix:
    pad_id, device = int(settings.generation.pad_id or 0), model.device
    lengths = [len(each.token_ids) for each in batch]
    width = max(lengths)
    tokens = [each.token_ids + [pad_id] * (width - len(each.token_ids)) for each in batch]
    tokens_BS, is_unequal = torch.tensor(tokens, dtype=torch.int64, device=device), min(lengths) < width
    return model.encode(tokens_BS, torch.tensor(lengths, device=device) if is_unequal else None)


def _denoise(
    model: BlockDiffusionModel,
    settings: SamplingSettings,
    prefix: Prefix,
    batch: abc.Sequence[Sequence],
    number: int,
) -> tuple[Tensor, list[int]]:
    """Denoise canvas `number` of every row: the argmax canvases [B, L] and how many steps each took.

    A row whose logits are not finite gets an `error`, and its canvas means nothing.
    """
    device, strategy = model.device, batch[0].strategy
    max_steps, mask_id = batch[0].max_steps, settings.diffusion.mask_id
    seed_B = torch.tensor([signed(each.seed) for each in batch], device=device)
    draws = Draws(seed_B, number, model.canvas_length, model.vocab_size)
    final_BL = torch.empty(len(batch), model.canvas_length, dtype=torch.int64, device=device)
    steps = [0] * len(batch)

    # From here on B counts the rows whose canvas is not finished; `live` are their places in the batch.
    live = list(range(len(batch)))
    steps_B, unchanged_B = torch.full_like(seed_B, max_steps), torch.zeros_like(seed_B)
    whole_B, standing_BL, kept_BL, stats = torch.zeros_like(seed_B), None, None, None
    controls = [CanvasRound().control(each, settings, device) for each in batch]
    start_BL = given_tokens([None if control is None else control.start_BL for control in controls])
    pinned_BL = given_tokens([None if control is None else control.pinned_BL for control in controls])
    first_step = next((each.control.first_step for each in batch if each.control is not None), 0)
    for step in range(first_step, max_steps):
        shape = strategy.shape(step, max_steps)
        uniform_BL, canvas_BL = draws.of_step(step)
        if mask_id is not None:
            canvas_BL = torch.full_like(canvas_BL, mask_id)
        if stats is None or standing_BL is None or kept_BL is None:
            previous_BL, soft_BLD = torch.full_like(canvas_BL, -1), None
            kept_BL = torch.zeros_like(canvas_BL, dtype=torch.bool)
            canvas_BL = canvas_BL if start_BL is None else start_BL.where(start_BL >= 0, canvas_BL)
        else:
            previous_BL, soft_BLD = stats.argmax, stats.soft_embedding
            canvas_BL = standing_BL.where(kept_BL, canvas_BL)
        if pinned_BL is not None:
            canvas_BL = pinned_BL.where(pinned_BL >= 0, canvas_BL)
        hidden_BLD = model.denoise(canvas_BL, prefix, soft_BLD)
        held = grouped(controls)
        step_B = torch.full_like(steps_B, step)
        inputs = PredictInputs(hidden_BLD, canvas_BL, shape.temperature, uniform_BL, step_B)
        stats = predict(model, inputs, held, [shape] * len(live), mask_id)
        if settings.aligned and pinned_BL is not None:
            stats = with_given(stats, pinned_BL)
        whole_B = whole_B if mask_id is None else (whole_B + 1) * (canvas_BL != mask_id).all(-1)
        unchanged_B = (unchanged_B + 1) * (stats.argmax == previous_BL).all(-1)
        canvases = Canvases(
            ids=[batch[place].id for place in live],
            step_B=step_B,
            steps_B=steps_B,
            temperature_B=torch.full(steps_B.shape, shape.temperature, device=device),
            tokens_BL=canvas_BL,
            stats=stats,
            previous_BL=previous_BL,
            unchanged_B=unchanged_B,
            kept_BL=kept_BL,
            is_pinned_BL=torch.zeros_like(kept_BL) if pinned_BL is None else pinned_BL >= 0,
            is_masked_BL=torch.zeros_like(kept_BL) if mask_id is None else canvas_BL == mask_id,
            whole_B=whole_B,
            end_ids=settings.generation.eos_ids,
            noise_probability=1 / model.vocab_size if mask_id is None else 0.0,
            draw=partial(draws.second, step),
        )
        decision = checked_decision(strategy, canvases)
        kept_BL, standing_BL = decision.kept_BL, decision.standing(canvases)
        is_last = step + 1 == max_steps
        if decision.stop_B is None and not is_last:
            continue  # no canvas stops here, so the host need not wait for the device
        is_finite_B = stats.entropy.isfinite().all(-1)
        is_stopped_B = is_finite_B if decision.stop_B is None else decision.stop_B
        flags = torch.stack((is_stopped_B, is_finite_B)).tolist()  # the one wait for the device
        stopped: list[int] = []
        staying: list[int] = []
        for row, (is_stopped, is_finite) in enumerate(zip(*flags, strict=True)):
            if not is_finite:
                batch[live[row]].error = f"{NOT_FINITE} (canvas {number + 1}, step {step + 1})"
            (stopped if is_last or is_stopped or not is_finite else staying).append(row)
        if not stopped:
            continue
        places = [live[row] for row in stopped]
        final_BL[places] = (stats.argmax if decision.final_BL is None else decision.final_BL)[stopped]
        for place in places:
            steps[place] = step + 1 - first_step
        if not staying:
            break
        live = [live[row] for row in staying]
        kept = torch.tensor(staying, device=device)
        stats = type(stats)(*(values[kept] for values in stats))
        standing_BL, kept_BL, unchanged_B = standing_BL[kept], kept_BL[kept], unchanged_B[kept]
        whole_B = whole_B[kept]
        steps_B, controls = steps_B[kept], [controls[row] for row in staying]
        pinned_BL = None if pinned_BL is None else pinned_BL[kept]
        prefix = prefix.select(kept)
        draws.select(kept)
    return final_BL, steps


def given_tokens(of_rows: abc.Sequence[Tensor | None]) -> Tensor | None:
    """Tokens that are given [1, L] as int64 [B, L], -1 where none is; None where no row has any."""
    given_BL = next((given_BL for given_BL in of_rows if given_BL is not None), None)
    if given_BL is None:
        return None
    free_BL = torch.full_like(given_BL, -1)
    return torch.cat([free_BL if each_BL is None else each_BL for each_BL in of_rows])
