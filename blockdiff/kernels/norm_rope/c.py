"""Norms, and QK-norm with RoPE, by the C functions in norm_rope.c, for fp32 on a CPU.

Heads are read with their strides and written in attention's memory layout, [B, h, T, d], so that neither direction
copies them to transpose tokens and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import BLOCKS, call, serves
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.once_differentiable import once_differentiable

MOST = 3  # norms of one tensor that a call can compute


def _rows(x: Tensor) -> tuple[int, int]:
    """Return the number of rows of a tensor, and their length."""
    width = x.shape[-1]
    return x.numel() // max(width, 1), width


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *weights: Tensor | None) -> tuple[Tensor, ...]:
        rstd = x.new_empty(_rows(x)[0])
        ctx.save_for_backward(x, rstd, *weights)
        return _norms(x, weights, eps, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, *weights = ctx.saved_tensors
        rows, width = _rows(x)
        of_weights = [
            torch.empty_like(w) if w is not None and needed else None
            for w, needed in zip(weights, ctx.needs_input_grad[2:], strict=True)
        ]
        dense = [grad.contiguous() for grad in grads]
        each = [y for of_one in zip(dense, weights, of_weights, strict=True) for y in of_one]
        each += [None] * (3 * MOST - len(each))
        partial, grad_x = x.new_empty(MOST, BLOCKS, width), torch.empty_like(x)
        call("norms_backward", x, rows, width, rstd, *each, partial, grad_x)
        return grad_x, None, *of_weights


def _norms(x: Tensor, weights: Sequence[Tensor | None], eps: float, rstd: Tensor | None) -> tuple[Tensor, ...]:
    outs = tuple(torch.empty_like(x) for _ in weights)
    each = [y for pair in zip(weights, outs, strict=True) for y in pair] + [None, None] * (MOST - len(outs))
    call("norms", x, *_rows(x), eps, rstd, *each)
    return outs


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """Return `x * (mean(x^2) + eps)^-0.5 * weight` for each weight (None: no weight); Unserved for more than MOST."""
    if len(weights) > MOST or not serves(x, *weights):
        raise Unserved(f"rms_norms in C takes fp32 tensors of a CPU and up to {MOST} weights")
    if x.dim() == 4 and len(weights) == 1:
        return (_heads(x, weights[0], None, None, eps),)
    x = x.contiguous()
    if torch.is_grad_enabled():
        return _Norms.apply(x, eps, *weights)
    return _norms(x, weights, eps, None)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None) -> Tensor:
        rstd = y.new_empty(_rows(y)[0])
        ctx.save_for_backward(y, rstd, weight, scalar)
        return _add_norm(x, y, weight, eps, scalar, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, scalar = ctx.saved_tensors
        grad, (rows, width) = grad.contiguous(), _rows(y)
        grad_x = None if scalar is None else torch.empty_like(grad)
        grad_y, grad_weight = torch.empty_like(y), torch.empty_like(weight)
        into = (y.new_empty(BLOCKS, width), grad_x, grad_y, grad_weight)
        call("add_norm_backward", grad, y, rows, width, rstd, weight, scalar, _step(scalar), *into)
        return grad if grad_x is None else grad_x, grad_y, grad_weight, None, None


def _step(scalar: Tensor | None) -> int:
    """Return the stride between the scalars of rows, 0 if all rows share one."""
    return 0 if scalar is None or scalar.numel() == 1 else 1


def _add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None, rstd: Tensor | None) -> Tensor:
    out = torch.empty_like(y)
    call("add_norm", x, y, *_rows(y), eps, weight, scalar, _step(scalar), rstd, out)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """Compute `(x + rms_norm(y) * weight) * scalar`; scalar, [1] or one a row, gets no gradient (None: 1)."""
    is_by_row = scalar is None or scalar.numel() in (1, _rows(y)[0])
    if not is_by_row or x.shape != y.shape or not serves(x, y, weight, scalar):
        raise Unserved("add_rms_norm in C takes fp32 tensors of a CPU, of one shape, and a scalar for all or each row")
    x, y, scalar = x.contiguous(), y.contiguous(), None if scalar is None else scalar.contiguous()
    if torch.is_grad_enabled():
        return _AddNorm.apply(x, y, weight, eps, scalar)
    return _add_norm(x, y, weight, eps, scalar, None)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float
    ) -> Tensor:
        rstd = x.new_empty(_rows(x)[0])
        ctx.save_for_backward(x, rstd, weight, cos, sin)
        return _norm_rope(x, weight, cos, sin, eps, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight, cos, sin = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grad_x = torch.empty(x.shape, dtype=x.dtype)
        grad_weight = None if weight is None else torch.empty_like(weight)
        into = (x.new_empty(BLOCKS, x.shape[-1]), grad_x, grad_weight)
        strides = (grad.stride()[:3], x.stride()[:3])
        call("norm_rope_backward", grad, *strides[0], x, *strides[1], *x.shape, rstd, weight, cos, sin, *into)
        return grad_x, grad_weight, None, None, None


def _norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, rstd: Tensor | None
) -> Tensor:
    B, T, h, d = x.shape
    out = x.new_empty(B, h, T, d).transpose(1, 2)
    call("norm_rope", x, *x.stride()[:3], *x.shape, eps, weight, cos, sin, rstd, out, *out.stride()[:3])
    return out


def _heads(x_BThd: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    x_BThd = x_BThd if x_BThd.stride(-1) == 1 else x_BThd.contiguous()
    if torch.is_grad_enabled():
        return _NormRope.apply(x_BThd, weight, cos, sin, eps)
    return _norm_rope(x_BThd, weight, cos, sin, eps, None)


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """Norm each head, then rotate its halves by the angles of cos and sin."""
    if not serves(x_BThd, weight, cos_BTd, sin_BTd):
        raise Unserved("norm_rope in C takes fp32 tensors of a CPU")
    B, T, _, d = x_BThd.shape
    if cos_BTd.shape != (B, T, d) or not (cos_BTd.is_contiguous() and sin_BTd.is_contiguous()):
        cos_BTd, sin_BTd = (x.expand(B, T, d).contiguous() for x in (cos_BTd, sin_BTd))
    return _heads(x_BThd, weight, cos_BTd, sin_BTd, eps)
