"""The base of an adapter: the model that it was trained on, recorded by shape and by a digest of its weights.

Adapters written by blockdiff have this record in the metadata of their file. If PEFT alone wrote an adapter, its config
names the adapted modules, and each of them must have its tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.adapter_names import WEIGHTS, hub_module
from blockdiff.checkpoint.adapter_patterns import NamePatterns
from blockdiff.checkpoint.added import listed, tensor_shapes
from blockdiff.checkpoint.expert_adapters import expert_modules
from blockdiff.checkpoint.files import ADAPTER_CONFIG, fingerprint, metadata_in
from blockdiff.errors import CheckpointError
from blockdiff.models.image_side import IMAGE_SIDE
from blockdiff.models.model import BlockDiffusionModel

BASE = "base"  # key in the metadata of an adapter's file


def base_record(model: BlockDiffusionModel) -> str:
    """Return the JSON record of a model for its adapter's file: its shape and a digest of the weights it was read from.

    The digest is null if the model was not loaded from files or they are gone.
    """
    origin = getattr(model.carried, "origin", None)
    try:
        weights = None if origin is None else fingerprint(origin)
    except (CheckpointError, OSError):  # the files are gone since the model was loaded
        weights = None
    return json.dumps(_shape_record(model) | {"weights": weights}, sort_keys=True)


def require_base(directory: Path, model: BlockDiffusionModel) -> None:
    """Raise CheckpointError if the adapter in `directory` has a record of a model of another shape."""
    record = _base_of(directory)
    shape = _shape_record(model)
    if record and any(record.get(key) != value for key, value in shape.items()):
        raise CheckpointError(
            f"{directory}: was trained on another model ({_words(record)}) than this one ({_words(shape)}); "
            "name its own"
        )


def warn_of_other_weights(directory: Path, weights: Path) -> None:
    """Warn once if the adapter in `directory` was trained on other weights than `weights` has."""
    record = _base_of(directory).get("weights")
    if record is not None and record != fingerprint(weights):
        warnings.warn(
            f"{directory}: was trained on other weights than those of {weights}, of the same shape; "
            "what it answers is right only if they are the same model in another form",
            stacklevel=3,
        )


def require_every_target(
    config: Mapping[str, Any],
    parts: Collection[str],
    model: BlockDiffusionModel,
    directory: Path,
    patterns: NamePatterns,
) -> None:
    """Raise CheckpointError if the config of an adapter adapts modules for which its file has no tensors.

    parts: the adapter's tensors by our names.
    """
    of_model, without_tensors = model.config, []
    for ours, tensor in model.state_dict().items():
        module, _, leaf = ours.rpartition(".")
        if of_model.part_of(ours) not in of_model.adapted_parts:
            continue
        is_linear, prefix = leaf == "weight" and tensor.dim() == 2, ""
        if not is_linear:
            prefix = {"gate_up_proj": "gate_up_", "down_proj": "down_"}.get(leaf, "")
            if not prefix:
                continue
        hub = hub_module(f"{module}.x", model)
        whole = of_model.names.fused_of(hub) if is_linear else None
        hub = hub if whole is None else whole[0]
        copies = [name if is_linear else f"{name}.{leaf}" for name in of_model.names.copies(hub)]
        if not is_linear and (modules := expert_modules(ours, of_model.names)):
            is_linear, copies = True, [each.replace("[]", "0") for each in modules]
        is_adapted = f"{module}.{prefix}lora_A" in parts
        if not is_adapted and any(_is_target(config, name, is_linear, patterns) for name in copies):
            without_tensors.append(copies[0])
    if without_tensors:
        raise CheckpointError(
            f"{directory}: {ADAPTER_CONFIG} adapts {len(without_tensors)} modules of this model for which {WEIGHTS} "
            f"has no tensors ({listed(without_tensors)}); it is an adapter of another model, name that one"
        )


def _is_target(config: Mapping[str, Any], name: str, is_module: bool, patterns: NamePatterns) -> bool:
    """Return True if PEFT's `config` adapts the module or parameter `name` of transformers."""
    if not is_module:
        return _matches(config, "target_parameters", name, patterns)
    layers, number = config.get("layers_to_transform"), re.search(r"\.(\d+)\.", name)
    if layers is not None and number and int(number[1]) not in (layers if isinstance(layers, list) else [layers]):
        return False
    is_excluded = _matches(config, "exclude_modules", name, patterns)
    return not is_excluded and _matches(config, "target_modules", name, patterns)


def _matches(config: Mapping[str, Any], key: str, name: str, patterns: NamePatterns) -> bool:
    """Return True if the setting `key` matches `name` by PEFT's rule.

    A text is a regular expression for the whole name. A list has whole names or their last words.
    """
    words = config.get(key) or []
    if isinstance(words, str):
        return patterns.matches(key, words, name)
    return any(name == word or name.endswith("." + word) for word in words)


def _shape_record(model: BlockDiffusionModel) -> dict[str, Any]:
    shapes = sorted((name, size) for name, size in tensor_shapes(model).items() if not name.startswith(IMAGE_SIDE))
    return {
        "type": model.config.model_type,
        "layers": len(model.layers),
        "hidden": model.vocabulary.table.shape[1],
        "vocabulary": model.vocab_size,
        "tensors": hashlib.blake2b(json.dumps(shapes).encode(), digest_size=16).hexdigest(),
    }


def _words(shape: Mapping[str, Any]) -> str:
    sizes = f"{shape.get('layers')} layers, hidden {shape.get('hidden')}, {shape.get('vocabulary')} tokens"
    return f"{shape.get('type')}, {sizes}, tensors {str(shape.get('tensors'))[:6]}"


def _base_of(directory: Path) -> dict[str, Any]:
    """Return the record of the base in an adapter's file, {} if it has none. Raises CheckpointError."""
    file = directory / WEIGHTS
    try:
        record = json.loads(metadata_in(file).get(BASE, "{}")) if file.exists() else {}
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        raise CheckpointError(f"{file}: its metadata {BASE!r} is not readable; write the adapter again")
    return record
