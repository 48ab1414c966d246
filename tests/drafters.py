"""Small drafters beside targets of any family, and the same weights as transformers and the oracle have them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import blockdiff
from blockdiff.models.dflash.config import read
from blockdiff.models.dflash.model import DFlash
from blockdiff.models.drafted import Drafted
from blockdiff.models.family import BlockDiffusionModel, family_of


def drafter_values(target: Any, rng: random.Random | None = None, **more: Any) -> dict[str, Any]:
    """The content of a config.json of a drafter for a target of this config; with `rng` one of many."""
    rng, text = rng or random.Random(0), target.get_text_config()
    layers, depth, heads = rng.randint(1, 3), text.num_hidden_layers, rng.choice([2, 4])
    own = {"mask_token_id": 5, "target_layer_ids": [rng.randrange(depth - 1) for _ in range(rng.randint(1, 3))]}
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    (own if rng.random() < 0.5 else more)["block_size"] = rng.randint(2, 6)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "head_dim": rng.choice([6, 16]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_theta": rng.choice([1e4, 5e5]),
        "layer_types": kinds,
        "use_sliding_window": True,
        "sliding_window": rng.randint(1, 7),
        "num_target_layers": depth,
        "dflash_config": own,
        **({"is_causal": rng.choice([True, False])} if rng.random() < 0.5 else {}),
    } | more


def drafter_for(target: BlockDiffusionModel, values: dict[str, Any], seed: int = 0) -> DFlash:
    """A drafter with random weights, nothing at a neutral value, that drafts for the target."""
    drafter = blockdiff.init(read(values), dtype=target.dtype, device="cpu", kernels="torch")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in drafter.state_dict().values():
            uniform = torch.rand(x.shape, generator=generator)
            x.copy_(uniform * 0.8 + 0.6 if x.dim() == 1 else uniform - 0.5)
    assert isinstance(drafter, DFlash)
    drafter.carried = None
    return drafter


def drafted(target: BlockDiffusionModel, rng: random.Random | None = None, **more: Any) -> Drafted:
    """A target with a drafter of its own."""
    return Drafted(target, drafter_for(target, drafter_values(target.config, rng, **more))).eval()


def hub_weights(model: BlockDiffusionModel) -> dict[str, Tensor]:
    """The weights of a model by the names of its files."""
    return {str(family_of(model.config).names.to_hub(name)): x for name, x in model.state_dict().items()}
