"""Norms, and QK-norm with RoPE, in plain torch. Norms compute in at least fp32 and cast back, as the released model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.op import Ops


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """Return `x * (mean(x^2) + eps)^-0.5 * weight` for each weight (None: no weight), computed in at least fp32."""
    x_wide = upcast(x)
    normed = x_wide * torch.pow(x_wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return tuple([(normed if w is None else normed * upcast(w)).to(x.dtype) for w in weights])


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """Compute `(x + rms_norm(y) * weight) * scalar`; scalar, [1] or [..., 1] for rows, gets no gradient (None: 1)."""
    out = x + rms_norms(y, (weight,), eps)[0]
    return out if scalar is None else out * scalar


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """Norm each head, then rotate its halves: `y = x cos + roll(x, d/2) sin`.

    cos_BTd, sin_BTd: in x's dtype, from `layers.rope.angles`: both halves of cos are equal, the first half of sin is
    negated, so that y1 = x1 cos - x2 sin and y2 = x2 cos + x1 sin.
    """
    return turned(rms_norms(x_BThd, (weight,), eps)[0], cos_BTd, sin_BTd)


def turned(x_BThd: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """Apply the rotation of `norm_rope` to the first r numbers of every head; the others are unchanged."""
    cos, sin, r = cos_BTr.unsqueeze(2), sin_BTr.unsqueeze(2), cos_BTr.shape[-1]
    first = x_BThd if r == x_BThd.shape[-1] else x_BThd[..., :r]
    rotated = first * cos + first.roll(r // 2, -1) * sin
    return rotated if first is x_BThd else torch.cat([rotated, x_BThd[..., r:]], -1)


def residual_norms(
    ops: Ops, x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...]:
    """Return `x + rms_norm(y) * weight`, then `rms_norms` of that sum with up to three weights."""
    x = ops.add_rms_norm(x, y, weight, eps)
    return x, *ops.rms_norms(x, weights, eps)


def layer_end(
    ops: Ops, x: Tensor, dense: Tensor, routed: Slots, weights: tuple[Tensor, Tensor, Tensor], eps: float,
    scalar: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute `(x + norm(norm(dense) + norm(routed))) * scalar` of tokens [..., D].

    routed: from `expert_slots`. weights: of the norms of dense, of routed and of their sum. scalar: as in
    `add_rms_norm`.
    """
    (of_dense,) = ops.rms_norms(dense, (weights[0],), eps)
    both = ops.add_rms_norm(of_dense, routed.summed().view_as(x), weights[1], eps)
    return ops.add_rms_norm(x, both, weights[2], eps, scalar)
