"""The dense gated MLP."""

from __future__ import annotations

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.expert_mlp.activations import activation_of
from blockdiff.layers.linear import gated_product, product


class MLP(nn.Module):
    """`down(f(gate x) * up x)`, f by its name in `kernels.expert_mlp.activations`."""

    def __init__(self, hidden: int, intermediate: int, kernels: Kernels, activation: str = "gelu_tanh"):
        super().__init__()
        activation_of(activation)
        self.kernels, self.activation = kernels, activation
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated_product(self.gate_proj, self.up_proj, x, self.activation, self.kernels)
        return product(self.down_proj, hidden, self.kernels)
