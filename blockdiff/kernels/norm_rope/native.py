"""RMSNorm and QK-norm + RoPE in plain torch. Norms compute in fp32 and cast back, as the released model does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last axis in fp32, `x * (mean(x^2) + eps)^-0.5 * weight`, cast back to x's dtype."""
    if x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(x.dtype)


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTf: Tensor, sin_BTf: Tensor, eps: float) -> Tensor:
    """RMSNorm over the head dimension, then rotation of its halves: `y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin`.

    cos_BTf, sin_BTf: [B, T, d/2] in x's dtype.
    """
    first, second = rms_norm(x_BThd, weight, eps).chunk(2, -1)
    cos, sin = cos_BTf.unsqueeze(2), sin_BTf.unsqueeze(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
