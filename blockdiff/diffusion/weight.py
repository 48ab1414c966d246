"""Loss weights, by which the loss of each canvas position is multiplied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdiff.diffusion.schedule import Schedule

# The weight grows like 1 / t towards the data; below this t it is held.
SMALLEST_T = 1e-6


class Weight(Protocol):
    """A weight of the canvas loss. It multiplies the loss, never the count that the loss is divided by."""

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        """The weights, float32 [B, C, L] or [B, C, 1], from noise levels, true tokens and which of them were replaced.

        Without gradient: what a weight is made of is no part of what trains.
        """


@dataclass(frozen=True)
class NoWeight:
    """w(t) = 1: plain cross-entropy at every noise level (Google's recipe)."""

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        """Ones, [B, C, 1]."""
        return torch.ones_like(t_BC[..., None], dtype=torch.float32)


@dataclass(frozen=True)
class ElboWeight:
    """w(t) = -alpha'(t) / (1 - alpha(t)), at most `limit` (arXiv 2406.04329, eq. 5).

    With mask corruption, the loss of corrupted positions only and t uniform in (0, 1), the weighted cross-entropy is
    an upper bound of the negative log-likelihood. w is 1 / t for the linear schedule and power / t for t^power.
    """

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit must be more than 0, got {self.limit}")

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        """The weight in t, [B, C, 1], with t taken as at least 1e-6: finite for every t."""
        t = t_BC[..., None].double().clamp(min=SMALLEST_T)  # high powers of a small t are no fp32 numbers
        weight_BC1 = -schedule.derivative(t) / schedule.noise(t)
        return (weight_BC1 if self.limit is None else weight_BC1.clamp(max=self.limit)).float()
