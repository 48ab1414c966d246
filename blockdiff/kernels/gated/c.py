"""The op gated by the C functions in `expert_mlp/expert_mlp.c`, for fp32 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves
from blockdiff.kernels.expert_mlp.c import KINDS
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.once_differentiable import once_differentiable


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _gated(gate, up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        width, of_gate, of_up = gate.shape[-1], torch.empty_like(gate), torch.empty_like(up)
        line = (gate.numel() // max(width, 1), width, width, None, ctx.kind)
        call("gated_backward", grad.contiguous(), gate, up, *line, of_gate, of_up, width, None, None)
        return of_gate, of_up, None


def _gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    out, width = torch.empty_like(gate), gate.shape[-1]
    call("gated", gate, up, gate.numel() // max(width, 1), width, width, None, kind, out)
    return out


def gated(gate: Tensor, up: Tensor, activation: str = "gelu_tanh") -> Tensor:
    """Compute `f(gate) * g(up)` of two tensors of one shape; Unserved unless they are fp32 on a CPU."""
    if activation not in KINDS or not serves(gate, up):
        raise Unserved("gated in C takes fp32 tensors of a CPU")
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled():
        return _Gated.apply(gate, up, KINDS[activation])
    return _gated(gate, up, KINDS[activation])
