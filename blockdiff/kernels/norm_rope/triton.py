"""The norms and norm_rope in Triton: launchers as registered ops, their gradients, and the public functions.

Gradients of weights are summed within programs, then over programs. The number of programs depends on the shape alone,
so the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.launch import (
    Launch,
    Unserved,
    cached_by_sizes,
    check_without_gradient,
    empty,
    launch,
    registered,
)
from blockdiff.kernels.norm_rope import kernels
from blockdiff.kernels.tiles import Tile, elementwise

PROGRAMS = 512  # of a backward kernel: about four for each multiprocessor of a large GPU
NORMS = 3  # most weights of one launch

# -- launchers -------------------------------------------------------------------------------------------------


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _by_rows(kernel: Any) -> Callable[..., tuple[Launch, int]]:
    """Return a cached function from sizes to (launch of `kernel` over rows, number of rows).

    Its arguments are the total of numbers, the numbers D of a row, and the kernel's other constants.
    """

    @cached_by_sizes
    def launch_of(numbers: int, D: int, **constants: int) -> tuple[Launch, int]:
        tile = elementwise(D)
        return Launch(kernel, tile.grid(numbers // D), D=D, **constants, **tile.options), numbers // D

    return launch_of


_rms_norms_of, _add_rms_norm_of = _by_rows(kernels.rms_norms_forward), _by_rows(kernels.add_rms_norm_forward)
_residual_norms_of, _layer_end_of = _by_rows(kernels.residual_norms), _by_rows(kernels.layer_end)


def _backward_grid(rows: Tensor, tile: Tile) -> tuple[int]:
    return (max(1, min(tile.grid(rows.shape[0])[0], PROGRAMS)),)


def _weight_gradient(weight: Tensor, is_needed: bool) -> Tensor:
    """Allocate the gradient of a weight, without elements if the weight is frozen."""
    return empty(weight) if is_needed else empty(weight, 0)


def _partial(rows: Tensor, grid: tuple[int]) -> Tensor:
    """Allocate a row for the partial sum of each program."""
    return empty(rows, *grid, rows.shape[-1], dtype=torch.float32)


# torch gives gradients to optional tensors but not to lists of them, so the three weights are separate arguments.
@registered("rms_norms")
def _rms_norms(
    x: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int, eps: float
) -> Iterator[list[Tensor]]:
    x = x.contiguous()
    outs = [torch.empty_like(x) for _ in range(count)]
    yield outs
    launched, N = _rms_norms_of(x.numel(), x.shape[-1])
    launched(x, (w0, w1, w2)[:count], tuple(outs), N, eps)


@registered("rms_norms_backward")
def _rms_norms_backward(
    x: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, grads: Sequence[Tensor], needs: Sequence[bool],
    eps: float,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """Return the gradient of x, and of the weights that need one."""
    weights = (w0, w1, w2)[: len(grads)]
    trained = [w if needed else None for w, needed in zip(weights, needs, strict=False)]
    grad_x, *grad_weights = (empty(t) for t in (x, *trained) if t is not None)
    yield [grad_x, *grad_weights]
    rows, tile = _flat(x), elementwise(x.shape[-1])
    grid = _backward_grid(rows, tile)
    partials = tuple(None if w is None else _partial(rows, grid) for w in trained)
    arguments = rows, weights, tuple(_flat(grad) for grad in grads), grad_x, partials, rows.shape[0], eps
    launch(kernels.rms_norms_backward, grid, *arguments, D=x.shape[-1], **tile.options)
    for grad, partial in zip(grad_weights, (p for p in partials if p is not None), strict=True):
        grad.copy_(partial.sum(0))


def _row_scalars(scalar: Tensor | None, y: Tensor) -> tuple[Tensor | None, int]:
    """Return the layer scalar for the kernels, and its stride between rows, 0 if all rows share one."""
    if scalar is None or scalar.numel() == 1:
        return scalar, 0
    return scalar.expand(*y.shape[:-1], 1).contiguous(), 1


@registered("add_rms_norm")
def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, scalar: Tensor | None, eps: float) -> Iterator[Tensor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    out = empty(y, dtype=dtype if scalar is None else torch.promote_types(dtype, scalar.dtype))
    yield out
    launched, N = _add_rms_norm_of(y.numel(), y.shape[-1])
    launched(x.contiguous(), y.contiguous(), weight, *_row_scalars(scalar, y), out, N, eps)


@registered("add_rms_norm_backward")
def _add_rms_norm_backward(
    y: Tensor, weight: Tensor, scalar: Tensor | None, grad: Tensor, needs_weight: bool, x_dtype: torch.dtype, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return the gradients of x, y and the weight; the last has no elements unless needed."""
    grad_x, grad_y, grad_weight = empty(y, dtype=x_dtype), empty(y), _weight_gradient(weight, needs_weight)
    yield grad_x, grad_y, grad_weight
    rows, tile = _flat(y), elementwise(y.shape[-1])
    grid = _backward_grid(rows, tile)
    partial = _partial(rows, grid) if needs_weight else None
    arguments = rows, weight, *_row_scalars(scalar, y), _flat(grad), grad_x, grad_y, partial, rows.shape[0], eps
    launch(kernels.add_rms_norm_backward, grid, *arguments, D=y.shape[-1], **tile.options)
    if partial is not None:
        grad_weight.copy_(partial.sum(0))


@registered("norm_rope")
def _norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Iterator[Tensor]:
    out = empty(x_BThd, dtype=torch.promote_types(x_BThd.dtype, cos_BTd.dtype))
    yield out
    rows, (h, d) = _flat(x_BThd), x_BThd.shape[-2:]
    tile = elementwise(d // 2)
    arguments = rows, weight, cos_BTd.contiguous(), sin_BTd.contiguous(), out, rows.shape[0], eps
    launch(kernels.norm_rope_forward, tile.grid(rows.shape[0]), *arguments, HEADS=h, D=d, **tile.options)


@registered("norm_rope_backward")
def _norm_rope_backward(
    x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, grad: Tensor, needs_weight: bool, eps: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the gradients of x and of the weight; the last has no elements unless needed."""
    grad_x, grad_weight = empty(x_BThd), _weight_gradient(weight, needs_weight)
    yield grad_x, grad_weight
    rows, (h, d) = _flat(x_BThd), x_BThd.shape[-2:]
    tile = elementwise(d // 2)
    grid = _backward_grid(rows, tile)
    partial = _partial(rows, grid) if needs_weight else None
    tensors = rows, weight, cos_BTd.contiguous(), sin_BTd.contiguous(), _flat(grad), grad_x, partial
    launch(kernels.norm_rope_backward, grid, *tensors, rows.shape[0], eps, HEADS=h, D=d, **tile.options)
    if partial is not None:
        grad_weight.copy_(partial.sum(0))


@registered("residual_norms")
def _residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int,
    eps: float,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """Return the sum, and its norms with the first `count` weights."""
    x = x.contiguous()
    out, *norms = outs = [torch.empty_like(x) for _ in range(count + 1)]
    yield outs
    launched, N = _residual_norms_of(x.numel(), x.shape[-1])
    launched(x, y.contiguous(), weight, (w0, w1, w2)[:count], out, tuple(norms), N, eps)


# -- gradients -------------------------------------------------------------------------------------------------


def _save_rms_norms(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _rms_norms_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    needs = [w is not None and ctx.needs_input_grad[n] for n, w in enumerate(weights, 1)]
    grad_x, *sums = _rms_norms_backward(x, *weights, list(grads), needs, ctx.eps)
    return grad_x, *(sums.pop(0) if needed else None for needed in needs), None, None


def _save_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, y, weight, scalar, ctx.eps = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(y, weight, scalar)


def _add_rms_norm_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs_weight = ctx.needs_input_grad[2]
    *of_inputs, of_weight = _add_rms_norm_backward(*ctx.saved_tensors, grad, needs_weight, ctx.x_dtype, ctx.eps)
    return *of_inputs, of_weight if needs_weight else None, None, None


def _save_norm_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_rope_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_x, grad_weight = _norm_rope_backward(*ctx.saved_tensors, grad, ctx.needs_input_grad[1], ctx.eps)
    return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None, None


_rms_norms.register_autograd(_rms_norms_gradients, setup_context=_save_rms_norms)
_add_rms_norm.register_autograd(_add_rms_norm_gradients, setup_context=_save_add_rms_norm)
_norm_rope.register_autograd(_norm_rope_gradients, setup_context=_save_norm_rope)


@registered("layer_end")
def _layer_end(
    x: Tensor, dense: Tensor, slots: Tensor, index: Tensor | None, dense_weight: Tensor, slots_weight: Tensor,
    weight: Tensor, scalar: Tensor | None, E: int, eps: float,
) -> Iterator[Tensor]:  # fmt: skip
    """Compute `(x + norm(norm(dense) + norm(sum of slots))) * scalar` of tokens [..., D].

    slots: [N, k, D] with their experts `index` [N, k], or [N, 1, D] without index, in which case all count.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    yield out
    top_k = 1 if index is None else slots.shape[1]
    launched, N = _layer_end_of(x.numel(), x.shape[-1], TOP_K=top_k)
    tensors = x, dense.contiguous(), slots.contiguous(), index, dense_weight, slots_weight, weight
    launched(*tensors, *_row_scalars(scalar, x), out, N, E, eps)


# -- the public functions: signatures and meaning as in torch.py ------------------------------------------------


def rms_norms(x: Tensor, weights: Sequence[Tensor | None], eps: float) -> tuple[Tensor, ...]:
    """Return `x * (mean(x^2) + eps)^-0.5 * weight` for each weight (None: no weight), reading x once.

    Raises Unserved for more than three weights.
    """
    if len(weights) > NORMS:
        raise Unserved(f"rms_norms in Triton takes up to {NORMS} weights")
    return tuple(_rms_norms(x, *weights, *(None,) * (NORMS - len(weights)), len(weights), eps))


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """Compute `(x + rms_norm(y) * weight) * scalar` (None: 1), rounded once; scalar gets no gradient."""
    return _add_rms_norm(x, y, weight, scalar, eps)


def norm_rope(x_BThd: Tensor, weight: Tensor, cos_BTd: Tensor, sin_BTd: Tensor, eps: float) -> Tensor:
    """Norm each head, then rotate its halves by the angles of cos and sin, rounded once; d must be even."""
    return _norm_rope(x_BThd, weight, cos_BTd, sin_BTd, eps)


def residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...]:
    """Return `x + rms_norm(y) * weight`, then the norms of that sum with up to three weights.

    Raises Unserved if a gradient is needed.
    """
    check_without_gradient("residual_norms", x)
    return tuple(_residual_norms(x, y, weight, *weights, *(None,) * (NORMS - len(weights)), len(weights), eps))


def layer_end(
    x: Tensor, dense: Tensor, routed: Slots, weights: tuple[Tensor, Tensor, Tensor], eps: float, scalar: Tensor | None
) -> Tensor:
    """Compute `(x + norm(norm(dense) + norm(routed))) * scalar` of tokens [..., D] in one kernel.

    weights: of the norms of dense, of routed and of their sum. scalar: as in `add_rms_norm`.
    Raises Unserved if a gradient is needed.
    """
    check_without_gradient("layer_end", x)
    return _layer_end(x, dense, routed.values_NkD, routed.index_Nk, *weights, scalar, routed.experts, eps)
