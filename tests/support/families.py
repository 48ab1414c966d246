"""A small model of every family, for tests that all families pass: random weights, nothing at a neutral value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, MiniMaxM3VLConfig, Qwen3Config

import blockdiff
from blockdiff.checkpoint.config import config_from
from blockdiff.models.llada2 import LLaDA2Family
from blockdiff.models.minimax_m3 import MiniMaxM3Family, MiniMaxM3TextFamily
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.nemotron import NemotronFamily
from tests.support.oracle import TWO_LAYERS, tiny_config

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

# transformers' config of each family, as a causal model where there is one, and as a denoiser.
CONFIGS: dict[str, Callable[[], Any]] = {
    "diffusion_gemma": lambda: tiny_config(canvas_length=8, vocab_size=96, **TWO_LAYERS),
    "llama": lambda: LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama tied, denoising": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True, canvas_length=8),
    "llada2": lambda: llada2_config(),
    "minimax_m3": lambda: m3_config(),
    "minimax_m3 dense, denoising": lambda: m3_config(topk=99, canvas_length=8),
    "minimax_m3 denoising": lambda: m3_config(canvas_length=8),
    "minimax_m3 text, denoising": lambda: m3_text_config(canvas_length=8),
    "nemotron": lambda: nemotron_config(),
    "qwen3": lambda: Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3 sliding, blocks": lambda: Qwen3Config(**SMALL, **SLIDING, canvas_length=4, prefix="blocks"),
    "sdar": lambda: sdar_config(),
    "sdar_moe": lambda: sdar_config(
        model_type="sdar_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "a2d-qwen3": lambda: sdar_config(model_type="a2d-qwen3", tie_word_embeddings=True),
    "stable_diffcoder": lambda: LlamaConfig(**SMALL, architectures=["StableDiffcoderForCausalLM"]),
    "qwen3 sliding, denoising": lambda: Qwen3Config(**SMALL, **SLIDING, canvas_length=8),
}


def m3_config(topk: int = 2, canvas_length: int | None = None, **text: Any) -> MiniMaxM3VLConfig:
    """A tiny MiniMax M3: one dense layer, two sparse ones with experts."""
    sparse = dict(
        sparse_num_index_heads=2,
        sparse_index_dim=16,
        sparse_block_size=4,
        sparse_topk_blocks=topk,
        sparse_local_block=1,
        sparse_attention_freq=[0, 1, 1],
    )
    values: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        dense_intermediate_size=48,
        shared_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        moe_layer_freq=[0, 1, 1],
        sparse_attention_config=sparse,
    )
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14
    )
    whole: dict[str, Any] = dict(projector_hidden_size=16, image_token_index=92, video_token_index=93)
    whole |= {} if canvas_length is None else {"canvas_length": canvas_length}
    return MiniMaxM3Family.as_transformers({"text_config": values | text, "vision_config": vision, **whole})


def llada2_config(**more: Any) -> LLaDA2Family:
    """A tiny LLaDA2: one dense layer, two with experts in four groups."""
    values = dict(
        **SMALL,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        partial_rotary_factor=0.5,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        use_bias=False,
        canvas_length=8,
        mask_token_id=3,
    )
    return LLaDA2Family.read({"model_type": "llada2_moe", **values, **more})


def sdar_config(**more: Any) -> Any:
    """A tiny SDAR with blocks of 4 tokens."""
    return config_from({"model_type": "sdar", **SMALL, "block_size": 4, "mask_token_id": 3, **more}, "here")


def nemotron_config(**more: Any) -> NemotronFamily:
    """A tiny Nemotron-Labs-Diffusion, whose queries are scaled from position 12 on."""
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.2)
    rope = {**yarn, "original_max_position_embeddings": 12}
    values = {"block_size": 8, "mask_token_id": 95, "rope_parameters": rope, **SMALL}
    return NemotronFamily.read({"model_type": "nemotron_labs_diffusion", **values, **more})


def m3_text_config(**more: Any) -> Any:
    """The text side of `m3_config` alone, as transformers has it."""
    return MiniMaxM3TextFamily.as_transformers(m3_config().text_config.to_dict() | more)


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
