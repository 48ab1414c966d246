"""Norms and QK-norm + RoPE by the C functions of cpu.c for fp32 on a CPU; everything else runs natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import BLOCKS, call, serves
from blockdiff.kernels.norm_rope import native

MOST = 3  # norms of one tensor that a call can make


def _lines(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """A tensor as C reads it: itself or a copy, rows, rows of a line, elements from line to line, width.

    Heads that are a part of each token's projection, [B, T, h, d], are read where they stand.
    """
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if x.is_contiguous():
        return x, rows, max(rows, 1), 0, width
    if x.dim() == 4 and x.stride(3) == 1 and x.stride(2) == width and x.stride(0) == x.shape[1] * x.stride(1):
        return x, rows, x.shape[2], x.stride(1), width
    return x.contiguous(), rows, max(rows, 1), 0, width


def _new(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *weights: Tensor | None) -> tuple[Tensor, ...]:
        x, rows, *_ = _lines(x)
        rstd = _new(x, rows)
        outs = _norms(x, weights, eps, rstd)
        ctx.save_for_backward(x, rstd, *weights)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, rstd, *weights = ctx.saved_tensors
        x, rows, group, stride, width = _lines(x)
        of_weights = [
            _new(x, width) if w is not None and needed else None
            for w, needed in zip(weights, ctx.needs_input_grad[2:], strict=True)
        ]
        each = [y for g, w, of in zip(grads, weights, of_weights, strict=True) for y in (_dense(g), w, of)]
        each += [None] * (3 * MOST - len(each))
        partial, grad_x = _new(x, MOST, BLOCKS, width), _new(x)
        call("norms_backward", x, rows, group, stride, width, rstd, *each, partial, group * width, grad_x)
        return grad_x, None, *of_weights


def _dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


def _norms(x: Tensor, weights: Sequence[Tensor | None], eps: float, rstd: Tensor | None) -> tuple[Tensor, ...]:
    x, rows, group, stride, width = _lines(x)
    outs = tuple(_new(x) for _ in weights)
    each = [y for pair in zip(weights, outs, strict=True) for y in pair] + [None, None] * (MOST - len(outs))
    call("norms", x, rows, group, stride, width, eps, rstd, *each)
    return outs


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """See `native.rms_norms`."""
    if len(weights) > MOST or not serves(x, *weights):
        return native.rms_norms(x, weights, eps)
    if torch.is_grad_enabled():
        return _Norms.apply(x, eps, *weights)
    return _norms(x, weights, eps, None)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None) -> Tensor:
        y = y.contiguous()
        rstd = _new(y, y.numel() // y.shape[-1])
        ctx.save_for_backward(y, rstd, weight, scalar)
        return _add_norm(x, y, weight, eps, scalar, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd, weight, scalar = ctx.saved_tensors
        grad, rows, width = grad.contiguous(), rstd.numel(), y.shape[-1]
        grad_x = grad if scalar is None else _new(grad)
        grad_y, grad_weight = _new(y), _new(weight)
        step = 0 if scalar is None or scalar.numel() == 1 else 1
        into = (_new(y, BLOCKS, width), None if scalar is None else grad_x, grad_y, grad_weight)
        call("add_norm_backward", grad, y, rows, width, rstd, weight, scalar, step, *into)
        return grad_x, grad_y, grad_weight, None, None


def _add_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None, rstd: Tensor | None
) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    out, width = _new(y), y.shape[-1]
    step = 0 if scalar is None or scalar.numel() == 1 else 1
    call("add_norm", x, y, y.numel() // width, width, eps, weight, scalar, step, rstd, out)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """See `native.add_rms_norm`."""
    is_by_row = scalar is None or scalar.numel() in (1, y.numel() // max(y.shape[-1], 1))
    if not is_by_row or x.shape != y.shape or not serves(x, y, weight, scalar):
        return native.add_rms_norm(x, y, weight, eps, scalar)
    if scalar is not None:
        scalar = scalar.contiguous()
    if torch.is_grad_enabled():
        return _AddNorm.apply(x, y, weight, eps, scalar)
    return _add_norm(x, y, weight, eps, scalar, None)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        x, rows, *_ = _lines(x)
        rstd = _new(x, rows)
        ctx.save_for_backward(x, rstd, weight, cos, sin)
        return _norm_rope(x, weight, cos, sin, eps, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight, cos, sin = ctx.saved_tensors
        x, rows, _, stride, width = _lines(x)
        grad_x, grad_weight, heads = _new(x), _new(weight), x.shape[2]
        line = (rows, heads, stride or heads * width, width)
        into = (_new(x, BLOCKS, width), heads * width, grad_x, grad_weight)
        call("norm_rope_backward", grad.contiguous(), x, *line, rstd, weight, cos, sin, *into)
        return grad_x, grad_weight, None, None, None


def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, rstd: Tensor | None) -> Tensor:
    x, rows, _, stride, width = _lines(x)
    out, heads = _new(x), x.shape[2]
    call("norm_rope", x, rows, heads, stride or heads * width, width, eps, weight, cos, sin, rstd, out)
    return out


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """See `native.norm_rope`."""
    if not serves(x_BThd, weight, cos_BTd, sin_BTd):
        return native.norm_rope(x_BThd, weight, cos_BTd, sin_BTd, eps)
    B, T, _, d = x_BThd.shape
    cos, sin = (x.expand(B, T, d).contiguous() for x in (cos_BTd, sin_BTd))
    if torch.is_grad_enabled():
        return _NormRope.apply(x_BThd, weight, cos, sin, eps)
    return _norm_rope(x_BThd, weight, cos, sin, eps, None)
