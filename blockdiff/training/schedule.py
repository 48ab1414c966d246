"""The learning rate of each optimiser step: a linear warm-up to the peak, then a schedule's decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

WARMUP_STEPS = 25  # the default, except in short runs


class LearningRateSchedule(Protocol):
    """The decay of the learning rate after the warm-up."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """The learning rate at optimiser step `step` >= `warmup_steps` of a run of `steps`, as a share of its peak."""


def learning_rate(schedule: LearningRateSchedule, step: int, peak: float, steps: int, warmup_steps: int = 0) -> float:
    """The learning rate of optimiser step `step`, counted from 1. The warm-up rises linearly to `peak`."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * schedule.share(step, warmup_steps, steps)


def default_warmup(steps: int) -> int:
    """The default number of warm-up steps in a run of `steps` optimiser steps: 25, or a tenth of a short run."""
    return min(WARMUP_STEPS, steps // 10)


@dataclass(frozen=True)
class _Decay:
    """A decay to `final_ratio` of the peak at the last step; constant afterwards."""

    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio should be from 0 to 1 (got {self.final_ratio})")


@dataclass(frozen=True)
class CosineDecay(_Decay):
    """Half a cosine down to `final_ratio` of the peak."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """f + (1 - f) (1 + cos(pi x)) / 2, for x from 0 to 1 over the decay."""
        done = _done(step, warmup_steps, steps)
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class LinearDecay(_Decay):
    """A linear decay to `final_ratio` of the peak."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1 - (1 - f) x, for x from 0 to 1 over the decay."""
        return 1 - (1 - self.final_ratio) * _done(step, warmup_steps, steps)


@dataclass(frozen=True)
class Constant:
    """The peak for the rest of the run."""

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1 at every step."""
        return 1.0


@dataclass(frozen=True)
class StableDecay(_Decay):
    """WSD (arXiv 2404.06395): constant, then a linear decay to `final_ratio` of the peak in the last `decay_steps`.

    A run can be extended from any step of the constant part, on which `steps` has no influence. The decay never begins
    before the end of the warm-up. decay_steps: None = a tenth of the run.
    """

    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ValueError(f"decay_steps should be 0 or more (got {self.decay_steps})")

    def share(self, step: int, warmup_steps: int, steps: int) -> float:
        """1, then 1 - (1 - f) x, for x from 0 to 1 over the decay."""
        decay_steps = max(1, steps // 10) if self.decay_steps is None else self.decay_steps
        return 1 - (1 - self.final_ratio) * _done(step, max(warmup_steps, steps - decay_steps), steps)


def _done(step: int, begin: int, end: int) -> float:
    """The position of `step` between `begin` and `end`, as a share from 0 to 1."""
    return min(1.0, max(0, step - begin) / max(1, end - begin))
