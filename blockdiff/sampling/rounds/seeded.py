"""Seeded canvases: the first token of each canvas is the head's next token, and the others are denoised behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from blockdiff.sampling.canvas_control import FREE, CanvasControl
from blockdiff.sampling.encoding import accept, score_end
from blockdiff.sampling.rounds.canvases import CanvasRound, RunningCanvas
from blockdiff.sampling.strategies import NextToken

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification


@dataclass(eq=False)
class SeededRound(CanvasRound):
    """The growth of an answer by denoised canvases that begin with the head's next token.

    The call that encodes the prompt or a committed canvas also yields that token. first: the token (None: nothing was
    encoded, as in an engine's warm-up).
    """

    first: int | None = None

    @classmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Return a round whose head draws like the first step of a canvas under the strategy."""
        shape = strategy.shape(0, 1)
        temperature = 0.0 if shape.greedy else shape.temperature
        return cls(NextToken(temperature, shape.top_k, shape.top_p, shape.min_p))

    def awaits_head(self, sequence: Sequence) -> bool:
        """True after the prompt and after a canvas, unless the response has ended."""
        return not sequence.num_uncomputed and sequence.finish_reason is None

    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Take the head's token as the next canvas's first; commit it alone if it ends the response."""
        assert verification.own is not None
        self.first = verification.own
        accept(sequence, len(sequence.token_ids), pages)
        if sequence.would_end([self.first], settings):
            token, self.first = self.first, None
            sequence.commit([token], 0, settings)
            score_end(sequence, pages.model)

    def control(self, sequence: Sequence, settings: SamplingSettings, device: torch.device) -> CanvasControl | None:
        """Return the control of a new canvas, with the head's token pinned at its first position."""
        control = super().control(sequence, settings, device)
        if self.first is None:
            return control
        if control is None:
            control = CanvasControl(torch.full((1, settings.canvas_length), FREE, device=device))
        pinned_BL = control.pinned_BL.clone()
        pinned_BL[:, 0].masked_fill_(pinned_BL[:, 0] == FREE, self.first)
        return replace(control, pinned_BL=pinned_BL)

    def take(self, canvas: RunningCanvas, tokens: list[int], pages: Pages, settings: SamplingSettings) -> None:
        """Commit the tokens of a finished canvas; the call that encodes it yields the next first token."""
        self.first = None
        super().take(canvas, tokens, pages, settings)

    def preempt(self, sequence: Sequence) -> None:
        """Drop the canvas and its first token, which the head draws again."""
        super().preempt(sequence)
        self.first = None
