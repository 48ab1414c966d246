"""Small drafters beside targets of any family, and the same weights as transformers and the oracle have them."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import blockdiff
from blockdiff.models.dflash import DFlashFamily
from blockdiff.models.dflash.model import DFlash
from blockdiff.models.drafted import Drafted
from blockdiff.models.model import BlockDiffusionModel
from tests.support.oracle import our_config


def drafter_values(target: Any, rng: random.Random | None = None, **more: Any) -> dict[str, Any]:
    """The content of a config.json of a drafter for a target of this config; with `rng` one of many."""
    rng, text = rng or random.Random(0), our_config(target)
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
    drafter = blockdiff.init(DFlashFamily.read(values), dtype=target.dtype, device="cpu", kernels="torch")
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
    return {str(model.config.names.to_hub(name)): x for name, x in model.state_dict().items()}


def head_values(target: Any, rng: random.Random | None = None, **more: Any) -> dict[str, Any]:
    """The content of a config.json of an EAGLE3 head for a target of this config; with `rng` one of many."""
    rng, text = rng or random.Random(0), our_config(target)
    heads, depth = rng.choice([2, 4]), text.num_hidden_layers
    of_layer = {
        "model_type": rng.choice(["llama", "qwen3"]),
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads]),
        "head_dim": rng.choice([6, 16]),
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_theta": rng.choice([1e4, 5e5]),
        "max_position_embeddings": 16,
    }
    norms = rng.choice([{}, {"norm_before_fc": True}, {"fc_norm": True}])
    lowest = min(2, depth - 1)
    own = norms | {
        "norm_before_residual": rng.random() < 0.5,
        "norm_output": rng.random() < 0.5,
        "draft_vocab_size": rng.choice([text.vocab_size, text.vocab_size // 2]),
        "eagle_aux_hidden_state_layer_ids": [
            rng.randint(lowest, depth - 1),
            *(rng.randint(1, depth - 1) for _ in range(2)),
        ],
    }
    if rng.random() < 0.5 and lowest == 2:
        of_layer["model_type"] = "llama"
        return of_layer | own | {"architectures": ["LlamaForCausalLMEagle3"]} | more
    speculators = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    return {"transformer_layer_config": of_layer, **own, **speculators} | more


def head_weights(values: dict[str, Any], seed: int = 0, embeds: bool = True) -> dict[str, Tensor]:
    """Random weights of an EAGLE3 head by the names of its files; embeds: whether it has embeddings."""
    layer = values.get("transformer_layer_config", values)
    hidden, inner, d = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    heads, kv_heads, vocab = layer["num_attention_heads"], layer["num_key_value_heads"], layer["vocab_size"]
    drafts, read = values["draft_vocab_size"], len(values["eagle_aux_hidden_state_layer_ids"])
    at = "layers.0." if "transformer_layer_config" in values else "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, read * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafts, hidden),
        f"{at}self_attn.q_proj.weight": (heads * d, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (kv_heads * d, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (kv_heads * d, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, heads * d),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
    }
    shapes |= {
        f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    shapes |= {"embed_tokens.weight": (vocab, hidden)} if embeds else {}
    if layer["model_type"] == "qwen3":
        shapes |= {f"{at}self_attn.{name}_norm.weight": (d,) for name in "qk"}
    if values.get("norm_before_fc"):
        shapes["input_norm.weight"] = (read * hidden,)
    if values.get("fc_norm"):
        shapes |= {f"fc_norm.{n}.weight": (hidden,) for n in range(read)}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        weights[name] = uniform * 0.8 + 0.6 if len(shape) == 1 else uniform - 0.5
    if drafts < vocab:
        tokens = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        weights["d2t"] = tokens - torch.arange(drafts)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def head_for(target: BlockDiffusionModel, values: dict[str, Any], weights: dict[str, Tensor]) -> Drafted:
    """A target with the head of this config and these weights, which is read from its files."""
    with tempfile.TemporaryDirectory() as directory:
        head = blockdiff.load(write_head(Path(directory), values, weights), device="cpu", kernels="torch")
    return Drafted(target, head).eval()


def write_head(directory: Path, values: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """The directory of a head, with its files in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(weights, directory / "model.safetensors")
    return directory
