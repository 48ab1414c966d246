"""A model's config: read from a checkpoint, or from a preset and fitted to a tokenizer."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, DiffusionGemmaConfig, PreTrainedConfig

from blockdiff.checkpoint.files import CONFIG, find, first_line, read_json
from blockdiff.errors import CheckpointError


def read_config(path_or_hub_id: str | Path) -> DiffusionGemmaConfig:
    """The config of a checkpoint directory or hub id; reads no weights. Raises CheckpointError."""
    file = find(path_or_hub_id, with_weights=False) / CONFIG
    return config_from(read_json(file), file)


def config_from(data: Mapping[str, Any], origin: str | Path) -> DiffusionGemmaConfig:
    """A config from the content of a config.json (both forms of the global-head fields) or of a preset.

    Raises CheckpointError, naming `origin`, for another model type or values that cannot be.
    """
    model_type = data.get("model_type")
    if model_type != DiffusionGemmaConfig.model_type:
        expected = DiffusionGemmaConfig.model_type
        raise CheckpointError(f"{origin}: model_type is {model_type!r}; blockdiff reads {expected!r}")
    if not isinstance(data.get("text_config"), Mapping):
        raise CheckpointError(f"{origin}: no text_config")
    try:
        values = json.loads(json.dumps(data))
        if values.get("vision_config"):
            values["vision_config"] = _image_config(values["vision_config"])
        config = DiffusionGemmaConfig(**values)  # `from_dict` would also write it out, for a log that nobody reads
    except Exception as error:  # the config class validates itself and raises whatever its validators raise
        raise CheckpointError(f"{origin}: not a valid config ({first_line(error)})") from error
    if not config.tie_word_embeddings:
        raise CheckpointError(f"{origin}: tie_word_embeddings is false; only tied weights are supported")
    return config


def _image_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The image side's config, which is carried like its tensors: only writing it looks up its class.

    That class imports transformers' generation and torch's compiler, a second that sampling has no use for.
    """

    class ImageConfig(PreTrainedConfig):
        model_type = values.get("model_type", "gemma4_vision")

        def to_dict(self) -> dict[str, Any]:
            return AutoConfig.for_model(**super().to_dict()).to_dict()

    return ImageConfig(**values)


def presets() -> list[str]:
    """The names of all presets."""
    return sorted(file.stem for file in _preset_directory().glob("*.json"))


def preset_config(preset: str | Path) -> DiffusionGemmaConfig:
    """The config of a preset, by name or by file: a config.json with only what differs from the defaults.

    Raises CheckpointError for one that is not there or not valid.
    """
    file = Path(preset)
    if file.suffix != ".json":
        file = _preset_directory() / f"{preset}.json"
        if str(preset) not in presets():
            near = difflib.get_close_matches(str(preset), presets(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise CheckpointError(f"no preset {str(preset)!r}; {hint}There are: {', '.join(presets())}")
    elif not file.is_file():
        raise CheckpointError(f"{file}: no such preset file")
    return config_from(read_json(file), file)


def fitted(config: DiffusionGemmaConfig, tokenizer: Any) -> DiffusionGemmaConfig:
    """`config` with the vocabulary size and special tokens of `tokenizer`, None where it has none."""
    data = config.to_dict()
    data["text_config"]["vocab_size"] = len(tokenizer)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        data["text_config"][key] = getattr(tokenizer, key, None)
    return config_from(data, "preset")


def _preset_directory() -> Path:
    """recipes/presets: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "recipes" / "presets", package.parent / "recipes" / "presets"]
    return next((place for place in places if place.is_dir()), places[0])
