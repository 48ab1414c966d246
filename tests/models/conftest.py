"""Fixtures for the tests of DiffusionGemma's stack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from blockdiff.models.diffusion_gemma import DiffusionGemma
from tests.support.oracle import oracle, ours


@pytest.fixture(scope="module")
def pair() -> tuple[DiffusionGemmaForBlockDiffusion, DiffusionGemma]:
    model = oracle()
    return model, ours(model)


@pytest.fixture(scope="module")
def mine(pair) -> DiffusionGemma:
    return pair[1]


@pytest.fixture
def without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    """No graph is made, but in tests that speak of gradients."""
    with torch.set_grad_enabled("gradient" in request.node.name):
        yield
