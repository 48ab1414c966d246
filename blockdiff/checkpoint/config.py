"""Read a model's config from a checkpoint, or from a preset, and fit it to a tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.files import ADAPTER_CONFIG, CONFIG, DIFFUSION, MODELOPT_CONFIG, find, read_json
from blockdiff.checkpoint.tokenizer import rows_needed
from blockdiff.errors import CheckpointError
from blockdiff.models.family import Family, families, family_of

HUB_ID = "hub_id"  # a key of presets that configs do not have
QUANTIZATION = "quantization_config"  # the key in config.json that describes weights in fewer bits


def read_config(path_or_hub_id: str | Path, canvas_length: int | None = None) -> Family:
    """Return the config of a checkpoint directory or hub id, without reading weights. Raises CheckpointError.

    canvas_length: the tokens of a canvas for a config.json that leaves them out (None: the number in blockdiff.json).
    """
    file = find(path_or_hub_id, with_weights=False) / CONFIG
    if not file.exists() and (beside := file.with_name(ADAPTER_CONFIG)).is_file():
        base = read_json(beside).get("base_model_name_or_path")
        raise CheckpointError(f"{file.parent}: holds an adapter of {base}; name that model, or merge both: `export`")
    values = read_json(file)
    if QUANTIZATION not in values and (beside := file.with_name(MODELOPT_CONFIG)).is_file():
        values[QUANTIZATION] = words_of_modelopt(read_json(beside))
    if canvas_length is None and (beside := file.with_name(DIFFUSION)).is_file():
        canvas_length = read_json(beside).get("canvas_length")
    return config_from(values if canvas_length is None else _with_length(values, canvas_length, file), file)


def _with_length(values: dict[str, Any], canvas_length: int, origin: Path) -> dict[str, Any]:
    """Return the content of a config.json with the canvas length that it leaves out; CheckpointError if it has one."""
    key = next((family.length_key for family in families().values() if family.is_of(values)), None)
    if key is None:
        raise CheckpointError(f"{origin}: no other canvas_length can be given for this model; leave it out")
    if values.get(key) not in (None, canvas_length):
        raise CheckpointError(f"{origin}: {key} is {values[key]}; leave canvas_length ({canvas_length}) out")
    return values | {key: canvas_length}


def words_of_modelopt(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the content of a hf_quant_config.json to a `quantization_config` of config.json."""
    section: Any = content.get("quantization")
    section = dict(section) if isinstance(section, Mapping) else {}
    return {"quant_method": "modelopt", "ignore": section.pop("exclude_modules", []), **section}


def config_from(values: Mapping[str, Any], origin: str | Path, is_partial: bool = False) -> Family:
    """Build a config from the content of a config.json. Raises CheckpointError, naming `origin`, if it is not valid.

    is_partial: the content is a preset, which has only what differs from the defaults.
    """
    try:
        family = family_of(values)
        return family.read(family.completed(values) if is_partial else values)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from None
    except Exception as error:  # the config class validates itself and raises whatever its validators raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise CheckpointError(f"{origin}: not a valid config ({reason:.300})") from error


def presets() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in _preset_directory().glob("*.json"))


def preset_config(preset: str | Path) -> Family:
    """Return the config of a preset, given by name or by file; CheckpointError if there is none or it is not valid.

    The file is a config.json with only what differs from the defaults. Its `hub_id` names the released model of this
    shape.
    """
    file = Path(preset)
    if file.suffix != ".json":
        file = _preset_directory() / f"{preset}.json"
        if str(preset) not in presets():
            near = difflib.get_close_matches(str(preset), presets(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise CheckpointError(f"no preset {str(preset)!r}{hint} (there are {', '.join(presets())})")
    elif not file.is_file():
        raise CheckpointError(f"{file}: no such preset file")
    return config_from({key: value for key, value in read_json(file).items() if key != HUB_ID}, file, is_partial=True)


def released_preset(hub_id: str) -> str | None:
    """Return the name of the preset with the shape of the released model `hub_id`; None if there is none."""
    directory = _preset_directory()
    return next((name for name in presets() if read_json(directory / f"{name}.json").get(HUB_ID) == hub_id), None)


def fitted(config: Family, tokenizer: Any) -> Family:
    """Return `config` with a tokenizer's vocabulary size, special tokens (None if it has none) and image tokens.

    If the config has a mask token and the tokenizer has none, the mask gets an additional row, which no text has.
    """
    keys = ["bos_token_id", "eos_token_id", "pad_token_id", *["mask_token_id"] * (config.mask is not None)]
    special = {key: getattr(tokenizer, key, None) for key in keys}
    rows = rows_needed(tokenizer)
    if special.get("mask_token_id", rows) is None:
        special["mask_token_id"], rows = rows, rows + 1
    return config.with_tokens(rows, special, tokenizer.get_vocab())


def _preset_directory() -> Path:
    """Return the directory recipes/presets: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "recipes" / "presets", package.parent / "recipes" / "presets"]
    return next((directory for directory in places if directory.is_dir()), places[0])
