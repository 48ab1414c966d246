"""Products of fp32 tensors by the tile unit of a CPU (cpu.c), if it has one; else natively.

Without autocast numbers are cut into three pieces of bf16, and results are as exact as products in fp32. Under autocast
to bf16 they are rounded to one. Results are fp32, so what follows them stays with the C functions of the other ops, and
nothing is cast to and fro.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves
from blockdiff.kernels.linear import native

PARTS = 3  # weights that a call takes
ROWS, COLUMNS = 128, 64  # a product of fewer rows is not worth it; nor is one whose rows meet fewer columns
ROUNDED, EXACT = 1, 3  # pieces of a number, as cpu.c has them


@functools.cache
def has_tiles() -> bool:
    """Whether this machine has the unit, and the library was compiled for it."""
    answer = torch.zeros(1, dtype=torch.int64)
    call("tiles_are_there", answer)
    return bool(answer)


def is_worth(rows: int, depth: int, columns: int) -> bool:
    """Whether a product of this size is faster in tiles."""
    return rows >= ROWS and min(depth, columns) >= COLUMNS


def is_rounding() -> bool:
    """Whether autocast to bf16 is on."""
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16


def takes(*tensors: Tensor) -> bool:
    """Whether tiles multiply these, rounded: fp32 in the memory of a CPU that has the unit, under autocast to bf16."""
    return is_rounding() and serves(*tensors) and has_tiles()


def pieces_of(*tensors: Tensor) -> int:
    """The pieces that tiles multiply these tensors in, of fp32 in the memory of a CPU; 0: they do not.

    Without autocast they do where gradients are wanted only. What is sampled has torch's products, since its bits must
    not depend on how many rows stand together, and few rows are not worth tiles.
    """
    if not is_rounding() and (torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled()):
        return 0
    if not serves(*tensors) or not has_tiles():
        return 0
    return ROUNDED if is_rounding() else EXACT


def mm(left_MK: Tensor, right_KN: Tensor, out: Tensor | None = None, beta: int = 0) -> Tensor:
    """See `native.mm`; in fp32 whatever autocast says, and lines of `out` are whole."""
    (M, K), N = left_MK.shape, right_KN.shape[1]
    is_asked = is_worth(M, K, N) and 1 in left_MK.stride() and 1 in right_KN.stride()
    if not is_asked or not serves(left_MK, right_KN, out) or not has_tiles():
        return native.mm(left_MK, right_KN, out, beta)
    out = left_MK.new_empty(M, N) if out is None else out
    (by_row, by_left_step), (by_right_step, by_column) = left_MK.stride(), right_KN.stride()
    sides = (left_MK, by_row, by_left_step, right_KN, by_column, by_right_step)
    call("product", *sides, M, N, K, beta, out, out.stride(0), EXACT)
    return out


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: int, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.pieces = pieces
        return _linears(pieces, x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (rows, depth), grad_x = x.shape, None
        dense = [grad.contiguous() for grad in grads]
        if ctx.needs_input_grad[1]:
            grad_x = torch.empty_like(x)
            call("linear_backward_x", grad_x, rows, depth, ctx.pieces, *_listed(weights, dense))
        of_weights = [torch.empty_like(w) if ctx.needs_input_grad[2 + n] else None for n, w in enumerate(weights)]
        _outer(ctx.pieces, dense, x, of_weights)
        return None, grad_x, *of_weights


def _outer(pieces: int, lefts: Sequence[Tensor], right: Tensor, outs: Sequence[Tensor | None]) -> None:
    """left^T right for every left [rows, wide] and right [rows, depth], the gradients of weights, where wanted."""
    rows, depth = right.shape
    large = []
    for left, out in zip(lefts, outs, strict=True):
        if out is None:
            continue
        if is_worth(rows, left.shape[1], depth):
            large.append((left, out))
        else:
            torch.mm(left.t(), right, out=out)
    if large:
        lefts, made = zip(*large, strict=True)
        call("linear_backward_weights", right, rows, depth, pieces, *_listed(made, lefts))


def _linears(pieces: int, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    rows, depth = x.shape
    outs = tuple(x.new_empty(rows, weight.shape[0]) for weight in weights)
    call("linear", x, rows, depth, pieces, *_listed(weights, outs))
    return outs


def _listed(weights: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor | int | None]:
    """Weights [wide, depth], their widths, and what belongs to each, as the C functions take them."""
    each = [part for weight, other in zip(weights, others, strict=True) for part in (weight, weight.shape[0], other)]
    return [*each, *(None, 0, None) * (PARTS - len(weights))]


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """See `native.linears`; under autocast inputs are rounded to bf16, and results are fp32."""
    depth = x.shape[-1]
    rows, columns = x.numel() // max(depth, 1), sum(weight.shape[0] for weight in weights)
    is_asked = len(weights) <= PARTS and is_worth(rows, depth, columns)
    pieces = pieces_of(x, *weights) if is_asked else 0
    if not pieces:
        return native.linears(x, weights)
    flat, weights = x.reshape(rows, depth).contiguous(), [weight.contiguous() for weight in weights]
    outs = _Linears.apply(pieces, flat, *weights) if torch.is_grad_enabled() else _linears(pieces, flat, weights)
    return tuple(out.view(*x.shape[:-1], -1) for out in outs)
