"""The gated activations of expert_mlp by name: `f(gate) * g(up)`. The Triton kernels hold their own forms of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.errors import BlockdiffError

OAI_ALPHA, OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Activation:
    """`gate` is f, `gate_backward(grad, gate)` its gradient; `up` and `up_backward` likewise (None: g(up) = up)."""

    gate: Callable[[Tensor], Tensor]
    gate_backward: Callable[[Tensor, Tensor], Tensor]
    up: Callable[[Tensor], Tensor] | None = None
    up_backward: Callable[[Tensor, Tensor], Tensor] | None = None

    def linear(self, up: Tensor) -> Tensor:
        """g(up)."""
        return up if self.up is None else self.up(up)


@functools.cache
def _oai(alpha: float, limit: float) -> Activation:
    """`gate * sigmoid(alpha gate) * (up + 1)`, the gate clamped from above and up both ways (limit 0: neither)."""
    bound = limit or float("inf")

    def gated(gate: Tensor) -> Tensor:
        gate = gate.clamp(max=bound)
        return gate * torch.sigmoid(alpha * gate)

    def gate_backward(grad: Tensor, gate: Tensor) -> Tensor:
        clamped = gate.clamp(max=bound)
        share = torch.sigmoid(alpha * clamped)
        slope = share * (1 + alpha * clamped * (1 - share))
        return torch.where(gate <= bound, grad * slope, 0.0)

    return Activation(
        gate=gated,
        gate_backward=gate_backward,
        up=lambda up: up.clamp(-bound, bound) + 1,
        up_backward=lambda grad, up: torch.where(up.abs() <= bound, grad, 0.0),
    )


ACTIVATIONS = {
    "gelu_tanh": Activation(
        gate=lambda gate: F.gelu(gate, approximate="tanh"),
        gate_backward=lambda grad, gate: torch.ops.aten.gelu_backward(grad, gate, approximate="tanh"),
    ),
    "silu": Activation(gate=F.silu, gate_backward=torch.ops.aten.silu_backward),
    "swiglu_oai": _oai(OAI_ALPHA, OAI_LIMIT),  # that of gpt-oss
}


def oai(alpha: float, limit: float) -> str:
    """The name of SwiGLU-OAI with these numbers, limit 0 = no clamp; that of gpt-oss is "swiglu_oai" alone."""
    return "swiglu_oai" if (alpha, limit) == (OAI_ALPHA, OAI_LIMIT) else f"swiglu_oai:{alpha}:{limit}"


def activation_named(name: str) -> Activation:
    """The activation of that name, or of one that `oai` gives; BlockdiffError where there is none."""
    family, *numbers = name.split(":")
    if family == "swiglu_oai" and len(numbers) == 2:
        return _oai(*map(float, numbers))
    if name not in ACTIVATIONS:
        raise BlockdiffError(f"expert_mlp: activation {name!r} is not known; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
