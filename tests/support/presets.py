"""The presets of the package with other values."""

from __future__ import annotations

from typing import Any

from blockdiff.checkpoint import preset_config
from blockdiff.models.diffusion_gemma import DiffusionGemmaFamily

# The vision tower never runs here, but transformers builds one.
NO_VISION = dict(
    model_type="gemma4_vision",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    position_embedding_size=16,
    patch_size=4,
)


def changed_preset(preset: str, text: dict[str, Any]) -> DiffusionGemmaFamily:
    """A preset's config whose text model has other values, with an image side that takes no memory."""
    values = preset_config(preset).to_dict()
    values["text_config"].update(text)
    if "num_hidden_layers" in text:
        values["text_config"].pop("per_layer_config", None)
        values["text_config"].update(_heads_of_full_layers(preset))
    values["vision_config"] = dict(NO_VISION)
    return DiffusionGemmaFamily.read(values)


def _heads_of_full_layers(preset: str) -> dict[str, Any]:
    """The global-head fields of a preset's last layer, as transformers takes them for fewer layers."""
    config = preset_config(preset)
    assert isinstance(config, DiffusionGemmaFamily)
    last = config.heads[-1]
    return dict(global_head_dim=last.head_dim, num_global_key_value_heads=last.num_key_value_heads)
