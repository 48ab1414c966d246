"""The oracle of expert_mlp: one expert after the other, autograd for the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation's formula; swiglu_oai is that of gpt-oss."""
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    assert activation == "swiglu_oai"
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def expert_mlp(
    x_ND: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    expert_index_Nk: Tensor,
    expert_weight_Nk: Tensor,
    activation: str = "gelu_tanh",
    low_rank: Sequence[Tensor] = (),
) -> Tensor:
    """`sum_k weight_k * down_e(gated(gate_e x, up_e x))` with e = index_k; index E contributes nothing.

    low_rank: A and B of gate_up, A and B of down, whose products B A are added to the weights.
    """
    out = torch.zeros_like(x_ND)
    for e in range(gate_up_EFD.shape[0]):
        h = x_ND @ gate_up_EFD[e].T
        if low_rank:
            h = h + x_ND @ (low_rank[1][e] @ low_rank[0][e]).T
        gate, up = h.chunk(2, -1)
        a = gated(gate, up, activation)
        y = a @ down_EDF[e].T
        if low_rank:
            y = y + a @ (low_rank[3][e] @ low_rank[2][e]).T
        weight = torch.where(expert_index_Nk == e, expert_weight_Nk, 0.0).sum(-1, keepdim=True)
        out = out + y * weight
    return out
