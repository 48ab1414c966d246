"""The backbone against transformers: logits, caches, gradients, and what a canvas may see."""

from __future__ import annotations

import pytest
import torch
from oracle import oracle, ours, tiny_config
from transformers import DiffusionGemmaForBlockDiffusion

from blockdiff.models.diffusion_gemma import DiffusionGemma

L = 16


@pytest.fixture(scope="module")
def pair() -> tuple[DiffusionGemmaForBlockDiffusion, DiffusionGemma]:
    model = oracle()
    return model, ours(model)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 380, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-8) -> None:
    assert a.shape == b.shape
    error = float((a - b).norm() / b.norm())
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 40])
def test_logits_of_both_passes_match_transformers(pair, length):
    model, mine = pair
    prompt, canvas = tokens(2, length), tokens(2, L, seed=1)
    with torch.no_grad():
        truth = model(input_ids=prompt, decoder_input_ids=canvas)
        prefix = mine.encode(prompt)
        hidden = mine.denoise(canvas, prefix)
    close(prefix.hidden, truth.encoder_last_hidden_state)
    close(mine.unembed(hidden), truth.logits, 1e-6)  # logits are fp32 by definition
    close(hidden, _decoder_hidden(model, prompt, canvas))


def _decoder_hidden(model, prompt, canvas, **signal):
    with torch.no_grad():
        return model.model(input_ids=prompt, decoder_input_ids=canvas, **signal).last_hidden_state
