"""The walks of constraints in Triton against those in torch, over random automata."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import IN_TORCH, resolve
from blockdiff.kernels.automaton import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(L: int, B: int, S: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Successors, with fewer than K of some states and many ways into others; logarithms of ways, and what is final."""
    g = torch.Generator().manual_seed(S + K)
    successor = torch.randint(0, S, (S, K), generator=g)
    successor[torch.rand(S, K, generator=g) < 0.3] = S
    successor[: 2 * S // 3 + 1, 0] = S // 2
    ways = torch.randn(2, L, B, S, K, generator=g, dtype=torch.float64) * 300
    ways[:, torch.rand(L, B, S, K, generator=g) < 0.2 * (torch.arange(K) > 0)] = -torch.inf
    ways[:, :, :, successor == S] = -torch.inf
    ways[1, :, :, 0] = -1.0  # equal ways
    ahead = torch.full((2, B, S + 1), -torch.inf, dtype=torch.float64)
    ahead[:, :, : S // 2 + 1] = 0.0
    return successor.to(DEVICE), ways.to(DEVICE), ahead.to(DEVICE)


@pytest.mark.parametrize(("L", "B", "S", "K"), [(9, 2, 5, 3), (1, 1, 1, 1), (6, 3, 70, 37), (4, 1, 130, 2)])
def test_walks_are_those_of_torch(L, B, S, K, unwritten_memory_is_nan: Any, monkeypatch):
    monkeypatch.setattr(triton, "SIZES", dict(STATES=16, WAYS=4, num_warps=4) if S == 5 else triton.SIZES)
    successor, ways, last = drawn(L, B, S, K)
    found = []
    for kernels in (IN_TORCH, resolve("triton")):
        own = ways.clone()
        choice, ahead = kernels.look_ahead(successor, own, last)
        share = (own[0] - own[0].logsumexp(-1, keepdim=True)).exp().nan_to_num(nan=0.0)
        share *= torch.rand(share.shape, generator=torch.Generator().manual_seed(1)).to(share)
        first = torch.zeros(B, S + 1, dtype=torch.float64, device=DEVICE)
        first[:, S // 2] = 1.0
        kernels.reach(successor, share, first)
        is_way = own[1].amax(-1) > -torch.inf  # where there is none, any choice may stand
        found.append((ahead, own, share, choice * is_way))
    for mine, truth in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=0.0)
    assert (found[0][0] > -torch.inf).any() and (S < 3 or (found[0][2] > 0).any())
