"""Linear layers: one module with three optional parts, and the gated half of an MLP, which is two of them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.kernels import IN_TORCH, Kernels
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.lora import LowRank
from blockdiff.layers.weights import HasWeights


class Split(Protocol):
    """The part of a linear layer that one of several ranks has, and what they exchange around it."""

    def weight(self, held: Any) -> Tensor | StoredMatrix:
        """The part of the weight that this rank multiplies with, of the weight as it is held."""

    def bias(self, bias: Tensor) -> Tensor:
        """The bias that this rank adds."""

    def low_rank(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices of an adapter that this rank multiplies with."""

    def entering(self, x: Tensor) -> Tensor:
        """x, which all ranks have, as each goes on alone with it: its gradient is the sum of theirs."""

    def leaving(self, out: Tensor) -> Tensor:
        """The layer's output, of this rank's product."""


class Linear(HasWeights, nn.Linear):
    """`W x + bias + scale B A dropout(x)`, where W may be stored in fewer bits, and split over ranks.

    kernels: the ops that multiply with a stored weight.
    """

    WEIGHTS: ClassVar = {"weight": ""}
    split: Split | None = None
    kernels: Kernels = IN_TORCH
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """A linear layer of torch as one of these, with the same parameters."""
        made = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def matrix(self) -> Tensor | StoredMatrix:
        """The weight that this rank multiplies with, as kernels take it."""
        held: Any = self._parameters["weight"] if self.stored is None else self.held("weight")
        made: Tensor | StoredMatrix = held if self.split is None else self.split.weight(held)
        return made

    @property
    def is_product(self) -> bool:
        """True for a layer that multiplies with its matrix and does no more."""
        return self.low_rank is None and self._parameters["bias"] is None

    def entering(self, x: Tensor) -> Tensor:
        """x as this layer takes it; who calls several layers with one x does this once for all of them."""
        return x if self.split is None else self.split.entering(x)

    def forward(self, x: Tensor) -> Tensor:
        matrix, bias, low_rank, split = self.matrix(), self._parameters["bias"], self.low_rank, self.split
        flat = x if low_rank is None else x.reshape(-1, x.shape[-1])
        if not isinstance(matrix, Tensor):
            out = matrix.product(self.kernels, flat)
        elif bias is None or split is None:
            out = F.linear(flat, matrix, bias)
        else:
            out = F.linear(flat, matrix, split.bias(bias))
        if low_rank is not None:
            out = self._add_low_rank(out, flat, low_rank).view(*x.shape[:-1], out.shape[-1])
        return out if split is None else split.leaving(out)

    def _add_low_rank(self, out: Tensor, x: Tensor, low_rank: LowRank) -> Tensor:
        """Add the adapter's product in place: no second output is made."""
        if self.training and low_rank.dropout:
            x = F.dropout(x, low_rank.dropout)
        A, B = (self.lora_A, self.lora_B) if self.split is None else self.split.low_rank(self.lora_A, self.lora_B)
        narrowed = F.linear(x, A.to(x.dtype))
        return out.addmm_(narrowed.to(out.dtype), B.to(out.dtype).t(), alpha=low_rank.scale)


def gated_product(gate: Linear, up: Linear, x: Tensor, activation: str, kernels: Kernels) -> Tensor:
    """`f(gate x) * g(up x)` of two linear layers."""
    if gate.is_product and up.is_product:
        return kernels.gated_linear(x, gate.matrix(), up.matrix(), activation)
    return kernels.gated(gate(x), up(x), activation)
