"""The temperature of each denoising step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Temperature(Protocol):
    """A frozen dataclass."""

    def at(self, step: int, steps: int) -> float:
        """The temperature of step `step`, counted from 0, of at most `steps`."""


@dataclass(frozen=True)
class ConstantTemperature:
    """The same temperature at every step."""

    t: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.t < math.inf:
            raise ValueError(f"t must be more than 0, got {self.t}")

    def at(self, step: int, steps: int) -> float:
        """The temperature."""
        return self.t


@dataclass(frozen=True)
class _Falling:
    """From t_max at the first step towards t_min, which the step after the last one would have."""

    t_min: float = 0.4
    t_max: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.t_min <= self.t_max < math.inf or self.t_max == 0:
            raise ValueError(f"t_min must be at least 0 and at most t_max, got {self.t_min} and {self.t_max}")


@dataclass(frozen=True)
class LinearTemperature(_Falling):
    """T = t_min + (t_max - t_min) n / N with n of N steps remaining: from t_max, never quite to t_min.

    As transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.
    """

    def at(self, step: int, steps: int) -> float:
        """The float32 number."""
        remaining = torch.tensor(steps - step, dtype=torch.int32)
        return float(self.t_min + (self.t_max - self.t_min) * (remaining / steps))


@dataclass(frozen=True)
class CosineTemperature(_Falling):
    """T = t_min + (t_max - t_min) (1 - cos(pi n / N)) / 2 with n of N steps remaining: slow at both ends."""

    def at(self, step: int, steps: int) -> float:
        """From t_max at step 0, never quite to t_min."""
        return self.t_min + (self.t_max - self.t_min) * (1 - math.cos(math.pi * (steps - step) / steps)) / 2
