"""Low-rank adapters (LoRA, arXiv 2106.09685): what trains in place of a weight W is scale * B A, which is added to it.

An adapted module keeps the name and the weights of the one that it replaces, so that checkpoints, freezing and
sharding see the same model with a few parameters more. B A is never formed but when adapters are merged. The model
runs its weights in both passes, so each weight has one adapter, and merging it once is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.layers.experts import Experts, local_part

LOW_RANK = ("lora_A", "lora_B", "gate_up_lora_A", "gate_up_lora_B", "down_lora_A", "down_lora_B")


@dataclass(frozen=True)
class LowRank:
    """The adaptation of a weight: B A of rank `rank`, times alpha / rank, or alpha / sqrt(rank) with `rslora`.

    dropout: share of the inputs of A that are zeroed in training (experts have none).
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of B A (rank-stabilised: arXiv 2312.03732)."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def is_low_rank(name: str) -> bool:
    """True where a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in LOW_RANK


class AdaptedLinear(nn.Linear):
    """A linear layer plus its adapter: `W x + bias + scale B A dropout(x)`; A and B in fp32."""

    low_rank: LowRank
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, base: nn.Linear, low_rank: LowRank):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.low_rank = low_rank
        self.make_low_rank(base.weight.device)

    def make_low_rank(self, device: torch.device) -> None:
        """Make A and B, which hold no values yet."""
        self.lora_A = nn.Parameter(torch.empty(self.low_rank.rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, self.low_rank.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        out = self.base_product(flat)
        if self.training and self.low_rank.dropout:
            flat = F.dropout(flat, self.low_rank.dropout)
        narrowed = F.linear(flat, self.lora_A.to(flat.dtype))
        scaled_B = (self.lora_B * self.low_rank.scale).to(out.dtype)
        out.addmm_(narrowed.to(out.dtype), scaled_B.t())  # where the product stands: no second one is made
        return out.view(*x.shape[:-1], self.out_features)

    def base_product(self, x: Tensor) -> Tensor:
        """`W x + bias`."""
        return F.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The layer with the weight W + scale B A, summed in fp32 at least, in the dtype of W."""
        base = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        base.weight = nn.Parameter(merged(self.weight, self.lora_A, self.lora_B, self.low_rank.scale), False)
        base.bias = self.bias
        return base


class AdaptedExperts(Experts):
    """Routed experts, each with adapters of its own on gate_up and on down, computed as grouped low-rank products."""

    low_rank: LowRank
    gate_up_lora_A: nn.Parameter
    gate_up_lora_B: nn.Parameter
    down_lora_A: nn.Parameter
    down_lora_B: nn.Parameter

    def __init__(self, base: Experts, low_rank: LowRank):
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = base.gate_up_proj, base.down_proj
        self.kernels, self.activation = base.kernels, base.activation
        self.low_rank = low_rank
        self.make_low_rank(base.down_proj.device)

    def make_low_rank(self, device: torch.device) -> None:
        """Make A and B of gate_up and of down, which hold no values yet."""
        (E, D, F_), two_F, r = self.down_proj.shape, self.gate_up_proj.shape[1], self.low_rank.rank
        shapes = {
            "gate_up_lora_A": (E, r, D),
            "gate_up_lora_B": (E, two_F, r),
            "down_lora_A": (E, r, F_),
            "down_lora_B": (E, D, r),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device)))

    def low_rank_matrices(self) -> Sequence[Tensor]:
        """A and B of gate_up, A and B of down, scaled, in the dtype of the weights; of the experts that lie here."""
        scale, dtype = self.low_rank.scale, self.gate_up_proj.dtype
        dtype = dtype if dtype.is_floating_point else self.down_lora_B.dtype  # over fp8 the op casts them
        return (
            local_part(self.gate_up_lora_A).to(dtype),
            (local_part(self.gate_up_lora_B) * scale).to(dtype),
            local_part(self.down_lora_A).to(dtype),
            (local_part(self.down_lora_B) * scale).to(dtype),
        )

    @torch.no_grad()
    def merged(self) -> Experts:
        """The experts with their adapters added to their weights."""
        E, D, F_ = self.down_proj.shape
        with torch.device("meta"):
            base = Experts(E, D, F_, self.kernels, self.activation)
        scale = self.low_rank.scale
        for name in ("gate_up", "down"):
            A, B = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
            weight = merged(getattr(self, f"{name}_proj"), A, B, scale)
            setattr(base, f"{name}_proj", nn.Parameter(weight, requires_grad=False))
        return base


@torch.no_grad()
def draw_low_rank(A: Tensor, generator: torch.Generator) -> None:
    """Uniform in +-1 / sqrt(inputs): Kaiming's bound for a slope of sqrt(5), which PEFT draws A with."""
    A.uniform_(-(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def merged(weight: Tensor, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype | None = None) -> Tensor:
    """weight + scale B A, expert by expert where there are: in fp32 at least, and rounded once to a dtype.

    dtype: None is the weight's.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = torch.empty_like(weight, dtype=dtype)
    parts = zip(out, weight, A, B, strict=True) if weight.dim() == 3 else [(out, weight, A, B)]
    for place, w, a, b in parts:
        place.copy_(torch.addmm(w.to(wide), b.to(wide), a.to(wide), alpha=scale))
    return out
