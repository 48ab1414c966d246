"""The names of LLaDA2.x's tensors on the Hub (inclusionAI/LLaDA2.0-mini)."""

from __future__ import annotations

from blockdiff.models.names import Names

# `{}` is the layer number. A layer has a dense MLP or experts; on the Hub both are in its `mlp`.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("vocabulary.table", "model.word_embeddings.weight"),
    ("vocabulary.head", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("layers.{}.input_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attention.qkv_proj.weight", "model.layers.{}.attention.query_key_value.weight"),
    ("layers.{}.attention.o_proj.weight", "model.layers.{}.attention.dense.weight"),
    ("layers.{}.attention.q_norm.weight", "model.layers.{}.attention.query_layernorm.weight"),
    ("layers.{}.attention.k_norm.weight", "model.layers.{}.attention.key_layernorm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "model.layers.{}.mlp.down_proj.weight"),
    ("layers.{}.shared.gate_proj.weight", "model.layers.{}.mlp.shared_experts.gate_proj.weight"),
    ("layers.{}.shared.up_proj.weight", "model.layers.{}.mlp.shared_experts.up_proj.weight"),
    ("layers.{}.shared.down_proj.weight", "model.layers.{}.mlp.shared_experts.down_proj.weight"),
    ("layers.{}.router.proj.weight", "model.layers.{}.mlp.gate.weight"),
    ("layers.{}.router.bias", "model.layers.{}.mlp.gate.expert_bias"),
    ("layers.{}.experts.gate_up_proj", "model.layers.{}.mlp.experts.gate_up_proj"),
    ("layers.{}.experts.down_proj", "model.layers.{}.mlp.experts.down_proj"),
)

NAMES = Names(
    TABLE,
    ties=(("lm_head.weight", "model.word_embeddings.weight"),),
    # files have the matrices of each expert separately; `[]` is the expert's number
    pieces=(
        ("experts.gate_up_proj", ("experts.[].gate_proj.weight", "experts.[].up_proj.weight")),
        ("experts.down_proj", ("experts.[].down_proj.weight",)),
    ),
    experts_apart=True,
)
