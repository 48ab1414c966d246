"""Linear layers: one module with optional parts (stored weight, adapter, split), and the gated half of an MLP."""

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
    """A linear layer's part on one of several ranks, and the communication before and after it."""

    def weight(self, held: Any) -> Tensor | StoredMatrix:
        """Return the part of the weight that this rank multiplies by. held: the module's weight (`HasWeights.held`)."""

    def bias(self, bias: Tensor) -> Tensor:
        """Return the bias that this rank adds."""

    def low_rank(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of the LoRA matrices A and B that this rank multiplies by."""

    def entering(self, x: Tensor) -> Tensor:
        """Return the input x, equal on all ranks; in the backward its gradient is summed over ranks if needed."""

    def leaving(self, out: Tensor) -> Tensor:
        """Return the layer's output, made of this rank's product and the other ranks'."""


class Linear(HasWeights, nn.Linear):
    """`W x + bias + scale B A dropout(x)`; W may be stored in fewer bits and split over ranks.

    is_noisy: booleans [B, T] of noisy tokens, or one for all; an adapter may act on noisy tokens only. kernels: the ops
    for products with a stored weight.
    """

    WEIGHTS: ClassVar = {"weight": ""}
    split: Split | None = None
    kernels: Kernels = IN_TORCH
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """Convert torch's linear layer; the parameters are shared."""
        converted = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        converted.weight, converted.bias = layer.weight, layer.bias
        return converted.train(layer.training)

    def matrix(self) -> Tensor | StoredMatrix:
        """Return the weight that this rank multiplies by."""
        held: Any = self._parameters["weight"] if self.stored is None else self.held("weight")
        matrix: Tensor | StoredMatrix = held if self.split is None else self.split.weight(held)
        return matrix

    def is_product(self, is_noisy: bool | Tensor) -> bool:
        """Whether the layer is a bare matrix product for these tokens: no bias and no adapter."""
        return self._parameters["bias"] is None and not self.adapts(is_noisy)

    def entering(self, x: Tensor) -> Tensor:
        """Prepare x for a split layer. Call it once for all layers that read the same x, before calling them."""
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
        """Return the tensors of the layer and its adapter that `lora.products` multiplies tokens x by."""
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
        """Whether `outputs` may fuse this layer's adapter with other layers' adapters: no hooks and no dropout."""
        is_called = self._forward_hooks or self._forward_pre_hooks
        has_own_input = self.training and self.low_rank is not None and self.low_rank.dropout
        return self.adapts(is_noisy) and not is_called and not has_own_input


def outputs(layers: Sequence[Linear], x: Tensor, is_noisy: bool | Tensor = False) -> Sequence[Tensor]:
    """Call layers that read the same x; if all can be fused, their adapters run as one autograd function."""
    if all(layer.shares(is_noisy) for layer in layers) and len({_is_noisy_only(layer) for layer in layers}) == 1:
        return _adapted(tuple(layers), x, is_noisy)
    return [layer(x, is_noisy) for layer in layers]


def _is_noisy_only(layer: Linear) -> bool:
    return layer.low_rank is not None and layer.low_rank.noisy_only


def _adapted(layers: tuple[Linear, ...], x: Tensor, is_noisy: bool | Tensor) -> Sequence[Tensor]:
    """Call adapted layers that read the same x as one autograd function.

    All must agree in `noisy_only`. A layer with dropout must be the only one, since its adapter has its own input.
    """
    first, dropped, is_clean = layers[0], None, None
    (x,) = in_autocast(x)
    if first.training and first.low_rank is not None and first.low_rank.dropout:
        dropped = F.dropout(x, first.low_rank.dropout)
    if isinstance(is_noisy, Tensor) and _is_noisy_only(first):
        is_clean = ~is_noisy
    terms = [layer.terms(x) for layer in layers]
    key, cache = (x.dtype, layers), None if is_compiling() or terms[0].A.dtype is x.dtype else first.cast_cache
    casts = None if cache is None else cache.get(key)
    if casts is None:
        casts = Casts.of(terms, x.dtype)
        if cache is not None:
            cache[key] = casts
    outs = products(x, terms, casts, dropped, is_clean)
    return [out if layer.split is None else layer.split.leaving(out) for layer, out in zip(layers, outs, strict=True)]


def gated_product(
    gate: Linear, up: Linear, x: Tensor, activation: str, kernels: Kernels, is_noisy: bool | Tensor = False
) -> Tensor:
    """Compute `f(gate x) * g(up x)` of two linear layers; `activation` names f and g."""
    if gate.is_product(is_noisy) and up.is_product(is_noisy):
        return kernels.gated_linear(x, gate.matrix(), up.matrix(), activation)
    gate_out, up_out = outputs((gate, up), x, is_noisy)
    return kernels.gated(gate_out, up_out, activation)
