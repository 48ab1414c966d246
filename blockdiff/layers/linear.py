"""Products with linear layers of any kind: by the ops where a layer is a product alone, else by calling the layer."""

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
    own = module._parameters  # where they are found without a search
    return own["weight"] if type(module) is nn.Linear and own["bias"] is None else None


def product(module: nn.Module, x: Tensor, kernels: Kernels) -> Tensor:
    """The output of a linear layer."""
    weight = weight_of(module)
    made: Tensor = module(x) if weight is None else kernels.linear(x, weight)
    return made


def products(modules: tuple[nn.Module, ...], x: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    """The outputs of some linear layers for x."""
    weights = [weight for module in modules if (weight := weight_of(module)) is not None]
    if len(weights) < len(modules):
        return tuple([module(x) for module in modules])
    return kernels.linears(x, weights)


def gated_product(gate: nn.Module, up: nn.Module, x: Tensor, activation: str, kernels: Kernels) -> Tensor:
    """`f(gate x) * g(up x)` of two linear layers."""
    gate_FD, up_FD = weight_of(gate), weight_of(up)
    if gate_FD is None or up_FD is None:
        return kernels.gated(gate(x), up(x), activation)
    return kernels.gated_linear(x, gate_FD, up_FD, activation)
