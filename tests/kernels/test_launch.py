"""Launches: what follows from sizes is worked out once, and forgotten where the tiles change."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from blockdiff.kernels import launch as launching
from blockdiff.kernels import tiles
from blockdiff.kernels.gated.triton import gated_linear
from blockdiff.kernels.launch import Launch, forget_sizes
from blockdiff.kernels.norm_rope import triton as norms

pytestmark = pytest.mark.quick


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *arguments: found.append(self))
    forget_sizes()
    return found


@torch.no_grad()
def test_equal_sizes_share_a_launch_and_others_have_their_own(launched):
    weights = torch.zeros(48, 16), torch.zeros(48, 16)
    for x in (torch.zeros(5, 16), torch.ones(1, 5, 16), torch.zeros(70, 16), torch.zeros(5, 16, dtype=torch.bfloat16)):
        gated_linear(x, *(weight.to(x.dtype) for weight in weights), "silu")
    first, same, longer, narrow = launched
    assert same is first and longer is not first and narrow is not first
    assert longer.grid != first.grid and narrow.constants["PRECISION"] != first.constants["PRECISION"]


@torch.no_grad()
def test_other_tiles_count_after_sizes_are_forgotten(launched):
    x, weight = torch.zeros(70, 16), torch.zeros(48, 16)
    gated_linear(x, weight, weight, "silu")
    key: Any = ("expert_mlp_gate_up", 90, 4)
    with patch.dict(tiles.table(), {key: [(float("inf"), tiles.Tile(16, 16, 16, 2, 1))]}):
        forget_sizes()
        gated_linear(x, weight, weight, "silu")
    forget_sizes()
    gated_linear(x, weight, weight, "silu")
    before, other, after = launched
    assert other.constants["num_warps"] == 2 and other.grid != before.grid
    assert after.constants == before.constants


def test_nothing_is_launched_for_an_empty_grid_or_tensors_without_memory():
    runs: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **constants: runs.append((grid, arguments, constants))

    x = torch.zeros(2)
    Launch(Kernel(), (0, 1), D=1)(x)
    Launch(Kernel(), (1, 1), D=1)(x.to("meta"))
    assert not runs
    Launch(Kernel(), (1, 2), D=3)((None, x), 4)
    assert runs == [((1, 2), ((None, x), 4), {"D": 3})]


def test_launches_of_equal_grids_and_constants_share_what_was_looked_up(launched):
    x = torch.zeros(2)
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: print, "__name__": "kernel"})()
    for grid, D in (((1,), 1), ((1,), 1), ((2,), 1), ((1,), 2)):
        launching.launch(kernel, grid, x, D=D)
    first, same, *others = launched
    assert first is same and len({id(each) for each in launched}) == 3 and others[1].constants == {"D": 2}


def test_an_op_has_one_gradient_whether_torch_sees_it_or_not(monkeypatch):
    seen: list[Any] = []
    custom = norms._rms_norms.custom
    monkeypatch.setattr(norms._rms_norms, "custom", lambda *inputs: seen.append(inputs) or custom(*inputs))
    gradients = []
    for asks in (False, True):
        monkeypatch.setattr(launching, "torch_must_see_op", lambda asks=asks: asks)
        x, w = (torch.linspace(-1, 2, n).view(-1, 8).requires_grad_() for n in (40, 8))
        first, second = norms.rms_norms(x, (w[0], None), 1e-6)
        (first.sin() + second.cos()).sum().backward()
        gradients.append((first, second, x.grad, w.grad))
    assert len(seen) == 1
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
