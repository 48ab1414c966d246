"""Linear layers: one module with three optional parts, and the gated half of an MLP, which is two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from blockdiff.kernels import IN_TORCH, Kernels
from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.lora import Adapted, Casts, products
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

    Calls take `is_noisy` as `BlockDiffusionModel.forward` does: an adapter may be one of noisy tokens only. kernels:
    the ops that multiply with a stored weight.
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

    def is_product(self, is_noisy: bool | Tensor) -> bool:
        """True if the layer multiplies these tokens with its matrix and does no more."""
        return self._parameters["bias"] is None and not self.adapts(is_noisy)

    def entering(self, x: Tensor) -> Tensor:
        """x as this layer takes it; who calls several layers with one x does this once for all of them."""
        return x if self.split is None else self.split.entering(x)

    def forward(self, x: Tensor, is_noisy: bool | Tensor = False) -> Tensor:
        if self.adapts(is_noisy):
            return _adapted((self,), x, is_noisy)[0]
        matrix, bias, split = self.matrix(), self._parameters["bias"], self.split
        if not isinstance(matrix, Tensor):
            out = matrix.product(self.kernels, x)
        elif bias is None or split is None:
            out = F.linear(x, matrix, bias)
        else:
            out = F.linear(x, matrix, split.bias(bias))
        return out if split is None else split.leaving(out)

    def terms(self, x: Tensor) -> Adapted:
        """The tensors of the layer and its adapter for tokens x."""
        matrix, split, low_rank = self.matrix(), self.split, self.low_rank
        A: Tensor = self.lora_A
        B: Tensor = self.lora_B
        bias: Tensor | None = self._parameters["bias"]
        assert low_rank is not None
        if split is not None:
            A, B = split.low_rank(A, B)
            bias = None if bias is None else split.bias(bias)
        if isinstance(matrix, Tensor):
            (matrix,) = in_autocast(matrix)
            return Adapted(matrix, None, bias, A, B, low_rank.scale)
        return Adapted(None, matrix.product(self.kernels, x), bias, A, B, low_rank.scale)

    def shares(self, is_noisy: bool | Tensor) -> bool:
        """True if the adapter's product can be made together with those of other layers."""
        is_called = self._forward_hooks or self._forward_pre_hooks
        has_own_input = self.training and self.low_rank is not None and self.low_rank.dropout
        return self.adapts(is_noisy) and not is_called and not has_own_input


def outputs(layers: Sequence[Linear], x: Tensor, is_noisy: bool | Tensor = False) -> Sequence[Tensor]:
    """The outputs of layers that read the same x; adapters of all of them are one autograd function if they can be."""
    if all(layer.shares(is_noisy) for layer in layers) and len({_is_noisy_only(layer) for layer in layers}) == 1:
        return _adapted(tuple(layers), x, is_noisy)
    return [layer(x, is_noisy) for layer in layers]


def _is_noisy_only(layer: Linear) -> bool:
    return layer.low_rank is not None and layer.low_rank.noisy_only


def _adapted(layers: tuple[Linear, ...], x: Tensor, is_noisy: bool | Tensor) -> Sequence[Tensor]:
    """The outputs of adapted layers that read the same x, and are alike; one with dropout is alone."""
    first, dropped, is_clean = layers[0], None, None
    (x,) = in_autocast(x)
    if first.training and first.low_rank is not None and first.low_rank.dropout:
        dropped = F.dropout(x, first.low_rank.dropout)
    if isinstance(is_noisy, Tensor) and _is_noisy_only(first):
        is_clean = ~is_noisy
    terms = [layer.terms(x) for layer in layers]
    key, kept = (x.dtype, layers), None if is_compiling() or terms[0].A.dtype is x.dtype else first.kept_casts
    casts = None if kept is None else kept.get(key)
    if casts is None:
        casts = Casts.of(terms, x.dtype)
        if kept is not None:
            kept[key] = casts
    outs = products(x, terms, casts, dropped, is_clean)
    return [out if layer.split is None else layer.split.leaving(out) for layer, out in zip(layers, outs, strict=True)]


def gated_product(
    gate: Linear, up: Linear, x: Tensor, activation: str, kernels: Kernels, is_noisy: bool | Tensor = False
) -> Tensor:
    """`f(gate x) * g(up x)` of two linear layers."""
    if gate.is_product(is_noisy) and up.is_product(is_noisy):
        return kernels.gated_linear(x, gate.matrix(), up.matrix(), activation)
    of_gate, of_up = outputs((gate, up), x, is_noisy)
    return kernels.gated(of_gate, of_up, activation)
