"""The state of canvases between two steps, on the device: a step reads it and writes that of the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Stats
from blockdiff.sampling.draws import STEPS_AHEAD, draw_ahead, second_draws, signed
from blockdiff.sampling.sequence import CanvasInFlight
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategy import Canvases, Decision

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel


@dataclass
class CanvasState:
    """The state of every canvas between two steps; the names are those of `Canvases`.

    entered_B: the engine's step that was the canvas's step 0; uniform_BTL and noise_BTL: the draws of STEPS_AHEAD
    steps, of which the first is the last multiple of STEPS_AHEAD; standing_BL: the tokens that the next step sees where
    kept_BL is True.
    """

    seed_B: Tensor
    number_B: Tensor
    entered_B: Tensor
    steps_B: Tensor
    unchanged_B: Tensor
    uniform_BTL: Tensor
    noise_BTL: Tensor
    standing_BL: Tensor
    kept_BL: Tensor
    previous_BL: Tensor
    soft_BLD: Tensor

    @classmethod
    def of(
        cls, canvases: Sequence[CanvasInFlight], model: BlockDiffusionModel, settings: SamplingSettings
    ) -> CanvasState:
        """The state of canvases before their first steps."""
        L, B, device = settings.canvas_length, len(canvases), model.device
        numbers = [
            (
                signed(canvas.sequence.seed),
                canvas.number,
                canvas.entered,
                canvas.sequence.max_steps,
                canvas.first_step // STEPS_AHEAD * STEPS_AHEAD,
            )
            for canvas in canvases
        ]
        seed_B, number_B, entered_B, steps_B, first_B = torch.tensor(numbers, device=device).unbind(1)
        nothing_BL = torch.full((B, L), -1, device=device)
        uniform_BTL, noise_BTL = draw_ahead(seed_B, number_B, first_B, L, model.vocab_size)
        return cls(
            seed_B=seed_B,
            number_B=number_B,
            entered_B=entered_B,
            steps_B=steps_B,
            unchanged_B=torch.zeros_like(seed_B),
            uniform_BTL=uniform_BTL,
            noise_BTL=noise_BTL,
            standing_BL=nothing_BL,
            kept_BL=torch.zeros((B, L), dtype=torch.bool, device=device),
            previous_BL=nothing_BL,
            soft_BLD=torch.zeros((B, L, model.vocabulary.table.shape[1]), dtype=model.dtype, device=device),
        )

    @classmethod
    def buffers(cls, count: int, model: BlockDiffusionModel, settings: SamplingSettings) -> CanvasState:
        """The state of `count` canvases, all zeros: room that is written to later."""
        L, D = settings.canvas_length, model.vocabulary.table.shape[1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=model.device)

        return cls(
            seed_B=zeros(),
            number_B=zeros(),
            entered_B=zeros(),
            steps_B=zeros(),
            unchanged_B=zeros(),
            uniform_BTL=zeros(STEPS_AHEAD, L, dtype=torch.float32),
            noise_BTL=zeros(STEPS_AHEAD, L),
            standing_BL=zeros(L),
            kept_BL=zeros(L, dtype=torch.bool),
            previous_BL=zeros(L),
            soft_BLD=zeros(L, D, dtype=model.dtype),
        )

    def write(self, to: Tensor | slice, other: CanvasState) -> None:
        """Write the state of other canvases to these places."""
        for mine, its in zip(self, other, strict=True):
            if not (isinstance(to, slice) and mine is its):
                mine[to] = its

    def move(self, to: Tensor, come: Tensor) -> None:
        """Copy the state of the canvases in the places `come` to the places `to`; the two may overlap."""
        for each in self:
            each[to] = each[come]

    def part(self, of: slice) -> CanvasState:
        """The state of neighbouring canvases, as views of the same memory."""
        return CanvasState(*(each[of] for each in self))

    def draw_on(self, steps: Sequence[int], settings: SamplingSettings) -> list[int]:
        """Draw anew for canvases that have used up their draws; returns their places.

        steps: the step that each canvas is at.
        """
        due = [place for place, step in enumerate(steps) if step and step % STEPS_AHEAD == 0]
        if due:
            device = self.seed_B.device
            places = torch.tensor(due, device=device)
            first_B = torch.tensor([steps[place] for place in due], device=device)
            addresses = self.seed_B[places], self.number_B[places], first_B
            draws = draw_ahead(*addresses, settings.canvas_length, settings.vocab_size)
            self.uniform_BTL[places], self.noise_BTL[places] = draws
        return due

    def seen(self, noise_BL: Tensor, mask_id: int | None, start_BL: Tensor, pinned_BL: Tensor) -> Tensor:
        """The tokens [B, L] that a step sees; start_BL, pinned_BL: tokens that are given, -1 elsewhere."""
        if mask_id is not None:
            noise_BL = torch.full_like(noise_BL, mask_id)
        tokens_BL = self.standing_BL.where(self.kept_BL, noise_BL)
        for given_BL in (start_BL, pinned_BL):
            tokens_BL = given_BL.where(given_BL >= 0, tokens_BL)
        return tokens_BL

    def canvases(
        self,
        settings: SamplingSettings,
        ids: Sequence[str | int],
        step_B: Tensor,
        temperature_B: Tensor,
        tokens_BL: Tensor,
        stats: Stats,
        pinned_BL: Tensor,
    ) -> Canvases:
        """The canvases by which a strategy decides, after a step that saw these tokens."""
        return Canvases(
            ids=ids,
            step_B=step_B,
            steps_B=self.steps_B,
            temperature_B=temperature_B,
            tokens_BL=tokens_BL,
            stats=stats,
            previous_BL=self.previous_BL,
            unchanged_B=(self.unchanged_B + 1) * (stats.argmax == self.previous_BL).all(-1),
            kept_BL=self.kept_BL,
            is_pinned_BL=pinned_BL >= 0,
            noise_probability=1 / settings.vocab_size if settings.diffusion.mask_id is None else 0.0,
            draw=lambda: second_draws(self.seed_B, self.number_B, step_B, settings.canvas_length),
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, field.name) for field in fields(self))


def step_report(stats: Stats, decision: Decision) -> Tensor:
    """The report of a step to the host, int64 [B, 2 + L]: whether canvases stop, are finite, and their tokens."""
    is_finite_B = stats.entropy.isfinite().all(-1)
    is_stopped_B = torch.zeros_like(is_finite_B) if decision.stop_B is None else decision.stop_B
    final_BL = stats.argmax if decision.final_BL is None else decision.final_BL
    return torch.cat((torch.stack((is_stopped_B, is_finite_B), 1), final_BL), 1)
