"""The gated activation of an MLP, and the same after its two products, in plain torch."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels.expert_mlp.activations import activation_named
from blockdiff.kernels.op import Ops
from blockdiff.kernels.stored import StoredMatrix, linear


def gated(gate: Tensor, up: Tensor, activation: str = "gelu_tanh") -> Tensor:
    """Compute `f(gate) * g(up)` of two tensors of one shape.

    activation: "gelu_tanh" or "silu", which is f, with g(up) = up; or gpt-oss's "swiglu_oai[:ALPHA:LIMIT]", which
    clamps gate and up, with g(up) = up + 1. Raises BlockdiffError for any other.
    """
    gates = activation_named(activation)
    return gates.gate(gate) * gates.linear(up)


def gated_linear(
    ops: Ops, x: Tensor, gate_FD: Tensor | StoredMatrix, up_FD: Tensor | StoredMatrix, activation: str
) -> Tensor:
    """Compute `gated` of the products of x [..., D] with two weights [F, D], stored or not."""
    return ops.gated(linear(ops, x, gate_FD), linear(ops, x, up_FD), activation)
