"""The dense gated MLP, and self-conditioning, which is one."""

from __future__ import annotations

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.expert_mlp.activations import activation_named
from blockdiff.layers.linear import Linear, gated_product
from blockdiff.layers.norm import RMSNorm


class MLP(nn.Module):
    """`down(f(gate x) * g(up x))`; activation: the name of f and g in `kernels.expert_mlp.activations`."""

    def __init__(self, hidden: int, intermediate: int, kernels: Kernels, activation: str = "gelu_tanh"):
        super().__init__()
        activation_named(activation)
        self.kernels, self.activation = kernels, activation
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, is_noisy: bool | Tensor = False) -> Tensor:
        gate_proj = self.gate_proj
        hidden = gated_product(gate_proj, self.up_proj, gate_proj.entering(x), self.activation, self.kernels, is_noisy)
        out: Tensor = self.down_proj(hidden, is_noisy)
        return out


class SelfConditioning(MLP):
    """Self-conditioning: adds the soft embedding of the last prediction to the canvas's embedding.

    `norm(embedding + mlp(pre_norm(soft)))`, the outer norm without weight; soft = 0 without a signal.

    is_normed: whether there is the outer norm. Without it, a `down_proj` of zeros makes the module an identity.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        eps: float,
        kernels: Kernels,
        activation: str = "gelu_tanh",
        is_normed: bool = True,
    ):
        super().__init__(hidden, intermediate, kernels, activation)
        self.pre_norm = RMSNorm(hidden, eps, kernels)
        self.eps, self.is_normed = eps, is_normed

    def forward(self, embedding: Tensor, soft: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if soft is not None:
            embedding = embedding + super().forward(self.pre_norm(soft), is_noisy=True)
        return self.kernels.rms_norms(embedding, (None,), self.eps)[0] if self.is_normed else embedding
