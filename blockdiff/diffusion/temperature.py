"""The temperature of each denoising step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearTemperature:
    """T(n) = t_min + (t_max - t_min) n / N with n of N steps remaining: from t_max, never quite to t_min.

    As transformers' LinearTemperatureScheduleLogitsProcessor, in the same float32 arithmetic.
    """

    t_min: float = 0.4
    t_max: float = 0.8

    def of_steps(self, steps: int) -> Tensor:
        """Temperatures float32 [steps], in the order in which the steps run."""
        remaining_N = torch.arange(steps, 0, -1, dtype=torch.int32)
        return self.t_min + (self.t_max - self.t_min) * (remaining_N / steps)
