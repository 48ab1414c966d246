"""A tiny random model that chats."""

from __future__ import annotations

import pytest

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling import Sampler
from tests.support.oracle import TWO_LAYERS, tiny_config

L = 8


@pytest.fixture(scope="session")
def chatty() -> Sampler:
    """A model of random weights with canvases of 8 tokens, and a tokenizer with the Gemma 4 turn format."""
    from tests.support.asking import (
        chat_tokenizer,  # here, so that a machine without a server's packages collects GPU tests
    )

    model = init(tiny_config(L, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    return Sampler(model, chat_tokenizer(), Generation(max_steps=3, max_new_tokens=2 * L, eos_ids=(1,)))
