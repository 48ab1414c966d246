"""The oracle of rms_norm and norm_rope: formulas in the dtype given."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x * (mean(x^2) + eps)^-0.5 * weight` with no casts."""
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def norm_rope(x_BThd: Tensor, weight: Tensor, angle_BTf: Tensor, eps: float) -> Tensor:
    """The complex form: pairs (x[i], x[i + d/2]) are numbers turned by their angle [B, T, d/2]."""
    first, second = rms_norm(x_BThd, weight, eps).chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle_BTf), angle_BTf).unsqueeze(2)
    return torch.cat([turned.real, turned.imag], -1)
