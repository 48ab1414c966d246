"""gated in Triton with its gradient, and gated_linear without: launchers as registered ops, public functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.expert_mlp.triton import check_activation
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.gated import kernels
from blockdiff.kernels.launch import Launch, Unserved, cached_by_sizes, check_dtypes, check_without_gradient, registered
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.kernels.tiles import decodes_fp8, elementwise, precision_of, tile_for

FEW_ROWS = 1024  # for more rows torch's faster product outweighs the launches that fusing saves


@registered("gated")
def _gated(gate: Tensor, up: Tensor, activation: str) -> Iterator[Tensor]:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    yield out
    launched, N = _walk_of(kernels.gated_forward, gate.numel(), gate.shape[-1], activation)
    launched(gate, up, out, N)


@registered("gated_backward")
def _gated_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: str) -> Iterator[tuple[Tensor, Tensor]]:
    gate, up = gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    yield grad_gate, grad_up
    launched, N = _walk_of(kernels.gated_backward, gate.numel(), gate.shape[-1], activation)
    launched(gate, up, grad.contiguous(), grad_gate, grad_up, N)


@cached_by_sizes
def _walk_of(kernel: Any, numbers: int, F: int, activation: str) -> tuple[Launch, int]:
    tile, N = elementwise(256), numbers // max(F, 1)
    return Launch(kernel, tile.grid(N, F), F=F, ACTIVATION=activation, **tile.options), N


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_gated_backward(*ctx.saved_tensors, grad, ctx.activation), None


_gated.register_autograd(_gradients, setup_context=_save)


@registered("gated_product")
def _gated_product(
    x: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None, up_scale: Tensor | None, activation: str
) -> Iterator[Tensor]:
    """Compute f(x gate^T) * g(x up^T) [..., F] of tokens x [..., D]."""
    D, F = x.shape[-1], gate.shape[0]
    out = x.new_empty(*x.shape[:-1], F)
    yield out
    N, hardware = x.numel() // D, gate_scale is not None and decodes_fp8(x)
    launched = _gated_product_of(N, D, F, activation, hardware, x.dtype, x.device)
    launched(x.contiguous(), gate.contiguous(), up.contiguous(), gate_scale, up_scale, out, N)


@cached_by_sizes
def _gated_product_of(
    N: int, D: int, F: int, activation: str, hardware: bool, dtype: torch.dtype, device: torch.device
) -> Launch:
    tile = tile_for("expert_mlp_gate_up", dtype, device, N / 4).fitted(columns=F, inner=D)
    constants = dict(D=D, F=F, ACTIVATION=activation, HARDWARE=hardware, PRECISION=precision_of(dtype), **tile.options)
    return Launch(kernels.gated_product, tile.grid(N, F), **constants)


def gated(gate: Tensor, up: Tensor, activation: str = "gelu_tanh") -> Tensor:
    """Compute `f(gate) * g(up)` of two tensors of one shape, rounded once; Unserved unless fp32, bf16 or fp16."""
    check_activation(activation)
    check_dtypes("gated", gate, up)
    out: Tensor = _gated(gate, up, activation)
    return out


def gated_linear(x: Tensor, gate_FD: Tensor | StoredMatrix, up_FD: Tensor | StoredMatrix, activation: str) -> Tensor:
    """Compute `gated(x gate^T, x up^T)` of x [..., D] in one kernel.

    Raises Unserved for more than FEW_ROWS tokens, for weights stored in another form than fp8, and if a gradient is
    needed.
    """
    check_without_gradient("gated_linear", x)
    check_activation(activation)
    if x.numel() > FEW_ROWS * x.shape[-1]:
        raise Unserved(f"gated_linear in Triton takes up to {FEW_ROWS} tokens")
    if isinstance(gate_FD, Tensor) and isinstance(up_FD, Tensor):
        check_dtypes("gated_linear", x, gate_FD, up_FD)
        out: Tensor = _gated_product(x, gate_FD, up_FD, None, None, activation)
        return out
    if not isinstance(gate_FD, Fp8) or not isinstance(up_FD, Fp8):
        raise Unserved("gated_linear in Triton takes weights in fp8 or not stored in fewer bits")
    check_dtypes("gated_linear", x)
    gate, up = (weight.codes.view(torch.int8) for weight in (gate_FD, up_FD))
    product: Tensor = _gated_product(x, gate, up, gate_FD.scale, up_FD.scale, activation)
    return product
