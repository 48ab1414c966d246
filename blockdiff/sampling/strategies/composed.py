"""The strategies of canvases: any three rules together, and the reverse process itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.strategies.rules import (
    STOPPINGS,
    TEMPERATURES,
    Acceptance,
    EntropyBound,
    LinearTemperature,
    StableAndConfident,
    Stopping,
    Temperature,
)
from blockdiff.sampling.strategy import (
    Canvases,
    Decision,
    Key,
    MinP,
    Shape,
    TopK,
    TopP,
    declares_capturable,
    require_filters,
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The common part of strategies: the temperature, the stopping, and filters as `Shape` has them."""

    temperature: Annotated[Temperature, Key("how it goes from t_max to t_min", rules=TEMPERATURES)] = field(
        default_factory=LinearTemperature
    )
    stopping: Annotated[Stopping, Key("what ends a canvas before its last step", rules=STOPPINGS)] = field(
        default_factory=StableAndConfident
    )
    top_k: TopK = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0

    def __post_init__(self) -> None:
        require_filters(self.top_k, self.top_p, self.min_p)

    def shape(self, step: int, steps: int) -> Shape:
        """The temperature of the step, with the filters."""
        return _shape(self, step, steps)


@lru_cache(maxsize=1024)
def _shape(rules: Rules, step: int, steps: int) -> Shape:
    """Every canvas of a batch asks for the same few shapes, step after step."""
    return Shape(rules.temperature.at(step, steps), rules.top_k, rules.top_p, rules.min_p)


@dataclass(frozen=True)
class Composed(Rules):
    """Any acceptance with any temperature and any stopping; the defaults are the released model's rules."""

    acceptance: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True where both rules are."""
        return declares_capturable(self.acceptance) and declares_capturable(self.stopping)

    def decide(self, canvases: Canvases) -> Decision:
        """The decision: positions that the acceptance keeps, canvases that the stopping ends."""
        return replace(self.acceptance.accept(canvases), stop_B=self.stopping.stop(canvases))


@dataclass(frozen=True)
class Ancestral(Rules):
    """Each step draws the canvas of the next noise level from its posterior (discrete DDIM; D3PM, arXiv 2107.03006).

    The levels of N steps are alpha = 0, 1/N, ..., 1 (the share of true tokens). From x_t at alpha_t a position of
    the next canvas is the predicted token x_0, x_t again or noise, with the posterior q(x_s | x_t, x_0) of uniform
    noise pi = 1/V, or of masks where pi = 0. With a = alpha_t / alpha_s and b = alpha_s these have masses
    pi b (1 - a) + a b [x_t = x_0], pi a (1 - b), pi (1 - a) (1 - b).

    x_0 is drawn from the model, so x_s has the law in which x_0 is summed out (the integrated form of
    google/hackable_diffusion): a test adds it up.

    With `corrections`, each step but the last ones is followed by so many of another kind, out of the same N: the
    `positions` whose tokens the others make least likely are drawn again from alpha_s p(x_0 | the others) +
    (1 - alpha_s) pi, and all others stay (arXiv 2605.22765).
    """

    corrections: Annotated[int, Key("steps after each step that draw single positions again")] = 0
    positions: Annotated[int, Key("how many they draw again")] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corrections < 0 or self.positions < 1:
            given = f"{self.corrections} and {self.positions}"
            raise ValueError(f"corrections must be at least 0 and positions at least 1, got {given}")

    @property
    def is_capturable(self) -> bool:
        """True where the stopping is; corrections, which not every row is at in the same step, are not."""
        return not self.corrections and declares_capturable(self.stopping)

    def shape(self, step: int, steps: int) -> Shape:
        """The model's posterior at the noise level of the step; in a correction, given the other tokens alone."""
        before, after, is_correction = (float(x) for x in self._levels(torch.tensor(step), torch.tensor(steps)))
        shape = super().shape(step, steps)
        if is_correction:
            return replace(shape, alpha=after, is_of_others=True, is_of_seen=True)
        return replace(shape, alpha=before)

    def decide(self, canvases: Canvases) -> Decision:
        """The next noise level's canvas: positions that are predicted, that stay, and that are noise."""
        stats, seen_BL, pi = canvases.stats, canvases.tokens_BL, canvases.noise_probability
        before_B1, after_B1, is_correction_B1 = (x[:, None] for x in self._levels(canvases.step_B, canvases.steps_B))
        share_B1 = before_B1 / after_B1
        is_same_BL = stats.sample == seen_BL
        # Masses over pi, but where the prediction is what is seen, over 1: pi may be 0.
        unit_BL = torch.ones_like(is_same_BL, dtype=torch.float32).masked_fill_(is_same_BL, pi)
        clean_BL = unit_BL * after_B1 * (1 - share_B1) + before_B1 * is_same_BL
        stay_BL, noise_BL = unit_BL * share_B1 * (1 - after_B1), unit_BL * (1 - share_B1) * (1 - after_B1)
        place_BL = canvases.uniform_BL * (clean_BL + stay_BL + noise_BL)
        is_clean_BL = (place_BL < clean_BL) | (noise_BL + stay_BL == 0)
        is_stay_BL = place_BL < clean_BL + stay_BL
        if self.corrections:
            order_BL = stats.log_probability.argsort(dim=-1, stable=True)
            is_drawn_BL = torch.zeros_like(is_same_BL).scatter_(-1, order_BL[:, : self.positions], True)
            is_clean_BL = torch.where(is_correction_B1, is_drawn_BL & (canvases.uniform_BL < after_B1), is_clean_BL)
            is_stay_BL = torch.where(is_correction_B1, ~is_drawn_BL, is_stay_BL)
        return Decision(is_clean_BL, self.stopping.stop(canvases), is_stay_BL)

    def _levels(self, step: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """alpha before and after a step (of a correction: of the step that it corrects), and whether it is one."""
        cycle = 1 + self.corrections
        corrected = (steps - 1) // cycle  # so many steps have corrections
        number = torch.minimum(step // cycle, corrected) + (step - corrected * cycle).clamp(min=0)
        count = steps - corrected * self.corrections
        is_correction = (step < corrected * cycle) & (step % cycle > 0)
        return number / count, (number + 1) / count, is_correction


def released(generation: Generation) -> Composed:
    """The strategy of the released model, as generation settings (transformers' names) say it."""
    return Composed(
        EntropyBound(generation.entropy_bound),
        temperature=LinearTemperature(generation.t_min, generation.t_max),
        stopping=StableAndConfident(generation.stability, generation.confidence),
    )
