"""fp8_linear in plain torch: the matrix is decoded where it is used, and not kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.fp8.matrix import Fp8
from blockdiff.kernels.once_differentiable import once_differentiable


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, Fp8(codes, scale).decoded(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ Fp8(*ctx.saved_tensors).decoded(grad.dtype), None, None


def fp8_linear(x: Tensor, weight: Fp8) -> Tensor:
    """`x weight^T` in x's dtype: x [..., in], weight [out, in]; a gradient for x alone."""
    (x,) = in_autocast(x)
    out: Tensor = _Linear.apply(x, *weight)
    return out
