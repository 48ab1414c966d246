"""Learning rates as functions of the optimiser step: a line up to the peak, then each its own way down.

`peak`: the largest learning rate. `steps`: the step that reaches `final_ratio * peak`; constant from there on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """A line up to `peak` at `warmup_steps`, then half a cosine down to `final_ratio * peak` at `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.1

    def lr(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 1."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class WarmupLinear:
    """A line up to `peak` at `warmup_steps`, then a line down to `final_ratio * peak` at `steps`."""

    peak: float
    steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.1

    def lr(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 1."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.peak * (1 - (1 - self.final_ratio) * done)


@dataclass(frozen=True)
class WarmupConstant:
    """A line up to `peak` at `warmup_steps`, and `peak` from there on."""

    peak: float
    warmup_steps: int = 0

    def lr(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 1."""
        return self.peak * step / self.warmup_steps if step < self.warmup_steps else self.peak


@dataclass(frozen=True)
class WarmupStableDecay:
    """WSD (arXiv 2404.06395): up to `peak`, level, and over the last `decay_steps` a line down to the final ratio.

    A run can be prolonged from any step of the level part: until then `steps` has no influence. A decay that would
    begin within the warm-up begins after it.
    """

    peak: float
    steps: int
    warmup_steps: int
    decay_steps: int
    final_ratio: float = 0.1

    def lr(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 1."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        begin = max(self.warmup_steps, self.steps - self.decay_steps)
        done = min(1.0, max(0, step - begin) / max(1, self.steps - begin))
        return self.peak * (1 - (1 - self.final_ratio) * done)
