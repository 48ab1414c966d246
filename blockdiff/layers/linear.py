"""Products with linear layers of any kind: what the kernels need of one, and what it gives."""

from __future__ import annotations

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.fp8 import Fp8
from blockdiff.layers.fp8 import Fp8Linear


def weight_of(module: nn.Module) -> Tensor | Fp8 | None:
    """The weight of a linear layer as kernels take it; None of one that has a bias or hooks, or does more."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is Fp8Linear:
        return module.held("weight")
    if type(module) is not nn.Linear:
        return None
    members = module._parameters  # which every nn.Linear has, and finding them by attribute takes a microsecond
    return members["weight"] if members["bias"] is None else None


def product(module: nn.Module, x: Tensor, kernels: Kernels) -> Tensor:
    """What a linear layer gives, by the kernels where it is a product alone."""
    weight = weight_of(module)
    made: Tensor = module(x) if weight is None else kernels.linear(x, weight)
    return made
