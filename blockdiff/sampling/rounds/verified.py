"""Verified canvases: over rounds a canvas is denoised, encoded and verified, until all of it is accepted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch

from blockdiff.sampling.canvas_control import FREE, CanvasControl
from blockdiff.sampling.encoding import accept, score_end
from blockdiff.sampling.rounds.canvases import CanvasRound, RunningCanvas
from blockdiff.sampling.sequence import Proposal
from blockdiff.sampling.strategies import Verified, next_token_head

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification


@dataclass(eq=False)
class VerifiedRound(CanvasRound):
    """The growth of an answer by canvases that the head verifies.

    round_steps: the most denoising steps of a round. For the current canvas: draft: the tokens of the last round, of
    which the first `num_verified` are accepted and the others start the next round. Before the first round it is empty,
    or the one token that the previous canvas's verification added. num_rounds, num_steps: the verifications and
    denoising steps so far.
    """

    round_steps: int = 1
    draft: list[int] = field(default_factory=list)
    num_verified: int = 0
    num_rounds: int = 0
    num_steps: int = 0

    @classmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Return a round without a draft."""
        return cls(next_token_head(strategy), round_steps=cls.steps(strategy, 1))

    @classmethod
    def steps(cls, strategy: Strategy, max_steps: int) -> int:
        """Return the strategy's number of denoising steps per round."""
        assert isinstance(strategy, Verified)
        return strategy.steps

    @classmethod
    def rounds(cls, settings: SamplingSettings) -> int:
        """Return the canvas length: every round accepts at least one token."""
        return settings.canvas_length

    def first_step(self, sequence: Sequence) -> int:
        """The first step of the next round; step numbers continue over the rounds of a canvas."""
        return self.num_rounds * self.round_steps

    def control(self, sequence: Sequence, settings: SamplingSettings, device: torch.device) -> CanvasControl | None:
        """Return the control of a round, with accepted tokens pinned; it starts from the rest of the draft.

        Under mask noise it starts from masks, because given tokens would never change.
        """
        control, length = super().control(sequence, settings, device), settings.canvas_length
        if not self.draft:
            return control
        tokens_L = torch.tensor(self.draft + [FREE] * (length - len(self.draft)), device=device)
        control = control or CanvasControl(torch.full_like(tokens_L, FREE)[None])
        is_verified_L = torch.arange(length, device=device) < self.num_verified
        pinned_BL, start_BL = tokens_L.where(is_verified_L, control.pinned_BL), tokens_L[None]
        return replace(control, pinned_BL=pinned_BL, start_BL=start_BL if settings.diffusion.mask_id is None else None)

    def take(self, canvas: RunningCanvas, tokens: list[int], pages: Pages, settings: SamplingSettings) -> None:
        """Propose the denoised canvas, with accepted tokens unchanged; the next call encodes it."""
        tokens, last = self.draft[: self.num_verified] + tokens[self.num_verified :], canvas.first_step + canvas.steps
        self.propose(canvas.sequence, Proposal(tokens, self.num_verified, canvas.steps, last - 1))

    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Commit the canvas if all of it is accepted or the accepted tokens end the response; else keep the draft."""
        proposal = self.retract(sequence)
        encoded_end = len(sequence.token_ids) + verification.accepted
        self._note(verification, proposal.steps)
        accepted, steps = self.draft[: self.num_verified], self.num_steps
        if not self._can_commit(sequence, accepted, settings):
            accept(sequence, len(sequence.token_ids), pages)
            return
        # tokens after the end of a response are not verified
        is_whole = verification.own is not None and verification.accepted == len(verification.draft)
        following = [verification.own] if is_whole and verification.own is not None else []
        self._begin(following)
        sequence.commit(accepted, steps, settings)
        accept(sequence, encoded_end, pages)
        if sequence.finish_reason is None and self._can_commit(sequence, following, settings):
            self._begin([])
            sequence.commit(following, 0, settings)
            score_end(sequence, pages.model)

    def _note(self, verification: Verification, steps: int) -> None:
        """Record a round's accepted tokens and its `steps`; the head's token replaces the first rejected one."""
        self.draft, self.num_verified = list(verification.draft), verification.accepted
        if self.num_verified < len(self.draft):
            assert verification.own is not None
            self.draft[self.num_verified] = verification.own
            self.num_verified += 1
        self.num_rounds, self.num_steps = self.num_rounds + 1, self.num_steps + steps

    def _begin(self, accepted: list[int]) -> None:
        """Begin the next canvas with accepted tokens."""
        self.draft, self.num_verified, self.num_rounds, self.num_steps = accepted, len(accepted), 0, 0

    def _can_commit(self, sequence: Sequence, accepted: list[int], settings: SamplingSettings) -> bool:
        """True if the accepted tokens are a whole canvas or end the response."""
        return len(accepted) == settings.canvas_length or sequence.would_end(accepted, settings)

    def verifications(self, sequence: Sequence) -> int:
        """The number of rounds of the current canvas so far."""
        return self.num_rounds
