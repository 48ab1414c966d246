"""RMSNorm, and the two other ways in which families apply its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.autocast import upcast


class RMSNorm(nn.Module):
    """RMSNorm over the last axis in fp32 at least; the weight multiplies directly (no +1).

    form: how the weight counts, as kernels have it (`kernels.heads.Norm`); a subclass with a `forward` of its own has
    a form of its own, "own", unless it says which. split: makes the weight that this rank multiplies by, if the ranks
    norm different heads with one weight.
    """

    neutral = 1.0  # the weight that changes nothing
    form = "direct"
    weight: Tensor
    split: Callable[[Tensor], Tensor] | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "forward" in vars(cls) and "form" not in vars(cls):
            cls.form = "own"

    def __init__(self, dim: int, eps: float, kernels: Kernels):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), self.neutral))
        self.eps, self.kernels = eps, kernels

    @property
    def gain(self) -> Tensor:
        """The weight as this rank multiplies by it."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight if self.split is None else self.split(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norms(x, (self.gain,), self.eps)[0]


class CastRMSNorm(RMSNorm):
    """RMSNorm as Llama has it: normed in fp32 at least, cast to x's dtype, and then multiplied by the weight."""

    form = "cast"

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:  # where casting changes nothing
            return super().forward(x)
        return self.kernels.rms_norms(x, (None,), self.eps)[0] * self.gain


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm whose weight is added to 1: `x * rsqrt(mean(x^2) + eps) * (1 + w)`, all in fp32 at least."""

    neutral = 0.0
    form = "centred"

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norms(x, (1.0 + upcast(self.gain),), self.eps)[0]
