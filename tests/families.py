"""A small model of every family, for tests that all families pass: random weights, nothing at a neutral value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

import blockdiff
from blockdiff.models.family import BlockDiffusionModel
from tests.oracle import tiny_config

SMALL: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
SLIDING = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)

# A config of each family, as a causal model where there is one, and as a denoiser.
CONFIGS: dict[str, Callable[[], Any]] = {
    "diffusion_gemma": lambda: tiny_config(canvas_length=8, vocab_size=96),
    "llama": lambda: LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama tied, denoising": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True, canvas_length=8),
    "qwen3": lambda: Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3 sliding, denoising": lambda: Qwen3Config(**SMALL, **SLIDING, canvas_length=8),
}


def small_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> BlockDiffusionModel:
    """The model of one of CONFIGS, in which every tensor counts: norms and scalars away from 1, wide routers."""
    model = blockdiff.init(CONFIGS[name](), seed=seed, dtype=dtype, device="cpu", kernels="torch")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, x in model.state_dict().items():
            if x.dim() == 1 or key.endswith("scale"):
                x += torch.rand(x.shape, generator=generator) * 0.6 - 0.3
            else:
                wide = 2.0 if "router" in key else 0.3 if "vocabulary" in key else 0.15
                x.copy_(torch.randn(x.shape, generator=generator) * wide)
    model.carried = None
    return model
