"""The gated activations `f(gate) * g(up)` of MLPs by name. The Triton kernels have their own implementations."""

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
    """A gated activation: `gate` is f, `gate_backward(grad, gate)` its gradient; `up` likewise g (None: identity)."""

    gate: Callable[[Tensor], Tensor]
    gate_backward: Callable[[Tensor, Tensor], Tensor]
    up: Callable[[Tensor], Tensor] | None = None
    up_backward: Callable[[Tensor, Tensor], Tensor] | None = None

    def linear(self, up: Tensor) -> Tensor:
        """Compute g(up)."""
        return up if self.up is None else self.up(up)


@functools.cache
def _oai(alpha: float, limit: float) -> Activation:
    """Return `gate * sigmoid(alpha gate) * (up + 1)`; gate is clamped to <= limit, up to +-limit (limit 0: neither)."""
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
    "swiglu_oai": _oai(OAI_ALPHA, OAI_LIMIT),  # as in gpt-oss
}


def oai(alpha: float, limit: float) -> str:
    """Return the name of SwiGLU-OAI with these parameters (limit 0: no clamp); with gpt-oss's it is "swiglu_oai"."""
    return "swiglu_oai" if (alpha, limit) == (OAI_ALPHA, OAI_LIMIT) else f"swiglu_oai:{alpha}:{limit}"


def activation_named(name: str) -> Activation:
    """Return the activation of a name, also one made by `oai`; raise BlockdiffError if there is none."""
    family, *numbers = name.split(":")
    if family == "swiglu_oai" and len(numbers) == 2:
        return _oai(*map(float, numbers))
    if name not in ACTIVATIONS:
        raise BlockdiffError(f"expert_mlp: activation {name!r} is not known; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
