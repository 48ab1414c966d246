"""The gated activation in torch's own operations."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels.expert_mlp.activations import activation_named
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.op import Ops


def gated(gate: Tensor, up: Tensor, activation: str = "gelu_tanh") -> Tensor:
    """`f(gate) * g(up)` of two tensors of one shape; activation as in `expert_mlp`."""
    gates = activation_named(activation)
    return gates.gate(gate) * gates.linear(up)


def gated_linear(ops: Ops, x: Tensor, gate_FD: Tensor | Fp8, up_FD: Tensor | Fp8, activation: str) -> Tensor:
    """`gated` of the products of x [..., D] with two weights."""
    gate, up = ops.linears(x, (gate_FD, up_FD))
    return ops.gated(gate, up, activation)
