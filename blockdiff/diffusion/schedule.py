"""Noise schedules (the share of a canvas that survives at time t), and draws of a time t for each canvas of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from blockdiff.seeding import Stream, integers, uniform


class Schedule(Protocol):
    """alpha(t): the probability that a token is kept at time t in [0, 1]; alpha(0) = 1, alpha(1) = 0.

    All methods are elementwise: float [*] in, float [*] out.
    """

    def alpha(self, t: Tensor) -> Tensor:
        """Return the probability that a token is kept."""

    def noise(self, t: Tensor) -> Tensor:
        """Return 1 - alpha(t), the probability that a token is replaced, at full precision even if it is small."""

    def derivative(self, t: Tensor) -> Tensor:
        """Return d alpha / d t, never positive."""


class TimeDraw(Protocol):
    """Draws the time t of a canvas. It depends on seed, step, slot and canvas, not on how the batch is split."""

    def draw(self, seed: int, step: int, slot_N: Tensor, canvas_N: Tensor, total: int) -> Tensor:
        """Return times float32 [N] for canvas number `canvas_N` of the example in slot `slot_N` of `total` slots."""


@dataclass(frozen=True)
class Linear:
    """alpha(t) = 1 - t: at time t a share t of the tokens is replaced (Google's recipe)."""

    def alpha(self, t: Tensor) -> Tensor:
        """1 - t."""
        return 1 - t

    def noise(self, t: Tensor) -> Tensor:
        """t."""
        return t

    def derivative(self, t: Tensor) -> Tensor:
        """-1."""
        return -torch.ones_like(t)


@dataclass(frozen=True)
class Cosine:
    """alpha(t) = 1 - cos(pi/2 (1 - t)) = 1 - sin(pi/2 t): more time at high noise (arXiv 2406.04329)."""

    def alpha(self, t: Tensor) -> Tensor:
        """1 - sin(pi t / 2)."""
        return 1 - self.noise(t)

    def noise(self, t: Tensor) -> Tensor:
        """sin(pi t / 2)."""
        return torch.sin(t * (math.pi / 2))

    def derivative(self, t: Tensor) -> Tensor:
        """-(pi / 2) cos(pi t / 2)."""
        return -(math.pi / 2) * torch.cos(t * (math.pi / 2))


@dataclass(frozen=True)
class Polynomial:
    """alpha(t) = 1 - t^power (arXiv 2406.04329): power 1 is linear; above 1 more time is spent at low noise."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.power < math.inf:
            raise ValueError(f"power must be more than 0, got {self.power}")

    def alpha(self, t: Tensor) -> Tensor:
        """1 - t^power."""
        return 1 - self.noise(t)

    def noise(self, t: Tensor) -> Tensor:
        """t^power."""
        return t**self.power

    def derivative(self, t: Tensor) -> Tensor:
        """-power t^(power - 1); minus infinity at 0 for a power below 1."""
        return -self.power * t ** (self.power - 1)


@dataclass(frozen=True)
class _Time:
    """Times between `low` and `high`, one draw `per` canvas, or per example for all of its canvases."""

    low: float = 1e-4
    high: float = 1 - 1e-4
    per: Literal["canvas", "example"] = "canvas"

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"low must be less than high, both from 0 to 1, got {self.low} and {self.high}")
        if self.per not in ("canvas", "example"):
            raise ValueError(f"per must be canvas or example, got {self.per}")

    def _drawn_for(self, canvas_N: Tensor) -> Tensor:
        """Return the canvas numbers that key the draws: `canvas_N`, or 0 if an example's canvases share one draw."""
        return canvas_N if self.per == "canvas" else torch.zeros_like(canvas_N)

    def _scaled(self, u_N: Tensor) -> Tensor:
        return (self.low + (self.high - self.low) * u_N).float()


@dataclass(frozen=True)
class UniformTime(_Time):
    """t ~ U(low, high), independent for each canvas; (step, slot, canvas) keys the draw."""

    def draw(self, seed: int, step: int, slot_N: Tensor, canvas_N: Tensor, total: int) -> Tensor:
        """t = low + (high - low) u."""
        return self._scaled(_own_uniform(seed, step, slot_N, self._drawn_for(canvas_N)))


@dataclass(frozen=True)
class StratifiedTime(_Time):
    """One canvas in each of `total` equal parts of (low, high), so a global batch covers the whole range.

    A random rotation for each step and canvas number decides which slot gets which part. So each t alone is U(low,
    high), and the mean of a loss over the batch varies less than with independent draws.
    """

    def draw(self, seed: int, step: int, slot_N: Tensor, canvas_N: Tensor, total: int) -> Tensor:
        """t = low + (high - low) ((slot + rotation(step, canvas)) mod total + u) / total."""
        return self._scaled(_stratified_uniform(seed, step, slot_N, self._drawn_for(canvas_N), total))


@dataclass(frozen=True)
class LogitNormalTime(_Time):
    """logit(t) ~ N(mean, std^2), clamped to [low, high]: more canvases at middle noise levels than at the ends.

    Image diffusion models draw t in this way (arXiv 2403.03206). Quantiles are stratified over the global batch as in
    `StratifiedTime`.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.mean) or not 0 < self.std < math.inf:
            raise ValueError(f"mean must be finite and std more than 0, got {self.mean} and {self.std}")

    def draw(self, seed: int, step: int, slot_N: Tensor, canvas_N: Tensor, total: int) -> Tensor:
        """t = sigmoid(mean + std Phi^-1(u)), clamped to [low, high]; u is stratified, Phi is the normal CDF."""
        normal_N = torch.special.ndtri(_stratified_uniform(seed, step, slot_N, self._drawn_for(canvas_N), total))
        return torch.sigmoid(self.mean + self.std * normal_N).clamp(self.low, self.high).float()


def _own_uniform(seed: int, step: int, slot_N: Tensor, canvas_N: Tensor) -> Tensor:
    return uniform(seed, Stream.TIME, (step, slot_N, canvas_N), 1)[..., 0].double()


def _stratified_uniform(seed: int, step: int, slot_N: Tensor, canvas_N: Tensor, total: int) -> Tensor:
    rotation_N = integers(seed, Stream.TIME_ROTATION, (step, canvas_N), 1, total)[..., 0]
    part_N = (slot_N + rotation_N) % total
    return (part_N + _own_uniform(seed, step, slot_N, canvas_N)) / total
