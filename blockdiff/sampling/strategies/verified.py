"""Verified canvases: a few denoising steps draft a canvas, and the model's own next-token prediction checks the draft.

The tokens that stand are those that next-token sampling would have written one by one; a draft decides how many of them
a round adds. `sampling/verification.py` has the check.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from blockdiff.sampling.strategies.acceptance import declares_capturable
from blockdiff.sampling.strategies.composed import Composed
from blockdiff.sampling.strategies.next_token import NextToken
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy

MOST_STEPS = 1000  # of a draft


@dataclass(frozen=True)
class Verified:
    """Rounds of at most `steps` denoising steps by the strategy `draft`, each followed by a verification.

    head: the next-token sampling whose tokens the response has. Step numbers go on through the rounds of a canvas:
    those of round r begin at r `steps`.
    """

    head: NextToken = field(default_factory=NextToken)
    steps: int = 1
    draft: Strategy = field(default_factory=Composed)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"steps must be an integer from 1 to {MOST_STEPS}, got {self.steps}")

    @property
    def is_capturable(self) -> bool:
        """True where the steps of the draft are; a verification is not captured."""
        return declares_capturable(self.draft)

    def shape(self, step: int, steps: int) -> Shape:
        """The draft's distribution in this step of its round."""
        return self.draft.shape(step % self.steps, self.steps)

    def decide(self, canvases: Canvases) -> Decision:
        """The draft's decision; a canvas is finished, and verified, after the last step of a round at the latest."""
        step_B = canvases.step_B % self.steps
        decision = self.draft.decide(
            replace(canvases, step_B=step_B, steps_B=torch.full_like(canvases.steps_B, self.steps))
        )
        is_last_B = step_B == self.steps - 1
        return replace(decision, stop_B=is_last_B if decision.stop_B is None else decision.stop_B | is_last_B)


def head_of(strategy: Strategy) -> NextToken | None:
    """The next-token sampling that decides every token of a response; None where canvases are committed as they are."""
    if isinstance(strategy, Verified):
        return strategy.head
    return strategy if isinstance(strategy, NextToken) else None
