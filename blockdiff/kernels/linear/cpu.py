"""Under autocast to bf16 the products of fp32 tensors by the tile unit of a CPU (cpu.c), if it has one; else natively.

Results are fp32, so what follows them stays with the C functions of the other ops, and nothing is cast to and fro.
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


@functools.cache
def has_tiles() -> bool:
    """Whether this machine has the unit, and the library was compiled for it."""
    answer = torch.zeros(1, dtype=torch.int64)
    call("tiles_are_there", answer)
    return bool(answer)


def is_worth(rows: int, depth: int, columns: int) -> bool:
    """Whether a product of this size is faster in tiles."""
    return rows >= ROWS and min(depth, columns) >= COLUMNS


def takes(*tensors: Tensor) -> bool:
    """Whether tiles multiply these: fp32, in the memory of a CPU that has the unit, under autocast to bf16."""
    is_bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    return is_bf16 and serves(*tensors) and has_tiles()


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return _linears(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (rows, depth), grad_x = x.shape, None
        dense = [grad.contiguous() for grad in grads]
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for n, (grad, weight) in enumerate(zip(dense, weights, strict=True)):
                call("linear_backward_x", grad, rows, weight.shape[0], weight, depth, int(n > 0), grad_x)
        of_weights: list[Tensor | None] = [None] * len(weights)
        for n, (grad, weight) in enumerate(zip(dense, weights, strict=True)):
            if ctx.needs_input_grad[1 + n]:
                of_weights[n] = outer(grad, x, torch.empty_like(weight))
        return grad_x, *of_weights


def outer(left_MF: Tensor, right_MD: Tensor, out_FD: Tensor) -> Tensor:
    """left^T right, the gradient of a weight, into `out_FD`."""
    (rows, wide), depth = left_MF.shape, right_MD.shape[1]
    if not is_worth(rows, wide, depth):
        return torch.mm(left_MF.t(), right_MD, out=out_FD)
    call("linear_backward_weight", left_MF, rows, wide, right_MD, depth, out_FD)
    return out_FD


def _linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    rows, depth = x.shape
    outs = tuple(x.new_empty(rows, weight.shape[0]) for weight in weights)
    each = [part for weight, out in zip(weights, outs, strict=True) for part in (weight, weight.shape[0], out)]
    call("linear", x, rows, depth, *each, *(None, 0, None) * (PARTS - len(weights)))
    return outs


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """See `native.linears`; in tiles inputs are rounded to bf16 and results are fp32."""
    depth = x.shape[-1]
    rows, columns = x.numel() // max(depth, 1), sum(weight.shape[0] for weight in weights)
    if len(weights) > PARTS or not is_worth(rows, depth, columns) or not takes(x, *weights):
        return native.linears(x, weights)
    flat, weights = x.reshape(rows, depth).contiguous(), [weight.contiguous() for weight in weights]
    outs = _Linears.apply(flat, *weights) if torch.is_grad_enabled() else _linears(flat, weights)
    return tuple(out.view(*x.shape[:-1], -1) for out in outs)
