"""The oracle of the tests: transformers' DiffusionGemma on tiny random configs with non-trivial scales."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from blockdiff.checkpoint.config import config_from
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.family import Family

TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def tiny_config(canvas_length: int = 16, **text: Any) -> DiffusionGemmaConfig:
    """A config small enough for fp64 tests, with both layer kinds, windows, experts and partial RoPE."""
    values: dict[str, Any] = dict(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        sliding_window=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
        use_bidirectional_attention="vision",
    )
    values.update(text)
    vision = dict(
        model_type="gemma4_vision",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
    )
    ids = dict(image_token_id=380, boi_token_id=381, eoi_token_id=382)
    return DiffusionGemmaConfig(text_config=values, vision_config=vision, canvas_length=canvas_length, **ids)


def our_config(config: Any) -> Family:
    """Our config of the same content as transformers' config; ours as it is."""
    return config if isinstance(config, Family) else config_from(config.to_dict(), "here")


def oracle(
    config: DiffusionGemmaConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model, every norm, scalar and scale away from 1 and the router with wide margins."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(config or tiny_config()).eval()
    generator = torch.Generator().manual_seed(seed + 1)

    def spread(x: torch.Tensor, low: float, high: float) -> None:
        x.copy_(torch.rand(x.shape, generator=generator) * (high - low) + low)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "vision" in name:
                continue
            if "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                spread(p, 0.6, 1.4)
            elif name.endswith("router.proj.weight"):
                p.copy_(torch.randn(p.shape, generator=generator) * 2.0)
            else:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if "embed" in name else 0.12))
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                spread(b, 0.7, 1.2)
    # a cast by .to() would round the RoPE frequencies of a half-precision model: casting up is safe
    model = model.to(dtype)
    model.set_experts_implementation("eager")
    return model


def ours(model: DiffusionGemmaForBlockDiffusion) -> DiffusionGemma:
    """Our model with the oracle's weights, mapped by the checkpoint's name table."""
    from blockdiff.models.diffusion_gemma.names import NAMES

    state = model.state_dict()
    result = DiffusionGemma(our_config(model.config), kernels="torch").to(model.dtype)
    result.load_state_dict({name: state[NAMES.to_hub(name)] for name in result.state_dict()})
    return result.eval()


def widen_routers(model: DiffusionGemma) -> None:
    """Give a fresh model's routers wide margins: rounding alone must not choose other experts."""
    with torch.no_grad():
        for layer in model.layers:
            layer.router.proj.weight.mul_(100.0)
