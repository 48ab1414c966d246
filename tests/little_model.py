"""The preset of a model so small that a test can train it from a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LITTLE: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "canvas_length": 9,
    "text_config": {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "position_embedding_size": 8,
        "patch_size": 4,
    },
}


def save_preset(path: Path, preset: dict[str, Any]) -> None:
    """Write a preset file."""
    path.write_text(json.dumps(preset), encoding="utf-8")
