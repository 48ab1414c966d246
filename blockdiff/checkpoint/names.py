"""What each of our tensors is called on the Hub: one literal table per family."""

from __future__ import annotations

import re
from collections.abc import Iterable

# `{}` is the layer number. The encoder and the decoder share every weight; only the layer scalars differ.
DIFFUSION_GEMMA: tuple[tuple[str, str], ...] = (
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

_TO_HUB = dict(DIFFUSION_GEMMA)
_LAYER = re.compile(r"^layers\.(\d+)\.")
_ENCODER = "model.encoder.language_model."
_DECODER = "model.decoder."
_CARRIED = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


def to_hub(ours: str) -> str:
    """The Hub's name of one of our parameters or buffers; KeyError when the table has no such row."""
    layer = _LAYER.match(ours)
    if layer is None:
        return _TO_HUB[ours]
    return _TO_HUB[f"layers.{{}}.{ours[layer.end() :]}"].format(layer[1])


def hub_to_ours(names: Iterable[str]) -> dict[str, str]:
    """Hub name -> our name, for all of our `names`."""
    return {to_hub(name): name for name in names}


def is_carried(hub: str) -> bool:
    """True for tensors of the image side, which we keep and write back but do not run."""
    return hub.startswith(_CARRIED)


def tie_of(hub: str) -> str | None:
    """The tensor that `hub` is a tied copy of, None if it is none. Some writers save both ends of a tie."""
    if hub == "lm_head.weight":
        return _DECODER + "embed_tokens.weight"
    if hub.startswith(_ENCODER) and not hub.endswith(".layer_scalar"):
        return _DECODER + hub.removeprefix(_ENCODER)
    return None
