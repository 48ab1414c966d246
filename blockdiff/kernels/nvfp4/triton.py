"""nvfp4_linear in Triton: one registered op for both directions, and the public function.

Whatever the number of tokens, the weight is decoded tile by tile inside the product's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.launch import Unserved, empty, launch, registered
from blockdiff.kernels.nvfp4 import kernels
from blockdiff.kernels.nvfp4.matrix import Nvfp4
from blockdiff.kernels.tiles import decodes_fp8, precision_of, tile_of


@registered("nvfp4_linear")
def _nvfp4_linear(x: Tensor, codes: Tensor, scale: Tensor, block_scale: Tensor, back: bool) -> Iterator[Tensor]:
    """Compute x [N, K] W^T of a matrix W [F, K]; back: x [N, F] W."""
    N, (F, K) = x.shape[0], (codes.shape[0], 2 * codes.shape[1])
    written, read = (K, F) if back else (F, K)
    out = empty(x, N, written)
    yield out
    tile = tile_of(f"nvfp4_product{'_back' if back else ''}", x, N).fitted(rows=N, columns=written, inner=read)
    constants = dict(K=K, F=F, BACK=back, HARDWARE=decodes_fp8(x), PRECISION=precision_of(x.dtype), **tile.options)
    tensors = (x.contiguous(), codes.contiguous(), scale.contiguous(), block_scale.contiguous(), out)
    launch(kernels.nvfp4_product, tile.grid(N, written), *tensors, N, **constants)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.back = inputs[4]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _nvfp4_linear(grad, *ctx.saved_tensors, not ctx.back), None, None, None, None


_nvfp4_linear.register_autograd(_gradients, setup_context=_save)


def check_nvfp4(op: str, x: Tensor) -> None:
    """Raise Unserved unless x is fp32 or bf16, the dtypes that kernels decode NVFP4 to."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise Unserved(f"{op} in Triton takes float32 or bfloat16 with weights in NVFP4, not {x.dtype}")


def nvfp4_linear(x: Tensor, weight: Nvfp4) -> Tensor:
    """Compute `x weight^T` of x [..., in] in fp32 or bf16, with a gradient for x alone; Unserved for other dtypes."""
    (x,) = in_autocast(x)
    check_nvfp4("nvfp4_linear", x)
    codes, block_scale = weight.codes.view(torch.int8), weight.block_scale.view(torch.int8)
    out: Tensor = _nvfp4_linear(x.reshape(-1, x.shape[-1]), codes, weight.scale, block_scale, False)
    return out.view(*x.shape[:-1], out.shape[1])
