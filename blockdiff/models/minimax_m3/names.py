"""The names of MiniMax M3's tensors on the Hub (MiniMaxAI/MiniMax-M3), and in files of the text side alone."""

from __future__ import annotations

from blockdiff.models.names import Names

# `{}` is the layer number. A layer has a dense MLP, `mlp`, or a router, experts and a shared expert, `shared`.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("vocabulary.table", "language_model.model.embed_tokens.weight"),
    ("vocabulary.head", "language_model.lm_head.weight"),
    ("norm.weight", "language_model.model.norm.weight"),
    ("layers.{}.input_norm.weight", "language_model.model.layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "language_model.model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attention.q_proj.weight", "language_model.model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.k_proj.weight", "language_model.model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.v_proj.weight", "language_model.model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.o_proj.weight", "language_model.model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "language_model.model.layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "language_model.model.layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.attention.indexer.q_proj.weight", "language_model.model.layers.{}.self_attn.index_q_proj.weight"),
    ("layers.{}.attention.indexer.k_proj.weight", "language_model.model.layers.{}.self_attn.index_k_proj.weight"),
    ("layers.{}.attention.indexer.q_norm.weight", "language_model.model.layers.{}.self_attn.index_q_norm.weight"),
    ("layers.{}.attention.indexer.k_norm.weight", "language_model.model.layers.{}.self_attn.index_k_norm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "language_model.model.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "language_model.model.layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "language_model.model.layers.{}.mlp.down_proj.weight"),
    ("layers.{}.shared.gate_proj.weight",
     "language_model.model.layers.{}.block_sparse_moe.shared_experts.gate_proj.weight"),
    ("layers.{}.shared.up_proj.weight",
     "language_model.model.layers.{}.block_sparse_moe.shared_experts.up_proj.weight"),
    ("layers.{}.shared.down_proj.weight",
     "language_model.model.layers.{}.block_sparse_moe.shared_experts.down_proj.weight"),
    ("layers.{}.router.proj.weight", "language_model.model.layers.{}.block_sparse_moe.gate.weight"),
    ("layers.{}.router.bias", "language_model.model.layers.{}.block_sparse_moe.e_score_correction_bias"),
    ("layers.{}.experts.gate_up_proj", "language_model.model.layers.{}.block_sparse_moe.experts.gate_up_proj"),
    ("layers.{}.experts.down_proj", "language_model.model.layers.{}.block_sparse_moe.experts.down_proj"),
)  # fmt: skip

# The beginnings of the names of image tensors: ours, which continue as in transformers, and the Hub's.
IMAGES = (
    ("image_side.vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
    ("image_side.vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
    ("image_side.vision_tower.pre_layrnorm.", "vision_tower.vision_model.pre_layrnorm."),
    ("image_side.multi_modal_projector.linear_", "multi_modal_projector.linear_"),
    ("image_side.multi_modal_projector.merge_linear_", "patch_merge_mlp.linear_"),
)

NAMES = Names(
    TABLE,
    images=IMAGES,
    carried=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "language_model.model.mtp.", "mtp."),
    ties=(("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),),
    # files have the matrices of each expert separately; `[]` is the expert's number
    pieces=(
        ("experts.gate_up_proj", ("experts.[].w1.weight", "experts.[].w3.weight")),
        ("experts.down_proj", ("experts.[].w2.weight",)),
    ),
    modules=(
        ("language_model.model.", "model.language_model."),
        (".block_sparse_moe.experts", ".mlp.experts"),
        (".block_sparse_moe.shared_experts", ".mlp.shared_experts"),
        ("vision_tower.vision_model.encoder.layers.", "model.vision_tower.layers."),
        ("patch_merge_mlp.linear_", "model.multi_modal_projector.merge_linear_"),
        ("multi_modal_projector.linear_", "model.multi_modal_projector.linear_"),
    ),
    fused=(("gate_up_proj", ("gate_proj", "up_proj")),),
)

# The text side alone, under the names of transformers' modules: experts are stacked, gate and up are one matrix.
_TO_TEXT = (
    ("language_model.", ""),
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    (".self_attn.index_", ".self_attn.indexer."),
)


def _in_text(hub: str) -> str:
    for of_hub, of_module in _TO_TEXT:
        hub = hub.replace(of_hub, of_module)
    return hub


TEXT_NAMES = Names(
    tuple((ours, _in_text(hub)) for ours, hub in TABLE),
    ties=(("lm_head.weight", "model.embed_tokens.weight"),),
    fused=NAMES.fused,
    files_are_fused=True,
)
