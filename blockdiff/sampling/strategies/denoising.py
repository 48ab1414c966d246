"""The strategies that denoise canvases: a rule that accepts samples, an end, a falling temperature; edits; and DDIM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.acceptance import Acceptance, Confident, EntropyBound
from blockdiff.sampling.strategy import Canvases, Decision, Key, MinP, Shape, TopK, TopP, declares_capturable


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The shared part of denoising strategies: the temperature, the end of a canvas, and the filters of a `Shape`.

    With n of N steps remaining the temperature is t_min + (t_max - t_min) n / N: it falls from t_max and never quite
    reaches t_min, as in transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.

    A canvas ends before its last step if its argmax has been the same for `stability` steps and the mean entropy of its
    tempered distributions, in nats, is less than `confidence`. With stability 0 only the entropy decides, with
    confidence inf only the argmax; with confidence 0 every canvas takes all its steps. A canvas of masks also ends if
    no mask is left, or none before a token that ends the response.
    """

    t_min: Annotated[float, Key("the temperature that later steps fall to", settings="t_min")] = 0.4
    t_max: Annotated[float, Key("the temperature of the first step", settings="t_max")] = 0.8
    stability: Annotated[int, Key("a canvas ends after so many steps with the same argmax", settings="stability")] = 1
    confidence: Annotated[float, Key("a canvas ends below this mean entropy; 0: never", settings="confidence")] = 0.005
    top_k: TopK = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    greedy: Annotated[bool, Key("draw nothing: take likeliest tokens, with their probabilities at temperature 1")] = (
        False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.t_min <= self.t_max < math.inf or self.t_max == 0:
            raise ValueError(f"t_min must be at least 0 and at most t_max, got {self.t_min} and {self.t_max}")
        if not (self.stability >= 0 and self.confidence >= 0):
            values = f"{self.stability} and {self.confidence}"
            raise ValueError(f"stability and confidence must be at least 0, got {values}")
        Shape(1.0, self.top_k, self.top_p, self.min_p)  # raises ValueError for bad filters

    def shape(self, step: int, steps: int) -> Shape:
        """Return the step's temperature and filters, and whether nothing is drawn."""
        return _shape(self, step, steps)

    def adjusted(self, temperature: float | None, filters: dict[str, Any]) -> Self:
        """Return the strategy with these filters, and this temperature at the first step; see `adjusted` of `named`."""
        if not 0 <= (temperature or 0) < math.inf:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if temperature is not None:
            filters = filters | {"greedy": temperature == 0}
        if temperature:
            filters = filters | {"t_min": self.t_min * temperature / self.t_max, "t_max": temperature}
        return replace(self, **filters)

    def ended(self, decision: Decision, canvases: Canvases) -> Decision:
        """Add to a decision which canvases end, and their final tokens.

        Under mask noise the newly filled tokens are part of the finished canvas.
        """
        stop_B = self.stop(canvases)
        if not canvases.are_masks:
            return replace(decision, stop_B=stop_B)
        is_left_BL, standing_BL = ~(decision.kept_BL | canvases.is_pinned_BL), decision.standing(canvases)
        is_whole_BL = is_left_BL.cumsum(-1) == 0  # up to here
        is_over_B, is_new_BL = is_whole_BL[:, -1], is_whole_BL & ~canvases.is_pinned_BL  # a prompt's tail ends nothing
        for token in canvases.end_ids:
            is_over_B = is_over_B | ((standing_BL == token) & is_new_BL).any(-1)
        final_BL = canvases.stats.argmax.where(is_left_BL, standing_BL)
        return replace(decision, stop_B=is_over_B if stop_B is None else stop_B | is_over_B, final_BL=final_BL)

    def stop(self, canvases: Canvases) -> Tensor | None:
        """Return the canvases that end by entropy and argmax, bool [B]; None if none can end before its last step."""
        if self.confidence == 0:
            return None
        is_stable_B = canvases.unchanged_B >= self.stability
        return (canvases.stats.entropy.mean(-1) < self.confidence) & is_stable_B


@lru_cache(maxsize=1024)
def _shape(strategy: Denoising, step: int, steps: int) -> Shape:
    """Return a strategy's shape; cached, because every canvas of a batch requests the same few shapes."""
    remaining = torch.tensor(steps - step, dtype=torch.int32)
    temperature = float(strategy.t_min + (strategy.t_max - strategy.t_min) * (remaining / steps))
    return Shape(temperature, strategy.top_k, strategy.top_p, strategy.min_p, strategy.greedy)


@dataclass(frozen=True)
class Composed(Denoising):
    """The released model's strategy, with its own or another acceptance rule."""

    acceptance: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True if the acceptance rule declares that it can be captured."""
        return declares_capturable(self.acceptance)

    def decide(self, canvases: Canvases) -> Decision:
        """Return the positions that the acceptance rule keeps, and the canvases that end."""
        return self.ended(self.acceptance.accept(canvases), canvases)


@dataclass(frozen=True)
class JointThreshold(Denoising):
    """Fill masks as `confident` does, and edit visible tokens (LLaDA2.1).

    Each step replaces every visible token that was not given if the model's likeliest token differs from it and has a
    probability above `edit_threshold`. A canvas ends with the first step that has no mask in its input and edits
    nothing, or after `post_steps` steps without a mask.
    """

    threshold: Annotated[float, Key("the probability above which a mask is filled; the likeliest always is")] = 0.9
    edit_threshold: Annotated[float, Key("the probability above which another token replaces a visible one")] = 0.9
    post_steps: Annotated[int, Key("the most steps after the one that fills the last mask")] = 16
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        Confident(self.threshold)
        if not 0 <= self.edit_threshold < 1:
            raise ValueError(f"edit_threshold must be at least 0 and less than 1, got {self.edit_threshold}")
        if self.post_steps < 1:
            raise ValueError(f"post_steps must be at least 1, got {self.post_steps}")

    def decide(self, canvases: Canvases) -> Decision:
        """Return the masks that are filled, the tokens that are edited, and the canvases that end."""
        if not canvases.are_masks:
            raise RequestError("strategy joint_threshold edits canvases of masks, and this model's noise is no mask")
        keep_BL, stats = Confident(self.threshold).accept(canvases).keep_BL, canvases.stats
        is_other_BL = (stats.best != canvases.tokens_BL) & (stats.best_log_probability.exp() > self.edit_threshold)
        is_edited_BL = is_other_BL & ~canvases.is_masked_BL & ~canvases.is_pinned_BL
        tokens_BL, whole_B = stats.best.where(is_edited_BL, stats.sample), canvases.whole_B
        stop_B = (whole_B > 0) & ((whole_B >= self.post_steps) | ~is_edited_BL.any(-1))
        return Decision(keep_BL, stop_B, final_BL=tokens_BL.where(keep_BL, stats.argmax), tokens_BL=tokens_BL)


@dataclass(frozen=True)
class Ancestral(Denoising):
    """Each step draws the canvas of the next noise level from its posterior (discrete DDIM; D3PM, arXiv 2107.03006).

    The levels of N steps are alpha = 0, 1/N, ..., 1 (the share of true tokens). From x_t at alpha_t a position of
    the next canvas is the predicted token x_0, x_t again or noise, with the posterior q(x_s | x_t, x_0) of uniform
    noise pi = 1/V, or of masks where pi = 0. With a = alpha_t / alpha_s and b = alpha_s these have masses
    pi b (1 - a) + a b [x_t = x_0], pi a (1 - b), pi (1 - a) (1 - b).

    x_0 is drawn from the model, so x_s has the law in which x_0 is summed out (the integrated form of
    google/hackable_diffusion): a test adds it up.
    """

    is_capturable: ClassVar[bool] = True

    def decide(self, canvases: Canvases) -> Decision:
        """Sample the canvas of the next noise level: predicted positions, positions that stay, and noise."""
        seen_BL, pi = canvases.tokens_BL, canvases.noise_probability
        before_B1 = (canvases.step_B / canvases.steps_B)[:, None]
        after_B1 = ((canvases.step_B + 1) / canvases.steps_B)[:, None]
        share_B1 = before_B1 / after_B1
        is_same_BL = canvases.stats.sample == seen_BL
        # Masses are divided by pi, which may be 0, except if the prediction equals the input token.
        unit_BL = torch.ones_like(is_same_BL, dtype=torch.float32).masked_fill_(is_same_BL, pi)
        clean_BL = unit_BL * after_B1 * (1 - share_B1) + before_B1 * is_same_BL
        stay_BL, noise_BL = unit_BL * share_B1 * (1 - after_B1), unit_BL * (1 - share_B1) * (1 - after_B1)
        place_BL = canvases.uniform_BL * (clean_BL + stay_BL + noise_BL)
        is_clean_BL = (place_BL < clean_BL) | (noise_BL + stay_BL == 0)
        return self.ended(Decision(is_clean_BL, stay_BL=place_BL < clean_BL + stay_BL), canvases)


def released(generation: Generation) -> Composed:
    """Return DiffusionGemma's own strategy: entropy-bound acceptance with the numbers of its generation settings."""
    return Composed(
        EntropyBound(generation.entropy_bound),
        t_min=generation.t_min,
        t_max=generation.t_max,
        stability=generation.stability,
        confidence=generation.confidence,
    )
