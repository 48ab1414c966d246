"""Products with weights, as they are or in fp8, in plain torch, and the way to fp8 and back.

A matrix in fp8 is decoded where it is used, and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.op import Ops

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


def quantised(weight: Tensor) -> Fp8:
    """The nearest matrix in fp8 whose largest number of every output channel is e4m3's largest, 448 times the scale.

    weight: [..., out, in]; an expert's matrix is made after the other. A channel that is not finite gets a scale that
    is not.
    """
    if weight.dim() > 2:
        made = Fp8(weight.new_empty(weight.shape, dtype=torch.uint8), weight.new_empty((*weight.shape[:-1], 1)).float())
        for n, each in enumerate(weight):
            made.codes[n], made.scale[n] = quantised(each)
        return made
    wide = weight.float()
    scale = wide.abs().amax(-1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return Fp8((wide / scale).to(E4M3).view(torch.uint8), scale)


def decoded(weight: Fp8, dtype: torch.dtype) -> Tensor:
    """The matrix in another dtype: codes times scale in fp32 at least, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    return (weight.codes.view(E4M3).to(wide) * weight.scale).to(dtype)


class Matrices:
    """The matrices of all experts in fp8, each of which is decoded when it is asked for."""

    def __init__(self, weight: Fp8, dtype: torch.dtype, is_transposed: bool = False):
        self.weight, self.dtype, self.is_transposed = weight, dtype, is_transposed
        E, rows, columns = weight.shape
        self.shape = (E, columns, rows) if is_transposed else (E, rows, columns)

    def __getitem__(self, expert: int) -> Tensor:
        matrix = decoded(Fp8(self.weight.codes[expert], self.weight.scale[expert]), self.dtype)
        return matrix.t() if self.is_transposed else matrix

    def transpose(self, first: int, second: int) -> Matrices:
        """The transposed matrices; only the last two dimensions can change places."""
        assert {first, second} == {1, 2}
        return Matrices(self.weight, self.dtype, not self.is_transposed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, decoded(Fp8(codes, scale), x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ decoded(Fp8(*ctx.saved_tensors), grad.dtype), None, None


def fp8_linears(x: Tensor, weights: Sequence[Fp8]) -> tuple[Tensor, ...]:
    """`x weight^T` for every weight, in x's dtype: x [..., in], weights [out, in]; gradients for x alone."""
    (x,) = in_autocast(x)
    return tuple(_Linear.apply(x, *weight) for weight in weights)


def linear(ops: Ops, x: Tensor, weight: Tensor | Fp8) -> Tensor:
    """`x weight^T`: x [..., in], weight [out, in]."""
    return ops.fp8_linears(x, (weight,))[0] if isinstance(weight, Fp8) else F.linear(x, weight)


def linears(ops: Ops, x: Tensor, weights: Sequence[Tensor | Fp8]) -> tuple[Tensor, ...]:
    """`linear` with every weight."""
    in_fp8 = [weight for weight in weights if isinstance(weight, Fp8)]
    if len(in_fp8) == len(weights):
        return ops.fp8_linears(x, in_fp8)
    return tuple([linear(ops, x, weight) for weight in weights])
