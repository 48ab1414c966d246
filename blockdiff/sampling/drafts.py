"""Drafts: what is proposed behind a sequence's tokens, and how much of it stands once it has been verified.

There are two kinds. A canvas is denoised and verified over rounds, and joins the response as soon as all of it stands.
Of a drafter's tokens those that stand join the response after every round, so the next round begins behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockdiff.sampling.trace import Verification


@dataclass(frozen=True)
class Proposal:
    """Tokens at the end of a sequence's token_ids that are to be verified; there may be none.

    given: how many of the first ones stand already; steps: the denoising steps, or passes of a drafter, that made
    them; last_step: the number of the last of these.
    """

    tokens: list[int] = field(default_factory=list)
    given: int = 0
    steps: int = 0
    last_step: int = 0


@dataclass
class CanvasDraft:
    """The draft of a canvas, over rounds that each denoise and verify it.

    tokens: those of the last round, of which the first `num_verified` stand and the others are where the next round
    starts; before the first round none, or the one that the verification of the tokens before has added. rounds, steps:
    verifications and denoising steps so far.
    """

    tokens: list[int] = field(default_factory=list)
    num_verified: int = 0
    rounds: int = 0
    steps: int = 0

    @property
    def standing(self) -> list[int]:
        """The tokens that stand."""
        return self.tokens[: self.num_verified]

    @classmethod
    def after(cls, verification: Verification) -> CanvasDraft:
        """The draft of what follows a verified one, with the token that verification has added behind its end."""
        own = verification.own
        return cls() if own is None or verification.accepted < len(verification.draft) else cls([own], num_verified=1)

    def proposal(self, tokens: list[int], steps: int, last_step: int) -> Proposal:
        """The proposal of a denoised canvas; those of its tokens that stand stay."""
        return Proposal(self.standing + tokens[self.num_verified :], self.num_verified, steps, last_step)

    def take(self, verification: Verification, steps: int) -> None:
        """Take the outcome of a round of so many steps: the tokens that stand, the last perhaps the head's own."""
        self.tokens, self.num_verified = list(verification.draft), verification.accepted
        if self.num_verified < len(self.tokens):
            assert verification.own is not None
            self.tokens[self.num_verified] = verification.own
            self.num_verified += 1
        self.rounds, self.steps = self.rounds + 1, self.steps + steps


@dataclass
class BlockDraft:
    """The number of tokens that a drafter proposes for a sequence, by what stood before.

    most: the most of them; follows: whether later rounds go by what stood lately; recent: how many drafted tokens of a
    round stood lately (None: there was none).
    """

    most: int
    follows: bool = True
    recent: float | None = None

    @property
    def reach(self) -> int:
        """The number of tokens to draft: the most, or half as many again as stood lately, and one more."""
        return min(self.most, 1 + round(1.5 * self.recent)) if self.follows and self.recent is not None else self.most

    def note(self, verification: Verification) -> None:
        """Take note of what stood in a round; `recent` is by a quarter the newest and by three what it was."""
        if verification.draft:
            before = float(verification.accepted) if self.recent is None else self.recent
            self.recent = before + (verification.accepted - before) / 4


Draft = CanvasDraft | BlockDraft
