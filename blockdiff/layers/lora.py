"""Low-rank adapters (LoRA, arXiv 2106.09685): what trains in place of a weight W is scale * B A, which is added to it.

An adapter is a part of the module that has the weight (`HasWeights`), so that checkpoints, freezing and sharding see
the same model with a few parameters more. B A is never formed but when adapters are merged. The model runs its weights
in both passes, so each weight has one adapter, and merging it once is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockdiff.kernels.stored import StoredMatrix

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


@torch.no_grad()
def draw_low_rank(A: Tensor, generator: torch.Generator) -> None:
    """Uniform in +-1 / sqrt(inputs): Kaiming's bound for a slope of sqrt(5), which PEFT draws A with."""
    A.uniform_(-(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def merged(
    weight: Tensor | StoredMatrix, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype | None = None
) -> Tensor:
    """weight + scale B A, expert by expert where there are: in fp32 at least, and rounded once to a dtype.

    dtype: None is the weight's, which is a tensor then.
    """
    if dtype is None:
        assert isinstance(weight, Tensor)
        dtype = weight.dtype
    wide = torch.promote_types(weight.dtype if isinstance(weight, Tensor) else dtype, torch.float32)
    out = torch.empty(weight.shape, dtype=dtype, device=A.device)
    for n in range(len(out)) if out.dim() == 3 else [...]:
        if isinstance(weight, Tensor):
            own = weight[n].to(wide)
        else:
            own = (weight if n is ... else weight.part(n)).decoded(wide)
        out[n].copy_(torch.addmm(own, B[n].to(wide), A[n].to(wide), alpha=scale))
    return out
