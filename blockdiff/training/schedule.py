"""The learning rate of each optimiser step: a line up to the peak, then the way down that a schedule has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

WARMUP_STEPS = 25  # of a run that is long enough and says nothing else


class LearningRateSchedule(Protocol):
    """The fall of the learning rate after the warm-up."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """The learning rate of optimiser step `step` >= `warmup_steps` of a run of `steps`, as a share of its peak."""


def learning_rate(schedule: LearningRateSchedule, step: int, peak: float, steps: int, warmup_steps: int = 0) -> float:
    """The learning rate of optimiser step `step`, counted from 1; the warm-up is a line up to `peak`."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * schedule.share(step, warmup_steps, steps)


def default_warmup(steps: int) -> int:
    """The warm-up of a run of so many optimiser steps that says nothing of it: 25, of a short run a tenth."""
    return min(WARMUP_STEPS, steps // 10)


@dataclass(frozen=True)
class _Decay:
    """A fall to `final_ratio` of the peak at the last step and is constant from there on."""

    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio must be from 0 to 1, got {self.final_ratio}")


@dataclass(frozen=True)
class CosineDecay(_Decay):
    """Half a cosine down to `final_ratio` of the peak."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """f + (1 - f) (1 + cos(pi x)) / 2, where x goes from 0 to 1."""
        done = _done(step, warmup_steps, steps)
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class LinearDecay(_Decay):
    """A line down to `final_ratio` of the peak."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1 - (1 - f) x, where x goes from 0 to 1."""
        return 1 - (1 - self.final_ratio) * _done(step, warmup_steps, steps)


@dataclass(frozen=True)
class Constant:
    """The peak for the rest of the run."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1 at every step."""
        return 1.0


@dataclass(frozen=True)
class StableDecay(_Decay):
    """WSD (arXiv 2404.06395): level, and over the last `decay_steps` a line down to `final_ratio` of the peak.

    A run can be prolonged from any step of the level part: until then `steps` has no influence. A decay that would
    begin within the warm-up begins after it. decay_steps None: a tenth of the run.
    """

    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ValueError(f"decay_steps must not be negative, got {self.decay_steps}")

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1, then 1 - (1 - f) x, where x goes from 0 to 1 over the decay."""
        decay_steps = max(1, steps // 10) if self.decay_steps is None else self.decay_steps
        return 1 - (1 - self.final_ratio) * _done(step, max(warmup_steps, steps - decay_steps), steps)


def _done(step: int, begin: int, end: int) -> float:
    """The share of the way from `begin` to `end` at `step`, within 0 and 1."""
    return min(1.0, max(0, step - begin) / max(1, end - begin))
