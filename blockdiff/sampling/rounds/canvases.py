"""Denoised canvases: a canvas is proposed over several steps and committed as it is, without being encoded before."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from blockdiff.sampling.canvas_control import FREE, CanvasControl
from blockdiff.sampling.encoding import score_end
from blockdiff.sampling.sequence import NOT_FINITE, Round

if TYPE_CHECKING:
    from torch import Tensor

    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification


@dataclass(eq=False)
class RunningCanvas:
    """The canvas of a sequence that is being denoised.

    round: the round of the sequence; number: the canvas's index in the response; step_offset: the number of the
    engine's step minus that of the canvas's step; first_step: the canvas's first step, later than 0 if it starts from
    given tokens; control: the tokens that it may have; index: its row in the buffers of the batch (None: not assigned
    yet); has_begun: whether a step has denoised it; final: its final tokens (None: it is not finished), after `steps`
    steps; is_finite: False if its logits were not finite.
    """

    sequence: Sequence
    round: CanvasRound
    number: int
    step_offset: int
    control: CanvasControl | None = None
    first_step: int = 0
    index: int | None = None
    has_begun: bool = False
    final: list[int] | None = None
    is_finite: bool = True
    steps: int = 0


@dataclass(eq=False)
class CanvasRound(Round):
    """The growth of an answer by denoised canvases.

    canvas: the one that is denoised, if any; recorded: the canvas and the step that were recorded last; on_inputs:
    called with the number of every step of a canvas, its input tokens [L] and the self-conditioning signal [L, D];
    on_last_hidden: called with the hidden states [L, D] of the last step of a canvas.
    """

    canvas: RunningCanvas | None = None
    recorded: tuple[int, int] = (-1, -1)
    on_inputs: abc.Callable[[int, Tensor, Tensor], object] | None = None
    on_last_hidden: abc.Callable[[Tensor], object] | None = None

    @classmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Return a round without a canvas."""
        return cls()

    @classmethod
    def steps(cls, strategy: Strategy, max_steps: int) -> int:
        """Return `max_steps` plus the steps that the strategy may take beyond them (`post_steps`)."""
        return max_steps + getattr(strategy, "post_steps", 0)

    @property
    def is_between(self) -> bool:
        """True between two canvases."""
        return self.canvas is None and self.proposal is None

    @property
    def is_observed(self) -> bool:
        """True if a callback receives tensors of the steps."""
        return self.on_inputs is not None or self.on_last_hidden is not None

    def running(self, sequence: Sequence, now: int, settings: SamplingSettings, device: torch.device) -> RunningCanvas:
        """Return the canvas being denoised; if there is none, begin one at the engine's step `now`."""
        if self.canvas is None:
            first, control = self.first_step(sequence), self.control(sequence, settings, device)
            self.canvas = RunningCanvas(sequence, self, len(sequence.steps), now - first, control, first)
        return self.canvas

    def first_step(self, sequence: Sequence) -> int:
        """The first step of a new canvas; later than 0 if it starts from a noised draft."""
        return 0 if sequence.control is None else sequence.control.first_step

    def control(self, sequence: Sequence, settings: SamplingSettings, device: torch.device) -> CanvasControl | None:
        """Return the control of a new canvas, which pins the prompt's tail at its start; None if it would be empty."""
        tail = sequence.tail
        if sequence.control is not None:
            return sequence.control.begin(sequence.seed, tail)
        if not tail:
            return None
        free = torch.full((1, settings.canvas_length - len(tail)), FREE, device=device)
        return CanvasControl(free).behind(tail)

    def finish(self, canvas: RunningCanvas, pages: Pages, settings: SamplingSettings) -> None:
        """Take the tokens of a finished canvas, or set the sequence's error if they are invalid."""
        sequence = canvas.sequence
        tokens = (canvas.final or [])[len(sequence.tail) :]
        if not canvas.is_finite:
            sequence.error = f"{NOT_FINITE} (canvas {canvas.number + 1}, step {canvas.first_step + canvas.steps})"
        elif outside := [token for token in tokens if not 0 <= token < settings.vocab_size]:
            mistake = f"token {outside[0]} in final_BL, which is none of the model's {settings.vocab_size}"
            named = f"strategy {type(sequence.strategy).__name__}"
            sequence.error = f"{named}: decide() gave {mistake}; change it (docs/extending.md)"
        else:
            self.canvas = None
            self.take(canvas, tokens, pages, settings)

    def take(self, canvas: RunningCanvas, tokens: list[int], pages: Pages, settings: SamplingSettings) -> None:
        """Commit the tokens of a finished canvas."""
        canvas.sequence.commit(tokens, canvas.steps, settings)
        score_end(canvas.sequence, pages.model)

    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Do nothing: no head verifies the encoded tokens."""

    def preempt(self, sequence: Sequence) -> None:
        """Drop the canvas; it is denoised again from its first step with the same random numbers."""
        super().preempt(sequence)
        self.canvas = None
