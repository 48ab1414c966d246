"""Self-conditioning: mixes the soft embedding of the last prediction into the canvas embedding."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels import Kernels
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import RMSNorm


class SelfConditioning(MLP):
    """`norm(embedding + mlp(pre_norm(soft)))`, the outer norm without weight; no signal means soft = 0.

    is_normed: whether there is the outer norm. Without it and with a `down_proj` of zeros nothing changes.
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

    def forward(self, embedding: Tensor, soft: Tensor | None = None) -> Tensor:
        if soft is not None:
            embedding = embedding + super().forward(self.pre_norm(soft))
        return self.kernels.rms_norms(embedding, (None,), self.eps)[0] if self.is_normed else embedding
