"""Norms and QK-norm + RoPE in plain torch; fp32 CPU tensors get hand-written backwards.

Norms compute in fp32 at least and cast back, as the released model does. Composed ops would walk the same tensor a
dozen times in the backward; on a CPU these elementwise walks are half of a small model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import upcast

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels

FEW = 1 << 14  # elements


def _composed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x_wide = upcast(x)
    normed = x_wide * torch.pow(x_wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * upcast(weight)
    return normed.to(x.dtype)


def _is_fast(x: Tensor, *weights: Tensor | None) -> bool:
    """True where the hand-written path serves: plain fp32 on a CPU."""
    return x.dtype == torch.float32 and x.is_cpu and all(w is None or w.dtype == torch.float32 for w in weights)


def _rstd(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, eps: float) -> Tensor:
    """x * rstd without gradient. For a few tokens torch's composed op costs fewer calls, for many more walks."""
    return F.rms_norm(x, x.shape[-1:], None, eps) if x.numel() < FEW else x * _rstd(x, eps)


def _norm_backward(grad: Tensor, weight: Tensor | None, x: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight from that of `y = x * rstd * weight`.

    With p = grad * x: dweight = p^T rstd and the row products sum(grad * weight * x) = p weight, both matrix-vector.
    """
    product = (grad * x).reshape(-1, x.shape[-1])
    if weight is None:
        dot = product.sum(-1)
        grad_x = grad * rstd
    else:
        dot = product @ weight
        grad_x = (grad * weight).mul_(rstd)
    factor = (dot.view_as(rstd) * rstd.pow(3)).mul_(-1.0 / x.shape[-1])
    return grad_x.addcmul_(x, factor), product.t() @ rstd.reshape(-1)


class _Norms(torch.autograd.Function):
    """One norm of x, several weights: the reduction and the normed x are shared in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *weights: Tensor | None) -> tuple[Tensor, ...]:
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, rstd, *weights)
        return _weighted(x * rstd, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, *weights = ctx.saved_tensors
        if len(grads) == 1:
            grad_x, grad_weight = _norm_backward(grads[0], weights[0], x, rstd)
            return grad_x, None, None if weights[0] is None else grad_weight
        grad_n = torch.zeros_like(x) if weights[-1] is not None else grads[-1].clone()
        grad_weights: list[Tensor | None] = []
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            is_trained = weight is not None and ctx.needs_input_grad[2 + i]
            product = (grad * x).reshape(-1, x.shape[-1]) if is_trained else None
            grad_weights.append(None if product is None else product.t() @ rstd.reshape(-1))
            if weight is not None:
                grad_n.addcmul_(grad, weight)
            elif i + 1 < len(grads):
                grad_n.add_(grad)
        return _norm_backward(grad_n, None, x, rstd)[0], None, *grad_weights


def _weighted(normed: Tensor, weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """normed times each weight; the last one may take the buffer."""
    outs = [normed.clone() if w is None else normed * w for w in weights[:-1]]
    last = weights[-1]
    return (*outs, normed if last is None else normed.mul_(last))


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """RMSNorm of x once for each weight (None: no weight): `x * (mean(x^2) + eps)^-0.5 * weight`, in fp32 at least."""
    if not _is_fast(x, *weights):
        return tuple(_composed(x, w, eps) for w in weights)
    if torch.is_grad_enabled():
        return _Norms.apply(x, eps, *weights)
    return _weighted(_normed(x, eps), weights)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None) -> Tensor:
        rstd = _rstd(y, eps)
        ctx.save_for_backward(y, rstd, weight, scalar)
        out = (y * rstd).mul_(weight).add_(x)
        return out if scalar is None else out.mul_(scalar)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, scalar = ctx.saved_tensors
        grad = grad if scalar is None else grad * scalar
        return grad, *_norm_backward(grad, weight, y, rstd), None, None


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """`(x + rms_norm(y) * weight) * scalar`; scalar, [1] or one for each row [..., 1], gets no gradient."""
    if not _is_fast(y, weight):
        out = x + _composed(y, weight, eps)
        return out if scalar is None else out * scalar
    if torch.is_grad_enabled():
        return _AddNorm.apply(x, y, weight, eps, scalar)
    out = _normed(y, eps).mul_(weight).add_(x)
    return out if scalar is None else out.mul_(scalar)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, rstd, weight, cos, sin)
        return _rotate((x * rstd).mul_(weight), cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight, cos, sin = ctx.saved_tensors
        grad_n = (grad * cos).add_((grad * sin).roll(x.shape[-1] // 2, -1))
        return *_norm_backward(grad_n, weight, x, rstd), None, None, None


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """RMSNorm over the head dimension, then rotation of its halves: `y = x cos + roll(x, d/2) sin`.

    cos_BTd, sin_BTd: [B, T, d] in x's dtype as `layers.rope.angles` makes them: both halves of cos are the same, the
    first half of sin is negated, so that y1 = x1 cos - x2 sin and y2 = x2 cos + x1 sin.
    """
    cos, sin = cos_BTd.unsqueeze(2), sin_BTd.unsqueeze(2)
    if not _is_fast(x_BThd, weight):
        normed = _composed(x_BThd, weight, eps)
        return normed * cos + normed.roll(normed.shape[-1] // 2, -1) * sin
    if torch.is_grad_enabled():
        return _NormRope.apply(x_BThd, weight, cos, sin, eps)
    return _rotate(_normed(x_BThd, eps).mul_(weight), cos, sin)


def turned(x_BThd: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """The rotation of `norm_rope`, for the first r dimensions of every head; the others pass."""
    cos, sin, r = cos_BTr.unsqueeze(2), sin_BTr.unsqueeze(2), cos_BTr.shape[-1]
    first = x_BThd if r == x_BThd.shape[-1] else x_BThd[..., :r]
    rotated = first * cos + first.roll(r // 2, -1) * sin
    return rotated if first is x_BThd else torch.cat([rotated, x_BThd[..., r:]], -1)


def residual_norms(
    ops: Kernels, x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...]:
    """`x + rms_norm(y)`, and what `rms_norms` gives of that under up to three weights."""
    x = ops.add_rms_norm(x, y, weight, eps)
    return x, *ops.rms_norms(x, weights, eps)
