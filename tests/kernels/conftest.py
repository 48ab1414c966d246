"""Fixtures for the tests of several kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import IN_C, IN_TORCH, Kernels
from blockdiff.kernels.vocabulary import triton_launch as launch


@pytest.fixture(params=["torch", "c"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every op runs in torch and, where it has one, by its C function."""
    return IN_TORCH if request.param == "torch" else IN_C


@pytest.fixture
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel should have written and has not shows: floats are NaN, integers far below every index."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*arguments: Any, **named: Any) -> Tensor:
            out = make(*arguments, **named)
            is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
            if is_fake or out.device.type == "meta" or out.dtype == torch.bool:
                return out
            with torch.no_grad():  # torch's checkpoints make an empty leaf
                if out.is_floating_point():
                    return out.fill_(float("nan"))
                return out.fill_(max(-(2**20), torch.iinfo(out.dtype).min))

        return fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles of the vocabulary kernels for a small vocabulary, and several programs for a few rows."""
    monkeypatch.setattr(launch, "TILE", 32)
    monkeypatch.setattr(launch, "ELEMENTS", 512)
