"""The norms and norm_rope in Triton: launchers, ops for torch, gradients, and the public functions.

Gradients of weights are summed within and then over programs, whose number depends on the shape alone: the same
inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from blockdiff.kernels.norm_rope import triton_kernels

TILE = 4096  # elements that a program holds at once, where rows are short
PROGRAMS = 512  # of a backward kernel: about four for each multiprocessor of a large GPU
NORMS = 3  # weights that one launch serves

# -- launchers -------------------------------------------------------------------------------------------------


def tile_of(columns: int) -> dict[str, int]:
    """Tile sizes and warps for rows of so many elements (powers of two)."""
    block = triton.next_power_of_2(columns)
    rows = max(1, TILE // block // (1 if block >= 1024 else 2))
    return dict(BLOCK=block, ROWS=rows, num_warps=8 if block * rows > 2048 else 4)


def _grid(N: int, tile: dict[str, int], most: int | None = None) -> tuple[int]:
    blocks = triton.cdiv(N, tile["ROWS"])
    return (blocks if most is None else max(1, min(blocks, most)),)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _pointers(tensors: Sequence[Tensor | None], filler: Tensor) -> list[Tensor]:
    """Three arguments of a kernel: what is absent is never read."""
    return [filler if t is None else t for t in [*tensors, *[None] * (NORMS - len(tensors))]]


def _has(weights: Sequence[Tensor | None]) -> dict[str, bool]:
    return {f"HAS{i}": w is not None for i, w in enumerate(weights)}


# torch gives gradients to optional tensors, but not to a list of them: three weights stand one by one.
@torch.library.custom_op("blockdiff::rms_norms", mutates_args=())
def _rms_norms(
    x: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int, eps: float
) -> list[Tensor]:
    rows, weights, tile = _flat(x), (w0, w1, w2), tile_of(x.shape[-1])
    outs = [_like(x) for _ in range(count)]
    if rows.numel():
        arguments = rows, *_pointers(weights, rows), *_pointers(outs, rows), rows.shape[0], eps, x.shape[-1]
        triton_kernels.norms[_grid(rows.shape[0], tile)](*arguments, COUNT=count, **_has(weights), **tile)
    return outs


@torch.library.custom_op("blockdiff::rms_norms_backward", mutates_args=())
def _rms_norms_backward(
    x: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, grads: Sequence[Tensor], eps: float
) -> list[Tensor]:
    rows, weights, tile = _flat(x), (w0, w1, w2), tile_of(x.shape[-1])
    grad_x = _like(x)
    grid = _grid(rows.shape[0], tile, PROGRAMS)
    partials = [None if w is None else _partial(rows, grid) for w in weights]
    if rows.numel():
        flat_grads = [_flat(grad) for grad in grads]
        pointers = *_pointers(weights, rows), *_pointers(flat_grads, rows), grad_x, *_pointers(partials, rows)
        arguments = rows, *pointers, rows.shape[0], eps, x.shape[-1]
        triton_kernels.norms_backward[grid](*arguments, COUNT=len(grads), **_has(weights), **tile)
    return [grad_x, *(_summed(p, w) for p, w in zip(partials, weights, strict=True) if p is not None and w is not None)]


@torch.library.custom_op("blockdiff::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, scalar: Tensor | None, eps: float) -> Tensor:
    out, rows, tile = _sum_like(x, y, scalar), _flat(y), tile_of(y.shape[-1])
    if rows.numel():
        arguments = _flat(x), rows, weight, rows if scalar is None else scalar, out, rows.shape[0], eps, y.shape[-1]
        triton_kernels.add_norm[_grid(rows.shape[0], tile)](*arguments, HAS_SCALAR=scalar is not None, **tile)
    return out


@torch.library.custom_op("blockdiff::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward(
    y: Tensor, weight: Tensor, scalar: Tensor | None, grad: Tensor, x_dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, D, tile = _flat(y), y.shape[-1], tile_of(y.shape[-1])
    grad_x = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    grid = _grid(rows.shape[0], tile, PROGRAMS)
    partial = _partial(rows, grid)
    if rows.numel():
        pointers = rows, weight, rows if scalar is None else scalar, _flat(grad), grad_x, grad_y, partial
        triton_kernels.add_norm_backward[grid](*pointers, rows.shape[0], eps, D, HAS_SCALAR=scalar is not None, **tile)
    return grad_x, grad_y, _summed(partial, weight)


@torch.library.custom_op("blockdiff::norm_rope", mutates_args=())
def _norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    out, rows, (h, d) = _turned_like(x_BThd, cos_BTd), _flat(x_BThd), x_BThd.shape[-2:]
    if rows.numel():
        tile = tile_of(d // 2)
        arguments = rows, weight, cos_BTd.contiguous(), sin_BTd.contiguous(), out, rows.shape[0], eps, h, d
        triton_kernels.norm_rope[_grid(rows.shape[0], tile)](*arguments, **tile)
    return out


@torch.library.custom_op("blockdiff::norm_rope_backward", mutates_args=())
def _norm_rope_backward(
    x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, (h, d) = _flat(x_BThd), x_BThd.shape[-2:]
    tile = tile_of(d // 2)
    grad_x = torch.empty(x_BThd.shape, dtype=x_BThd.dtype, device=x_BThd.device)
    grid = _grid(rows.shape[0], tile, PROGRAMS)
    partial = _partial(rows, grid)
    if rows.numel():
        pointers = rows, weight, cos_BTd.contiguous(), sin_BTd.contiguous(), _flat(grad), grad_x, partial
        triton_kernels.norm_rope_backward[grid](*pointers, rows.shape[0], eps, h, d, **tile)
    return grad_x, _summed(partial, weight)


def _partial(rows: Tensor, grid: tuple[int]) -> Tensor:
    """One row for each program; zeros where none will run."""
    make = torch.empty if rows.numel() else torch.zeros
    return make(*grid, rows.shape[-1], dtype=torch.float32, device=rows.device)


def _summed(partial: Tensor, weight: Tensor) -> Tensor:
    return partial.sum(0).to(weight.dtype)


def _sum_like(x: Tensor, y: Tensor, scalar: Tensor | None) -> Tensor:
    """An empty tensor for (x + y) * scalar."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    dtype = dtype if scalar is None else torch.promote_types(dtype, scalar.dtype)
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _turned_like(x_BThd: Tensor, cos_BTd: Tensor) -> Tensor:
    """An empty tensor for x * cos."""
    dtype = torch.promote_types(x_BThd.dtype, cos_BTd.dtype)
    return torch.empty(x_BThd.shape, dtype=dtype, device=x_BThd.device)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norms.register_fake(lambda x, w0, w1, w2, count, eps: [_like(x) for _ in range(count)])
_rms_norms_backward.register_fake(
    lambda x, w0, w1, w2, grads, eps: [_like(t) for t in (x, w0, w1, w2) if t is not None]
)
_add_rms_norm.register_fake(lambda x, y, weight, scalar, eps: _sum_like(x, y, scalar))
_add_rms_norm_backward.register_fake(
    lambda y, weight, scalar, grad, x_dtype, eps: (_like(y.to(x_dtype)), _like(y), _like(weight))
)
_norm_rope.register_fake(lambda x, weight, cos, sin, eps: _turned_like(x, cos))
_norm_rope_backward.register_fake(lambda x, weight, cos, sin, grad, eps: (_like(x), _like(weight)))


# -- autograd --------------------------------------------------------------------------------------------------


def _save_norms(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norms_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    grad_x, *sums = torch.ops.blockdiff.rms_norms_backward(x, *weights, list(grads), ctx.eps)
    return grad_x, *(None if w is None else sums.pop(0) for w in weights), None, None


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, y, weight, scalar, ctx.eps = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(y, weight, scalar)


def _add_norm_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, weight, scalar = ctx.saved_tensors
    grads = torch.ops.blockdiff.add_rms_norm_backward(y, weight, scalar, grad, ctx.x_dtype, ctx.eps)
    return *grads, None, None


def _save_norm_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_rope_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = torch.ops.blockdiff.norm_rope_backward(*ctx.saved_tensors, grad, ctx.eps)
    return *grads, None, None, None


_rms_norms.register_autograd(_norms_gradients, setup_context=_save_norms)
_add_rms_norm.register_autograd(_add_norm_gradients, setup_context=_save_add_norm)
_norm_rope.register_autograd(_norm_rope_gradients, setup_context=_save_norm_rope)


# -- the public functions: signatures and meaning as in native.py ------------------------------------------------


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """RMSNorm of x once for each weight (None: no weight), over the last axis; x is read once for three of them."""
    outs: list[Tensor] = []
    for i in range(0, len(weights), NORMS):
        some = weights[i : i + NORMS]
        outs += _rms_norms(x, *some, *[None] * (NORMS - len(some)), len(some), eps)
    return tuple(outs)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """`(x + rms_norm(y) * weight) * scalar`, rounded once; scalar [1] carries no gradient."""
    return _add_rms_norm(x, y, weight, scalar, eps)


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head, then `y = x cos + roll(x, d/2) sin`, rounded once; d is even."""
    return _norm_rope(x_BThd, weight, cos_BTd, sin_BTd, eps)
