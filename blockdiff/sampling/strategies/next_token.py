"""Strategies with a next-token head: next-token sampling, and verified drafts, which yield the same tokens sooner.

In next-token sampling a response grows by one token a step, drawn from the prediction of the clean tokens before it.
Nothing is denoised: the call that encodes a token draws the next one. Every model encodes causally, so every model can
be sampled this way, with a quality that depends on its next-token loss; a causal model can be sampled in no other way.

With a drafter, which predicts a block in one pass, the same response grows by any number of tokens a round; without one
each round adds the token that the head draws.

Verified canvases are drafts of a few denoising steps, which the model's own next-token prediction checks. The accepted
tokens are those that next-token sampling would have written one by one; the draft only determines how many of them a
round adds. `sampling/verification.py` has the check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.strategies.denoising import Composed
from blockdiff.sampling.strategy import (
    Canvases,
    Decision,
    Key,
    MinP,
    Shape,
    Strategy,
    TopK,
    TopP,
    declares_capturable,
)

MOST_STEPS = 1000  # of a draft


@dataclass(frozen=True)
class NextToken:
    """Next-token sampling: greedy at temperature 0, else a draw from the tempered and filtered distribution.

    Like every draw of this package, it looks up one number in [0, 1), set by the seed and the token's position, in the
    cumulative distribution.
    """

    temperature: Annotated[
        float, Key("of the distribution that is drawn from; 0: the likeliest token", settings="temperature")
    ] = 0.0
    top_k: TopK = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        Shape(1.0, self.top_k, self.top_p, self.min_p)  # raises ValueError for bad filters

    @property
    def head(self) -> NextToken:
        """The strategy itself: it decides every token."""
        return self

    def adjusted(self, temperature: float | None, filters: dict[str, Any]) -> NextToken:
        """The strategy with this temperature and these filters."""
        return replace(self, **filters, temperature=self.temperature if temperature is None else temperature)

    @classmethod
    def of(cls, generation: Generation) -> NextToken:
        """Return the strategy of generation settings, with transformers' names and meaning."""
        return cls(generation.temperature, generation.top_k, generation.top_p)

    def shape(self, step: int, steps: int) -> Shape:
        """Return the tempered and filtered distribution; greedy decoding uses only the argmax."""
        if not self.temperature:
            return Shape(1.0)
        return Shape(self.temperature, self.top_k, self.top_p, self.min_p)

    def decide(self, canvases: Canvases) -> Decision:
        """Finish every canvas with its sample."""
        stats, is_all_BL = canvases.stats, torch.ones_like(canvases.kept_BL)
        final_BL = stats.sample if self.temperature else stats.argmax
        return Decision(is_all_BL, is_all_BL[:, 0], final_BL=final_BL)


@dataclass(frozen=True)
class Verified:
    """Rounds of at most `steps` denoising steps by the strategy `denoising`, each followed by a verification.

    head: the next-token sampling whose tokens the response has. Step numbers continue over the rounds of a canvas:
    round r (from 0) begins at step r `steps`.
    """

    head: NextToken = field(default_factory=NextToken)
    steps: Annotated[int, Key("denoising steps of a draft, at most")] = 1
    denoising: Strategy = field(default_factory=Composed)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or not 1 <= self.steps <= MOST_STEPS:
            raise ValueError(f"steps must be an integer from 1 to {MOST_STEPS}, got {self.steps}")

    @property
    def is_capturable(self) -> bool:
        """True if the draft's steps can be captured; a verification is not captured."""
        return declares_capturable(self.denoising)

    def adjusted(self, temperature: float | None, filters: dict[str, Any]) -> Self:
        """The strategy whose head has this temperature and these filters."""
        return replace(self, head=self.head.adjusted(temperature, filters))

    def shape(self, step: int, steps: int) -> Shape:
        """Return the draft's distribution in this step of its round."""
        return self.denoising.shape(step % self.steps, self.steps)

    def decide(self, canvases: Canvases) -> Decision:
        """Return the draft's decision; the last step of a round finishes the canvas, which is then verified."""
        step_B = canvases.step_B % self.steps
        decision = self.denoising.decide(
            replace(canvases, step_B=step_B, steps_B=torch.full_like(canvases.steps_B, self.steps))
        )
        is_last_B = step_B == self.steps - 1
        return replace(decision, stop_B=is_last_B if decision.stop_B is None else decision.stop_B | is_last_B)


@dataclass(frozen=True)
class Speculative:
    """Rounds of one drafter pass over a block and its verification; the response has the tokens of `head`.

    block: the most tokens of a block, the accepted first one included (None: as many as the drafter has, and fewer if
    few were accepted recently).
    """

    head: NextToken = field(default_factory=NextToken)
    block: Annotated[int | None, Key("the most tokens of a block; none: as many as were right lately, and more")] = None

    def __post_init__(self) -> None:
        if self.block is not None and not 1 <= self.block <= MOST_STEPS:
            raise ValueError(f"block must be from 1 to {MOST_STEPS}, got {self.block}")

    def adjusted(self, temperature: float | None, filters: dict[str, Any]) -> Self:
        """The strategy whose head has this temperature and these filters."""
        return replace(self, head=self.head.adjusted(temperature, filters))

    def shape(self, step: int, steps: int) -> Shape:
        """The head's distribution."""
        return self.head.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        """The head's decision."""
        return self.head.decide(canvases)


def next_token_head(strategy: Strategy) -> NextToken | None:
    """Return the next-token sampling that decides every token; None if canvases are committed without verification."""
    head = getattr(strategy, "head", None)
    return head if isinstance(head, NextToken) else None
