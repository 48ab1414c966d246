"""The names of DiffusionGemma's tensors on the Hub."""

from __future__ import annotations

from blockdiff.models.names import Names

# `{}` is the layer number. The encoder and the decoder share every weight; only the layer scalars differ.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("vocabulary.table", "model.decoder.embed_tokens.weight"),
    ("norm.weight", "model.decoder.norm.weight"),
    ("self_conditioning.pre_norm.weight", "model.decoder.self_conditioning.pre_norm.weight"),
    ("self_conditioning.gate_proj.weight", "model.decoder.self_conditioning.gate_proj.weight"),
    ("self_conditioning.up_proj.weight", "model.decoder.self_conditioning.up_proj.weight"),
    ("self_conditioning.down_proj.weight", "model.decoder.self_conditioning.down_proj.weight"),
    ("layers.{}.input_norm.weight", "model.decoder.layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "model.decoder.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.pre_mlp_norm.weight", "model.decoder.layers.{}.pre_feedforward_layernorm.weight"),
    ("layers.{}.post_mlp_norm.weight", "model.decoder.layers.{}.post_feedforward_layernorm_1.weight"),
    ("layers.{}.pre_experts_norm.weight", "model.decoder.layers.{}.pre_feedforward_layernorm_2.weight"),
    ("layers.{}.post_experts_norm.weight", "model.decoder.layers.{}.post_feedforward_layernorm_2.weight"),
    ("layers.{}.post_ff_norm.weight", "model.decoder.layers.{}.post_feedforward_layernorm.weight"),
    ("layers.{}.attention.q_proj.weight", "model.decoder.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.k_proj.weight", "model.decoder.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.v_proj.weight", "model.decoder.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.o_proj.weight", "model.decoder.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "model.decoder.layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "model.decoder.layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "model.decoder.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "model.decoder.layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "model.decoder.layers.{}.mlp.down_proj.weight"),
    ("layers.{}.router.proj.weight", "model.decoder.layers.{}.router.proj.weight"),
    ("layers.{}.router.scale", "model.decoder.layers.{}.router.scale"),
    ("layers.{}.router.per_expert_scale", "model.decoder.layers.{}.router.per_expert_scale"),
    ("layers.{}.experts.gate_up_proj", "model.decoder.layers.{}.experts.gate_up_proj"),
    ("layers.{}.experts.down_proj", "model.decoder.layers.{}.experts.down_proj"),
    ("layers.{}.decoder_scalar", "model.decoder.layers.{}.layer_scalar"),
    ("layers.{}.encoder_scalar", "model.encoder.language_model.layers.{}.layer_scalar"),
)

NAMES = Names(
    TABLE,
    images=(
        ("image_side.vision_tower.", "model.encoder.vision_tower."),
        ("image_side.embed_vision.", "model.encoder.embed_vision."),
    ),
    carried=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
    ties=(
        ("lm_head.weight", "model.decoder.embed_tokens.weight"),
        ("model.encoder.language_model.", "model.decoder."),
    ),
    twice=(
        ("model.decoder.layers.", "model.encoder.language_model.layers."),
        ("model.decoder.embed_tokens", "model.encoder.language_model.embed_tokens"),
    ),
    quantised_pieces=(
        (".experts.gate_up_proj", (".experts.[].gate_proj.weight", ".experts.[].up_proj.weight")),
        (".experts.down_proj", (".experts.[].down_proj.weight",)),
    ),
    respelt=((".moe.experts.", ".experts."),),  # vLLM's name of the module, in some files in NVFP4
)
