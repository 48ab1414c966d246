"""Which experts the tokens of a test choose."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen(N: int, E: int, k: int, choice: str, generator: torch.Generator) -> Tensor:
    """Experts [N, k] of each token by the name of a pattern; E among them means no expert."""
    order = torch.rand(N, max(E, k), generator=generator).argsort(-1)[:, :k]
    return {
        "random": order,
        "one": torch.full_like(order, E // 2) + torch.arange(k) * E,  # the others of a token: no expert
        "some empty": torch.rand(N, max(E // 2, k), generator=generator).argsort(-1)[:, :k] * 2,  # only even ones
        "none": torch.full_like(order, E),
        "padding": torch.where(torch.rand(N, 1, generator=generator) < 0.4, E, order),
    }[choice].clamp(max=E)
