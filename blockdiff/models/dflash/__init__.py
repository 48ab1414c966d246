"""DFlash: drafters, block-diffusion models of one step that read what a causal model's layers say of the context."""

from blockdiff.models.dflash import config
from blockdiff.models.dflash.model import DFlash
from blockdiff.models.family import Capabilities, Family
from blockdiff.models.names import Names

# `{}` is the layer number.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("fc.weight", "fc.weight"),
    ("hidden_norm.weight", "hidden_norm.weight"),
    ("norm.weight", "norm.weight"),
    ("layers.{}.input_norm.weight", "layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attention.q_proj.weight", "layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.k_proj.weight", "layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.v_proj.weight", "layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.o_proj.weight", "layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "layers.{}.mlp.down_proj.weight"),
)

FAMILY = Family(
    model_type=config.MODEL_TYPE,
    hub_type="qwen3",
    architecture=config.ARCHITECTURE,
    model_class=DFlash,
    names=Names(TABLE),
    parts={
        "norms": ("*norm.weight",),
        "features": ("fc.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
    },
    adapted_parts=(),
    fp8_parts=("attention", "mlp"),
    sharding_units=("layers.{}",),
    capabilities=Capabilities(
        predictions=("posterior",),
        corruptions=("mask",),
        meshes=("replicate", "shard"),
    ),
    read=config.read,
    check=config.check,
    outline=config.outline,
    with_tokens=config.with_tokens,
    for_target=config.for_target,
)

__all__ = ["FAMILY", "DFlash"]
