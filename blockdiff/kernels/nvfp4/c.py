"""Products with weights in NVFP4 by the C function in `expert_mlp/products.c`, for fp32 on a CPU.

It decodes one panel of a matrix at a time, never the whole matrix.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves_products
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.nvfp4.matrix import BLOCK, Nvfp4, tables
from blockdiff.kernels.once_differentiable import once_differentiable

_tables = functools.cache(functools.partial(tables, torch.float32))


def product(x_MK: Tensor, ends_E: Tensor, weight: Any, is_transposed: bool) -> Tensor:
    """Multiply rows of x, sorted by expert, by their expert's matrix, as stored or transposed.

    ends_E: the end of each expert's rows.
    """
    *_, F, K = weight.shape
    depth, wide = (K, F) if is_transposed else (F, K)
    out = x_MK.new_empty(x_MK.shape[0], wide)
    tensors = [tensor.contiguous() for tensor in weight]
    call("grouped_product_nvfp4", x_MK, ends_E, len(ends_E), depth, *tensors, _tables(), is_transposed, wide, out)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        return product(x_NK, torch.tensor([len(x_NK)], dtype=torch.int32), Nvfp4(*weight), True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        ends = torch.tensor([len(grad_NF)], dtype=torch.int32)
        return product(grad_NF.contiguous(), ends, Nvfp4(*ctx.saved_tensors), False), None, None, None


def nvfp4_linear(x: Tensor, weight: Nvfp4) -> Tensor:
    """Compute `x weight^T` of x [..., in], with a gradient for x alone.

    Unserved unless x is fp32 on a CPU and the number of outputs is a multiple of 16.
    """
    if weight.shape[0] % BLOCK or not serves_products(x):
        raise Unserved("nvfp4_linear in C takes fp32 tensors of a CPU, and a multiple of 16 outputs")
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]).contiguous(), *weight)
    return out.view(*x.shape[:-1], out.shape[1])
