"""EAGLE3: heads of one layer that draft token by token from what some of a target's layers say of the text."""

from functools import partial

from blockdiff.models.eagle3 import config
from blockdiff.models.eagle3.model import Eagle3
from blockdiff.models.family import Capabilities, Family
from blockdiff.models.names import Names

MOST_LAYERS_READ = 16

TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("fc.weight", "fc.weight"),
    ("input_norm.weight", "input_norm.weight"),
    *((f"fc_norm.{n}.weight", f"fc_norm.{n}.weight") for n in range(MOST_LAYERS_READ)),
    ("norm.weight", "norm.weight"),
    ("table", "embed_tokens.weight"),
    ("head.table", "lm_head.weight"),
    ("d2t", "d2t"),
)
# `@` is the layer's name in files.
OF_LAYER: tuple[tuple[str, str], ...] = (
    ("layers.0.input_norm.weight", "@.input_layernorm.weight"),
    ("layers.0.hidden_norm.weight", "@.hidden_norm.weight"),
    ("layers.0.post_attention_norm.weight", "@.post_attention_layernorm.weight"),
    ("layers.0.attention.q_proj.weight", "@.self_attn.q_proj.weight"),
    ("layers.0.attention.k_proj.weight", "@.self_attn.k_proj.weight"),
    ("layers.0.attention.v_proj.weight", "@.self_attn.v_proj.weight"),
    ("layers.0.attention.o_proj.weight", "@.self_attn.o_proj.weight"),
    ("layers.0.attention.q_norm.weight", "@.self_attn.q_norm.weight"),
    ("layers.0.attention.k_norm.weight", "@.self_attn.k_norm.weight"),
    ("layers.0.mlp.gate_proj.weight", "@.mlp.gate_proj.weight"),
    ("layers.0.mlp.up_proj.weight", "@.mlp.up_proj.weight"),
    ("layers.0.mlp.down_proj.weight", "@.mlp.down_proj.weight"),
)


def _family(model_type: str, hub_type: str, architecture: str, layer: str) -> Family:
    return Family(
        model_type=model_type,
        hub_type=hub_type,
        architecture=architecture,
        model_class=Eagle3,
        names=Names(
            (*TABLE, *((ours, hub.replace("@", layer)) for ours, hub in OF_LAYER)),
            carried=("t2d",),
            optional=("embed_tokens.weight", "lm_head.weight", "d2t"),
        ),
        parts={
            "norms": ("*norm.weight", "fc_norm.*"),
            "features": ("fc.weight",),
            "attention": ("layers.*.attention.*",),
            "mlp": ("layers.*.mlp.*",),
            "vocabulary": ("table", "head.*", "d2t"),
        },
        adapted_parts=(),
        fp8_parts=("attention", "mlp"),
        is_written=False,
        sharding_units=("layers.{}",),
        capabilities=Capabilities(predictions=(), corruptions=(), meshes=()),
        read=partial(config.read, model_type=model_type),
        check=config.check,
        outline=config.outline,
        with_tokens=config.with_tokens,
    )


FAMILIES = (
    _family(config.LLAMA, "llama", config.ARCHITECTURE, "midlayer"),
    _family(config.SPECULATORS, config.SPECULATORS, "Eagle3DraftModel", "layers.0"),
)

__all__ = ["FAMILIES", "Eagle3"]
