"""Weights of fewer bits in checkpoints: which layers of a model have them, and how config.json says it.

The form of fp8 is that of compressed-tensors, `float-quantized` with a scale for each output channel: a tensor X in
e4m3 has X_scale [out, 1], and experts are matrices of their own. That is what vLLM reads.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockdiff.checkpoint.adapter_names import WEIGHTS as ADAPTER_WEIGHTS
from blockdiff.checkpoint.assembled import Assembled, assembled, stored_apart
from blockdiff.checkpoint.digests import has_digests
from blockdiff.checkpoint.files import CONFIG, metadata_in
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import Form
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import QUANTIZE, check_quantize, frozen_weights, quantised_layers, stored_layers

FORM = "base_weights"  # the entry of an adapter's file that names the `quantize` of the weights below


def chosen_layers(model: BlockDiffusionModel, directory: Path, quantize: str | None) -> dict[str, Form]:
    """The layers of an empty model whose weights are to be stored in fewer bits, and how.

    quantize: a word for all layers that the family has it for, "none", or None: those that the checkpoint stores so,
    which a word adds to its own. Raises CheckpointError.
    """
    check_quantize(quantize)
    if quantize == "none":
        return {}
    found = quantised_layers(model, quantize)
    names = model.config.names
    stored = assembled(stored_apart(directory, names), names)
    for layer, module in model.named_modules():
        if isinstance(module, Linear | Experts) and layer not in found:
            hubs = [names.to_hub(f"{layer}.{weight}") for weight in module.WEIGHTS]
            places = [stored.get(hub) for hub in hubs if hub is not None]
            forms = {place.form if isinstance(place, Assembled) else None for place in places}
            if len(forms) == 1 and (form := forms.pop()) is not None:
                found[layer] = form
    return found


def quantize_of(config: Family, quantize: str | None) -> str | None:
    """The word for how a model of this config stores its weights: `quantize`, or what the config says; None or "none"
    for weights like others."""
    check_quantize(quantize)
    if quantize is not None:
        return quantize
    return "fp8" if _said(config).get("format") == "float-quantized" else None


def warn_of_inputs(config: Family, directory: Path) -> None:
    """Warn if another program's checkpoint asks for inputs that are rounded to fp8, which stay as they are here."""
    groups = [group for group in _said(config).get("config_groups", {}).values() if isinstance(group, Mapping)]
    if any(group.get("input_activations") for group in groups) and not has_digests(directory):
        warnings.warn(
            f"{directory}: its {CONFIG} rounds the inputs of layers in fp8, too; here only weights are in fp8",
            stacklevel=3,
        )


def _said(config: Family) -> Mapping[str, Any]:
    said = config.values.get("quantization_config")
    return said if isinstance(said, Mapping) else {}


def stored_as(model: BlockDiffusionModel) -> str | None:
    """The `quantize` that stores a model's weights as they are; None if no word does, or nothing is stored so."""
    forms = {name: module.stored for name, module in stored_layers(model).items()}
    words = [word for word in QUANTIZE if forms and forms.items() >= quantised_layers(model, word).items()]
    return words[0] if words else None


def form_below(directory: str | Path) -> str | None:
    """The form of the weights that the adapter in a directory was trained over; None where it says nothing: as they are
    stored, or it is not ours. Raises CheckpointError.
    """
    file = Path(directory).expanduser() / ADAPTER_WEIGHTS
    form = metadata_in(file).get(FORM) if file.exists() else None
    form = "fp8" if form == "fp8-dynamic" else form  # weights of the same codes, whose inputs were rounded
    check_quantize(form)
    return form


def described(model: BlockDiffusionModel) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config.json; None for one without weights in fp8.

    Its form is the one that vLLM's loader of DiffusionGemma takes (FP8-Dynamic), in which that rounds inputs, too.
    """
    if not stored_layers(model):
        return None
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _ignored(model),
    }


def _ignored(model: BlockDiffusionModel) -> list[str]:
    """Patterns of the names of linear layers that are not in fp8: by what follows the number of a layer."""
    names = model.config.names
    found = ["lm_head"]
    for layer, module in model.named_modules():
        hub = names.to_hub(f"{layer}.weight")
        if isinstance(module, nn.Linear) and getattr(module, "stored", None) is None and hub is not None:
            _, number, rest = hub.removesuffix(".weight").rpartition(".layers.")
            rest = rest.partition(".")[2] if number else ".".join(rest.split(".")[-2:])
            found.append(f"re:.*{re.escape(rest)}$")
    found += [f"re:.*{re.escape(start.strip('.').rpartition('.')[2])}.*" for start in names.carried]
    return sorted(set(found))


def parts_in_files(model: BlockDiffusionModel, sources: dict[str, TensorSource]) -> dict[str, dict[str, TensorSource]]:
    """Take the tensors of stored weights out of `sources`: for each weight the tensors that files have, by what follows
    its name there."""
    found: dict[str, dict[str, TensorSource]] = {}
    for name, (module, _) in frozen_weights(model).items():
        assert module.stored is not None
        ends = zip(module.stored.SUFFIXES, module.stored.DTYPES, strict=True)
        found[name] = {end: _viewed(sources.pop(name + end), dtype) for end, dtype in ends}
    return found


def _viewed(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """The bytes of a tensor as numbers of another dtype of that size."""
    if source.dtype == dtype:
        return source
    return TensorSource(source.shape, dtype, lambda: source.read().view(dtype), (source,))
