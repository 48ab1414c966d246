"""The three rules that a strategy of canvases is made of: a temperature, an acceptance and a stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from blockdiff.sampling.strategy import Canvases, Decision, Key, declares_capturable

# -- temperature: what the logits of a step are divided by ---------------------------------------------------------


class Temperature(Protocol):
    """A frozen dataclass."""

    def at(self, step: int, steps: int) -> float:
        """The temperature of step `step`, counted from 0, of at most `steps`."""


@dataclass(frozen=True)
class ConstantTemperature:
    """The same temperature at every step."""

    t: Annotated[float, Key("what it stays at", name="t_max", settings="t_max")] = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.t < math.inf:
            raise ValueError(f"t must be more than 0, got {self.t}")

    def at(self, step: int, steps: int) -> float:
        return self.t


@dataclass(frozen=True)
class _Falling:
    """From t_max at the first step towards t_min, which the step after the last one would have."""

    t_min: Annotated[float, Key("what the temperature goes to", settings="t_min")] = 0.4
    t_max: Annotated[float, Key("what it begins with; the constant temperature", settings="t_max")] = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.t_min <= self.t_max < math.inf or self.t_max == 0:
            raise ValueError(f"t_min must be at least 0 and at most t_max, got {self.t_min} and {self.t_max}")


@dataclass(frozen=True)
class LinearTemperature(_Falling):
    """T = t_min + (t_max - t_min) n / N with n of N steps remaining: from t_max, never quite to t_min.

    As transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.
    """

    def at(self, step: int, steps: int) -> float:
        remaining = torch.tensor(steps - step, dtype=torch.int32)
        return float(self.t_min + (self.t_max - self.t_min) * (remaining / steps))


@dataclass(frozen=True)
class CosineTemperature(_Falling):
    """T = t_min + (t_max - t_min) (1 - cos(pi n / N)) / 2 with n of N steps remaining: slow at both ends."""

    def at(self, step: int, steps: int) -> float:
        """From t_max at step 0, never quite to t_min."""
        return self.t_min + (self.t_max - self.t_min) * (1 - math.cos(math.pi * (steps - step) / steps)) / 2


TEMPERATURES = {"linear": LinearTemperature, "cosine": CosineTemperature, "constant": ConstantTemperature}


# -- acceptance: which samples of a step stay, by the model's certainty of them -------------------------------------


class Acceptance(Protocol):
    """A frozen dataclass."""

    def accept(self, canvases: Canvases) -> Decision:
        """The decision about every position; another rule decides when a canvas stops."""


@dataclass(frozen=True)
class EntropyBound:
    """Accept the k most certain tokens, k as large as H_1 + ... + H_k - max(H_1, ..., H_k) <= bound allows.

    The left side bounds the mutual information of the accepted tokens, so they may be sampled independently
    (arXiv 2505.24857). At least one token is always accepted; nothing is kept from earlier steps.
    """

    bound: Annotated[float, Key("of the summed entropies", settings="entropy_bound")] = 0.1
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

    threshold: Annotated[float, Key("a probability")] = 0.9
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
        wanted_B1 = self.of_steps(canvases.step_B + 1, canvases.steps_B, log_p_BL.shape[-1])[:, None]
        is_wanted_BL = torch.arange(log_p_BL.shape[-1], device=log_p_BL.device) < wanted_B1
        return Decision(torch.empty_like(is_wanted_BL).scatter_(-1, order_BL, is_wanted_BL))

    def of_steps(self, done_B: Tensor, steps_B: Tensor, length: int) -> Tensor:
        """The number of `length` positions that are kept when so many of the steps are done, int64 [B]."""
        if self.pace == "linear":  # in integers: no rounding is rounded up
            return (done_B * length + steps_B - 1) // steps_B
        share_B = 1 - torch.cos(done_B.double() / steps_B * (math.pi / 2))
        return (share_B * length - 1e-9).ceil().long()


@dataclass(frozen=True)
class Sticky:
    """A rule that keeps for good what another rule keeps: a kept token stays and counts as certain ever after.

    So uniform noise is treated like masks, which are only ever filled in (carry-over, arXiv 2406.07524).
    """

    rule: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True where the other rule is."""
        return declares_capturable(self.rule)

    def accept(self, canvases: Canvases) -> Decision:
        """Ask the other rule with the kept positions as certain; they stay."""
        kept_BL, stats = canvases.kept_BL, canvases.stats
        certain = stats._replace(
            entropy=stats.entropy.masked_fill(kept_BL, 0.0),
            log_probability=stats.log_probability.masked_fill(kept_BL, 0.0),
            argmax=canvases.tokens_BL.where(kept_BL, stats.argmax),
            sample=canvases.tokens_BL.where(kept_BL, stats.sample),
        )
        decision = self.rule.accept(replace(canvases, stats=certain))
        stay_BL = kept_BL if decision.stay_BL is None else kept_BL | decision.stay_BL
        return Decision(decision.keep_BL & ~kept_BL, None, stay_BL)


# -- stopping: when a canvas is finished before its last step ------------------------------------------------------


class Stopping(Protocol):
    """A frozen dataclass."""

    def stop(self, canvases: Canvases) -> Tensor | None:
        """is_stopped [B], or None where no canvas stops before its last step."""


@dataclass(frozen=True)
class StableAndConfident:
    """Stop when the argmax canvas equals those of the last `stability` steps and mean H < `confidence`.

    H is the entropy of the tempered distribution in nats, averaged over the canvas. A canvas runs at least
    stability + 1 steps; stability 0 asks for confidence only, confidence inf for stability only.
    """

    stability: Annotated[int, Key("for how many steps the argmax is the same (both, stable)", settings="stability")] = 1
    confidence: Annotated[float, Key("what the mean entropy is below (both, confident)", settings="confidence")] = 0.005
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stability < 0 or not self.confidence > 0:
            raise ValueError(
                f"stability must be at least 0 and confidence more than 0, got {self.stability} and {self.confidence}"
            )

    def stop(self, canvases: Canvases) -> Tensor | None:
        is_stable_B = canvases.unchanged_B >= self.stability
        if self.confidence == math.inf:
            return is_stable_B
        return (canvases.stats.entropy.mean(-1) < self.confidence) & is_stable_B


@dataclass(frozen=True)
class AllKept:
    """Stop when every position was kept at the step before: for what is kept for good, this is the end."""

    is_capturable: ClassVar[bool] = True

    def stop(self, canvases: Canvases) -> Tensor | None:
        return canvases.kept_BL.all(-1)


@dataclass(frozen=True)
class Never:
    """Every canvas takes as many steps as it may."""

    is_capturable: ClassVar[bool] = True

    def stop(self, canvases: Canvases) -> Tensor | None:
        return None


STOPPINGS = {
    "both": StableAndConfident,
    "stable": partial(StableAndConfident, confidence=math.inf),
    "confident": partial(StableAndConfident, stability=0),
    "all_kept": AllKept,
    "never": Never,
}
