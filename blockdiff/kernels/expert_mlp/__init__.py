"""expert_mlp: the routed experts of a mixture-of-experts layer, grouped by expert."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ExpertMLP(Protocol):
    """`sum_k weight_k * down_e(f(gate_e x) * g(up_e x))`, e = index_k, for every token.

    x_ND: tokens; gate_up_EFD: [E, 2F, D], gate rows first; down_EDF: [E, D, F]; expert_index_Nk: int64, E means "no
    expert" (padding: no work, contributes 0); expert_weight_Nk: routing weights; activation: "gelu_tanh", "silu" or
    "swiglu_oai" (activations.py). Returns [N, D] in x's dtype; gradients for x, the routing weights and whichever
    weights require them, summed in an order that the inputs alone decide.
    """

    def __call__(
        self,
        x_ND: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        expert_index_Nk: Tensor,
        expert_weight_Nk: Tensor,
        activation: str = "gelu_tanh",
    ) -> Tensor: ...
