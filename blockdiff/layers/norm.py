"""RMSNorm, and its two variants, which apply the weight in other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.autocast import upcast


class RMSNorm(nn.Module):
    """RMSNorm over the last axis in at least fp32, multiplied by the weight (no +1).

    form: how kernels apply the weight (`kernels.heads.Norm`). A subclass that overrides `forward` gets the form "own",
    which no kernel fuses, unless it sets another. split: maps the weight to the one that this rank multiplies by, if
    ranks norm different heads with one weight.
    """

    neutral = 1.0  # the initial weight, which changes nothing
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
        """The weight that this rank multiplies by: the parameter, through `split` if it is set."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight if self.split is None else self.split(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norms(x, (self.gain,), self.eps)[0]


class CastRMSNorm(RMSNorm):
    """Llama's RMSNorm: norm in at least fp32, cast to x's dtype, then multiply by the weight."""

    form = "cast"

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:  # the cast changes nothing
            return super().forward(x)
        return self.kernels.rms_norms(x, (None,), self.eps)[0] * self.gain


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm with the gain 1 + w: `x * rsqrt(mean(x^2) + eps) * (1 + w)`, all in at least fp32."""

    neutral = 0.0
    form = "centred"

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norms(x, (1.0 + upcast(self.gain),), self.eps)[0]
