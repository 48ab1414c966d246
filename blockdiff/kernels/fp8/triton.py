"""fp8_linear in Triton: launchers as registered ops, the gradient, and the public function.

For few tokens the kernel decodes the weight in registers, which reads half the bytes of bf16. For more tokens, and in
the backward, the weight is decoded to temporary memory and torch computes the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.fp8 import kernels
from blockdiff.kernels.fp8.matrix import Fp8
from blockdiff.kernels.launch import check_dtypes, empty, launch, registered
from blockdiff.kernels.tiles import Tile, decodes_fp8, precision_of, tile_of

# For more rows torch's product is faster even though the decoded weight has to be written and read.
FEW_ROWS = 512
DECODE = Tile(16, 256, warps=4)


def _decoded(codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    (F, K), weight = codes.shape, empty(like, *codes.shape)
    arguments = codes, scale, weight, F
    constants = dict(K=K, HARDWARE=decodes_fp8(codes), **DECODE.options)
    launch(kernels.fp8_decode, DECODE.grid(F, K), *arguments, **constants)
    return weight


@registered("fp8_linear")
def _fp8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """Compute x [N, K] codes^T * scale."""
    (N, K), F = x.shape, codes.shape[0]
    out = empty(x, N, F)
    yield out
    codes, scale = codes.contiguous(), scale.contiguous()
    if N > FEW_ROWS:
        torch.mm(x, _decoded(codes, scale, x).t(), out=out)
        return
    x = x.contiguous()
    tile = tile_of("fp8_product", x, N).fitted(rows=N, columns=F, inner=K)
    constants = dict(K=K, F=F, HARDWARE=decodes_fp8(x), PRECISION=precision_of(x.dtype), **tile.options)
    launch(kernels.fp8_product, tile.grid(N, F), x, codes, scale, out, N, **constants)


@registered("fp8_linear_backward")
def _fp8_linear_backward(grad: Tensor, codes: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """Compute grad [N, F] times the weight [F, K]."""
    grad_x = empty(grad, grad.shape[0], codes.shape[1])
    yield grad_x
    torch.mm(grad, _decoded(codes.contiguous(), scale.contiguous(), grad), out=grad_x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _fp8_linear_backward(grad, *ctx.saved_tensors), None, None


_fp8_linear.register_autograd(_gradients, setup_context=_save)


def fp8_linear(x: Tensor, weight: Fp8) -> Tensor:
    """Compute `x weight^T` of x [..., in] in fp32, bf16 or fp16, with a gradient for x alone; Unserved for others."""
    (x,) = in_autocast(x)
    check_dtypes("fp8_linear", x)
    out: Tensor = _fp8_linear(x.reshape(-1, x.shape[-1]), weight.codes.view(torch.int8), weight.scale)
    return out.view(*x.shape[:-1], out.shape[1])
