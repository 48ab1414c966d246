"""The strategy of rollouts: what may draw the actions of a policy, and what is refused because it is no such policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RecipeError
from blockdiff.rl.policy import Policy
from blockdiff.sampling.strategies import Composed, EntropyBound, NextToken, as_strategy, next_token_head
from blockdiff.sampling.strategy import Canvases, Decision, Shape, Strategy

if TYPE_CHECKING:
    from blockdiff.training.recipe import RlSection

FILTERED = "rl.strategy: top_k, top_p and min_p change the distribution that is scored; leave them out"


@dataclass(frozen=True)
class CommitsDraw:
    """Another strategy that commits the last step's draw, not its argmax: every token of an answer is an action."""

    strategy: Composed

    @property
    def is_capturable(self) -> bool:
        """True where the other strategy is."""
        return self.strategy.is_capturable

    def shape(self, step: int, steps: int) -> Shape:
        """The other strategy's distribution."""
        return self.strategy.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        """The other strategy's decision, with the sample as what a finished canvas becomes."""
        return replace(self.strategy.decide(canvases), final_BL=canvases.stats.sample)


def rollout_strategy(rl: RlSection, generation: Generation, denoises: bool) -> Strategy:
    """The strategy that draws rollouts; RecipeError where its draws are not those of the policy.

    By default the head draws next tokens at temperature 1, and canvases are denoised by the model's own rules.
    """
    if rl.policy == "head":
        strategy = NextToken(1.0) if rl.strategy is None else as_strategy(rl.strategy, generation)
        head = next_token_head(strategy)
        if head is None:
            raise RecipeError(
                f"rl.strategy: {rl.strategy} denoises canvases, and the policy is the head; take next_token, or "
                "verified, whose tokens are the head's"
            )
        if not head.temperature:
            raise RecipeError(
                "rl.strategy: greedy decoding draws nothing, so nothing can be reinforced; say temperature=1"
            )
        if not head.shape(0, 1).is_plain:
            raise RecipeError(FILTERED)
        return strategy
    if not denoises:
        raise RecipeError("rl.policy: canvas: the model is causal and has no canvases; choose head")
    strategy = as_strategy(rl.strategy, generation)
    acceptance = getattr(strategy, "acceptance", None)
    if not isinstance(strategy, Composed) or not isinstance(acceptance, EntropyBound):
        raise RecipeError(
            f"rl.strategy: {rl.strategy}: what it accepts depends on what it draws, so the log-probability of a "
            "trajectory is not known; take entropy_bound"
        )
    if not strategy.shape(0, 1).is_plain:
        raise RecipeError(FILTERED)
    return CommitsDraw(strategy)


def policy_of(rl: RlSection, strategy: Strategy, max_steps: int) -> Policy:
    """The policy whose actions a strategy draws in at most so many steps a canvas."""
    head = next_token_head(strategy)
    if head is not None:
        return Policy("head", [head.temperature], rl.clip, rl.kl)
    assert isinstance(strategy, CommitsDraw) and isinstance(strategy.strategy.acceptance, EntropyBound)
    temperatures = [strategy.shape(step, max_steps).temperature for step in range(max_steps)]
    return Policy("canvas", temperatures, rl.clip, rl.kl, strategy.strategy.acceptance, rl.signal == "through")
