"""The temperature of each denoising step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Temperature(Protocol):
    """A frozen dataclass."""

    def at(self, step: int, steps: int) -> float:
        """The temperature of step `step`, counted from 0, of at most `steps`."""


@dataclass(frozen=True)
class LinearTemperature:
    """T = t_min + (t_max - t_min) n / N with n of N steps remaining: from t_max, never quite to t_min.

    As transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.
    """

    t_min: float = 0.4
    t_max: float = 0.8

    def at(self, step: int, steps: int) -> float:
        """The float32 number."""
        remaining = torch.tensor(steps - step, dtype=torch.int32)
        return float(self.t_min + (self.t_max - self.t_min) * (remaining / steps))
