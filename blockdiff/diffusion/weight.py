"""Weights that multiply the loss of each canvas position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdiff.diffusion.schedule import Schedule

# The weight grows like 1 / t towards the data; below this t it is constant.
SMALLEST_T = 1e-6


class Weight(Protocol):
    """A weight of the canvas loss. It multiplies the loss, never the count by which the loss is divided."""

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        """Return the weights, float32 [B, C, L] or [B, C, 1], without gradient.

        t_BC: noise levels; tokens_BCL: the true tokens; is_corrupted_BCL: which of them were replaced.
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

    With mask corruption, a loss over corrupted positions only, and t uniform in (0, 1), the weighted cross-entropy is
    an upper bound of the negative log-likelihood. w is 1 / t for the linear schedule and power / t for t^power.
    """

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit must be more than 0, got {self.limit}")

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        """Return w(t), [B, C, 1]; t is clamped to at least 1e-6, so that the weight is finite."""
        t = t_BC[..., None].double().clamp(min=SMALLEST_T)  # high powers of a small t underflow in fp32
        weight_BC1 = -schedule.derivative(t) / schedule.noise(t)
        return (weight_BC1 if self.limit is None else weight_BC1.clamp(max=self.limit)).float()
