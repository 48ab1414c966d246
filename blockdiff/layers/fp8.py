"""Linear layers and experts whose weights stand still in fp8 (`kernels/fp8`), and adapters over them.

Each has the names of the layer that it replaces; the scale of a tensor X is X_scale, fp32. Both are buffers: nothing
trains them. The embedding table, norms and routers have no such form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8.torch import decoded
from blockdiff.layers.experts import Experts, local_part
from blockdiff.layers.lora import AdaptedExperts, AdaptedLinear, LowRank, merged

SCALE = "_scale"  # follows the name of a tensor in fp8
SCALES = ("weight_scale", "gate_up_proj_scale", "down_proj_scale")


def is_scale(name: str) -> bool:
    """True where a buffer of this name holds the scales of a tensor in fp8."""
    return name.rpartition(".")[2] in SCALES


class InFp8(nn.Module):
    """A module that holds tensors in fp8: casting leaves them as they are, moving moves them."""

    def hold(self, name: str, weight: Fp8) -> None:
        """Keep a tensor in fp8 under this name."""
        self.register_buffer(name, weight.codes)
        self.register_buffer(name + SCALE, weight.scale)

    def hold_empty(self, name: str, like: Tensor) -> None:
        """Keep room for one of like's shape, on its device."""
        codes = like.new_empty(like.shape, dtype=torch.uint8)
        scale = like.new_empty((*like.shape[:-1], 1), dtype=torch.float32)
        self.hold(name, Fp8(codes, scale))

    def leaves(self) -> list[str]:
        """The names of the tensors that are held."""
        return [name.removesuffix(SCALE) for name, _ in self.named_buffers(recurse=False) if is_scale(name)]

    def held(self, name: str) -> Fp8:
        """The tensor of this name; where it is split, the part that lies here."""
        return Fp8(local_part(getattr(self, name)), local_part(getattr(self, name + SCALE)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = {name: scale for name, scale in self.named_buffers(recurse=False) if is_scale(name)}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            made = getattr(self, name)
            setattr(self, name, made.float() if scale.device.type == "meta" else scale.to(made.device))
        return self


class Fp8Linear(InFp8, nn.Linear):
    """A linear layer without bias, its weight [out, in] in fp8."""

    kernels: Kernels

    def __init__(self, base: nn.Linear, kernels: Kernels):
        nn.Module.__init__(self)
        assert base.bias is None
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        self.kernels = kernels
        self.hold_empty("weight", base.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.held("weight"))


class Fp8Experts(InFp8, Experts):
    """Routed experts whose matrices are in fp8."""

    def __init__(self, base: Experts):
        nn.Module.__init__(self)
        self.kernels, self.activation = base.kernels, base.activation
        for name in ("gate_up_proj", "down_proj"):
            self.hold_empty(name, base.get_parameter(name).detach())

    def matrices(self) -> tuple[Fp8, Fp8]:
        """gate_up and down."""
        return self.held("gate_up_proj"), self.held("down_proj")


class AdaptedFp8Linear(InFp8, AdaptedLinear):
    """A linear layer in fp8 plus its adapter."""

    kernels: Kernels

    def __init__(self, base: Fp8Linear, low_rank: LowRank):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.bias, self.kernels, self.low_rank = None, base.kernels, low_rank  # type: ignore[assignment]
        self.hold("weight", base.held("weight"))
        self.make_low_rank(base.weight.device)

    def base_product(self, x: Tensor) -> Tensor:
        """`W x`."""
        return self.kernels.linear(x, self.held("weight"))

    @torch.no_grad()
    def merged(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """The layer with the weight W + scale B A, summed in fp32 and not in fp8, which would round B A away."""
        base = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = merged(decoded(self.held("weight"), torch.float32), self.lora_A, self.lora_B, self.low_rank.scale)
        base.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        return base


class AdaptedFp8Experts(InFp8, AdaptedExperts):
    """Routed experts in fp8, each with adapters of its own."""

    def __init__(self, base: Fp8Experts, low_rank: LowRank):
        nn.Module.__init__(self)
        self.kernels, self.activation, self.low_rank = base.kernels, base.activation, low_rank
        for name in ("gate_up_proj", "down_proj"):
            self.hold(name, base.held(name))
        self.make_low_rank(base.down_proj.device)

    def matrices(self) -> tuple[Fp8, Fp8]:
        """gate_up and down."""
        return self.held("gate_up_proj"), self.held("down_proj")

    @torch.no_grad()
    def merged(self, dtype: torch.dtype = torch.float32) -> Experts:
        """The experts with their adapters added to their weights, summed in fp32, one after the other."""
        E, D, F = self.down_proj.shape
        with torch.device("meta"):
            base = Experts(E, D, F, self.kernels, self.activation)
        for name in ("gate_up", "down"):
            held, A, B = (
                self.held(f"{name}_proj"),
                getattr(self, f"{name}_lora_A"),
                getattr(self, f"{name}_lora_B"),
            )
            weight = torch.empty(held.shape, dtype=dtype, device=held.codes.device)
            for e in range(E):
                own = decoded(Fp8(held.codes[e], held.scale[e]), torch.float32)
                weight[e] = merged(own, A[e], B[e], self.low_rank.scale)
            setattr(base, f"{name}_proj", nn.Parameter(weight, requires_grad=False))
        return base
