"""The strategies that denoise canvases: a rule that accepts samples, an end, a temperature that falls; and DDIM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.strategy import Canvases, Decision, Key, MinP, Shape, TopK, TopP, declares_capturable

# -- acceptance: which samples of a step stay, by the model's certainty of them -------------------------------------


class Acceptance(Protocol):
    """A frozen dataclass."""

    def accept(self, canvases: Canvases) -> Decision:
        """The decision about every position; when a canvas ends is not its matter."""


@dataclass(frozen=True)
class EntropyBound:
    """Accept the k most certain tokens, k as large as H_1 + ... + H_k - max(H_1, ..., H_k) <= bound allows.

    The left side bounds the mutual information of the accepted tokens, so they may be sampled independently
    (arXiv 2505.24857). At least one token is always accepted; nothing is kept from earlier steps.
    """

    bound: Annotated[
        float, Key("the most that their entropies may add up to, but for the largest", settings="entropy_bound")
    ] = 0.1
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound must be more than 0, got {self.bound}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples of the k most certain positions; all others become noise."""
        return Decision(self.within(canvases.stats.entropy))

    def within(self, entropy_BL: Tensor) -> Tensor:
        """The accepted positions, bool [B, L]."""
        # Stable, so that among equal entropies the first position wins whatever the batch.
        sorted_BL, order_BL = entropy_BL.sort(dim=-1, stable=True)
        is_within_BL = sorted_BL.cumsum(-1) - sorted_BL <= self.bound
        return torch.empty_like(is_within_BL).scatter_(-1, order_BL, is_within_BL)


@dataclass(frozen=True)
class Confident:
    """Accept every sample that is likelier than `threshold` (arXiv 2505.22618).

    The likeliest of those that were not kept at the step before is accepted in any case, so every step keeps a new one.
    """

    threshold: Annotated[float, Key("the probability above which a sample is kept")] = 0.9
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and less than 1, got {self.threshold}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples that are likely enough; all others become noise."""
        log_p_BL = canvases.stats.log_probability
        is_likely_BL = log_p_BL.exp() > self.threshold
        best_B1 = log_p_BL.masked_fill(canvases.kept_BL, -torch.inf).argmax(-1, keepdim=True)
        return Decision(is_likely_BL.scatter(-1, best_B1, True))


@dataclass(frozen=True)
class Quota:
    """Accept as many of the likeliest samples as the step should have reached.

    After k of N steps these are L k / N positions (pace linear), or L (1 - cos(pi k / 2N)), few at first and more and
    more (pace cosine: MaskGIT, arXiv 2202.04200), rounded up.
    """

    pace: Annotated[Literal["linear", "cosine"], Key("how the share of kept positions grows")] = "linear"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pace not in ("linear", "cosine"):
            raise ValueError(f"pace must be linear or cosine, got {self.pace!r}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the likeliest samples; all others become noise."""
        log_p_BL = canvases.stats.log_probability
        order_BL = log_p_BL.argsort(dim=-1, descending=True, stable=True)
        quota_B1 = self.of_steps(canvases.step_B + 1, canvases.steps_B, log_p_BL.shape[-1])[:, None]
        is_within_BL = torch.arange(log_p_BL.shape[-1], device=log_p_BL.device) < quota_B1
        return Decision(torch.empty_like(is_within_BL).scatter_(-1, order_BL, is_within_BL))

    def of_steps(self, done_B: Tensor, steps_B: Tensor, length: int) -> Tensor:
        """The number of `length` positions that are kept when so many of the steps are done, int64 [B]."""
        if self.pace == "linear":  # in integers: no rounding is rounded up
            return (done_B * length + steps_B - 1) // steps_B
        share_B = 1 - torch.cos(done_B.double() / steps_B * (math.pi / 2))
        return (share_B * length - 1e-9).ceil().long()


# -- the strategies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """The part that all of them share: the temperature, the end of a canvas, and filters as `Shape` has them.

    With n of N steps remaining the temperature is t_min + (t_max - t_min) n / N: it falls from t_max and never quite
    reaches t_min, as that of transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.

    A canvas ends before its last step where its argmax has been the same for `stability` steps and the mean entropy of
    its tempered distributions, in nats, is less than `confidence`. With stability 0 the entropy alone decides, with
    confidence inf the argmax alone; with confidence 0 every canvas takes all its steps.
    """

    t_min: Annotated[float, Key("the temperature that later steps fall to", settings="t_min")] = 0.4
    t_max: Annotated[float, Key("the temperature of the first step", settings="t_max")] = 0.8
    stability: Annotated[int, Key("a canvas ends after so many steps with the same argmax", settings="stability")] = 1
    confidence: Annotated[float, Key("a canvas ends below this mean entropy; 0: never", settings="confidence")] = 0.005
    top_k: TopK = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.t_min <= self.t_max < math.inf or self.t_max == 0:
            raise ValueError(f"t_min must be at least 0 and at most t_max, got {self.t_min} and {self.t_max}")
        if not (self.stability >= 0 and self.confidence >= 0):
            given = f"{self.stability} and {self.confidence}"
            raise ValueError(f"stability and confidence must be at least 0, got {given}")
        Shape(1.0, self.top_k, self.top_p, self.min_p)  # refuses filters that cannot be

    def shape(self, step: int, steps: int) -> Shape:
        """The temperature of the step, with the filters."""
        return _shape(self, step, steps)

    def adjusted(self, temperature: float | None, filters: dict[str, Any]) -> Self:
        """The strategy with these filters, and this temperature at the first step; see `adjusted` of `named`."""
        if not 0 <= (temperature or 0) < math.inf:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if temperature:
            filters = filters | {"t_min": self.t_min * temperature / self.t_max, "t_max": temperature}
        return replace(self, **filters)

    def stop(self, canvases: Canvases) -> Tensor | None:
        """The canvases that end, bool [B]; None where none does before its last step."""
        if self.confidence == 0:
            return None
        is_stable_B = canvases.unchanged_B >= self.stability
        return (canvases.stats.entropy.mean(-1) < self.confidence) & is_stable_B


@lru_cache(maxsize=1024)
def _shape(strategy: Denoising, step: int, steps: int) -> Shape:
    """Every canvas of a batch asks for the same few shapes, step after step."""
    remaining = torch.tensor(steps - step, dtype=torch.int32)
    temperature = float(strategy.t_min + (strategy.t_max - strategy.t_min) * (remaining / steps))
    return Shape(temperature, strategy.top_k, strategy.top_p, strategy.min_p)


@dataclass(frozen=True)
class Composed(Denoising):
    """The released model's strategy, or that with another rule of which samples stay."""

    acceptance: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True where the acceptance is."""
        return declares_capturable(self.acceptance)

    def decide(self, canvases: Canvases) -> Decision:
        """The decision: positions that the acceptance keeps, and canvases that end."""
        return replace(self.acceptance.accept(canvases), stop_B=self.stop(canvases))


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
        """The next noise level's canvas: positions that are predicted, that stay, and that are noise."""
        seen_BL, pi = canvases.tokens_BL, canvases.noise_probability
        before_B1 = (canvases.step_B / canvases.steps_B)[:, None]
        after_B1 = ((canvases.step_B + 1) / canvases.steps_B)[:, None]
        share_B1 = before_B1 / after_B1
        is_same_BL = canvases.stats.sample == seen_BL
        # Masses over pi, but where the prediction is what is seen, over 1: pi may be 0.
        unit_BL = torch.ones_like(is_same_BL, dtype=torch.float32).masked_fill_(is_same_BL, pi)
        clean_BL = unit_BL * after_B1 * (1 - share_B1) + before_B1 * is_same_BL
        stay_BL, noise_BL = unit_BL * share_B1 * (1 - after_B1), unit_BL * (1 - share_B1) * (1 - after_B1)
        place_BL = canvases.uniform_BL * (clean_BL + stay_BL + noise_BL)
        is_clean_BL = (place_BL < clean_BL) | (noise_BL + stay_BL == 0)
        return Decision(is_clean_BL, self.stop(canvases), place_BL < clean_BL + stay_BL)


def released(generation: Generation) -> Composed:
    """The strategy of the released model, as generation settings (transformers' names) say it."""
    return Composed(
        EntropyBound(generation.entropy_bound),
        t_min=generation.t_min,
        t_max=generation.t_max,
        stability=generation.stability,
        confidence=generation.confidence,
    )
