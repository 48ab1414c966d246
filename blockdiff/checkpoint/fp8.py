"""Weights in fp8 in checkpoints: which layers of a model have them, and how config.json says it.

The form is that of compressed-tensors, `float-quantized` with a scale for each output channel: beside a tensor X in
e4m3 lies X_scale [out, 1], and experts are matrices of their own. That is what vLLM reads.
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
from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.fp8 import SCALE, InFp8
from blockdiff.models.family import family_of
from blockdiff.models.fp8 import fp8_layers, layers_in_fp8
from blockdiff.models.model import BlockDiffusionModel

# What weights can be asked for in; None: as they are stored.
FORMS = ("fp8", "none")
FORM = "base_weights"  # the entry of an adapter's file that says it of the weights below


def check_quantize(quantize: str | None) -> None:
    """Raises CheckpointError for a form that is not known."""
    if quantize is not None and quantize not in FORMS:
        raise CheckpointError(f"quantize={quantize!r} is not known; use {', '.join(FORMS)} or leave it out")


def chosen_layers(model: BlockDiffusionModel, directory: Path, quantize: str | None) -> list[str]:
    """The layers of an empty model whose weights are to be in fp8.

    quantize: "fp8" (all that the family has it for), "none", or None: those that the checkpoint has in
    fp8, which the first ones include. Raises CheckpointError.
    """
    check_quantize(quantize)
    if quantize == "none":
        return []
    asked = [] if quantize is None else fp8_layers(model)
    names = family_of(model.config).names
    stored = assembled(stored_apart(directory, names), names)
    stored_in_fp8 = []
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear | Experts) and layer not in asked:
            leaves = [names.to_hub(f"{layer}.{leaf}") for leaf, _ in module.named_parameters(recurse=False)]
            places = [stored.get(hub) for hub in leaves if hub is not None]
            if places and all(isinstance(place, Assembled) and place.is_fp8 for place in places):
                stored_in_fp8.append(layer)
    return [*asked, *stored_in_fp8]


def is_fp8(config: Any, quantize: str | None) -> bool:
    """True where a model of this config has its weights in fp8, as `quantize` asks or else as the config says."""
    check_quantize(quantize)
    if quantize is not None:
        return quantize != "none"
    return _said(config).get("format") == "float-quantized"


def warn_of_inputs(config: Any, directory: Path) -> None:
    """Warn if another program's checkpoint asks for inputs that are rounded to fp8, which stay as they are here."""
    groups = [group for group in _said(config).get("config_groups", {}).values() if isinstance(group, Mapping)]
    if any(group.get("input_activations") for group in groups) and not has_digests(directory):
        warnings.warn(
            f"{directory}: its {CONFIG} rounds the inputs of layers in fp8, too; here only weights are in fp8",
            stacklevel=3,
        )


def _said(config: Any) -> Mapping[str, Any]:
    said = getattr(config, "quantization_config", None)
    return said if isinstance(said, Mapping) else {}


def fp8_form(model: BlockDiffusionModel) -> str | None:
    """The `quantize` under which a model has its weights as they are; None where not all or none are in fp8."""
    layers = layers_in_fp8(model)
    if not layers or not layers.keys() >= set(fp8_layers(model)):
        return None
    return "fp8"


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
    if not layers_in_fp8(model):
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
    names = family_of(model.config).names
    found = ["lm_head"]
    for layer, module in model.named_modules():
        hub = names.to_hub(f"{layer}.weight")
        if isinstance(module, nn.Linear) and not isinstance(module, InFp8) and hub is not None:
            _, number, rest = hub.removesuffix(".weight").rpartition(".layers.")
            rest = rest.partition(".")[2] if number else ".".join(rest.split(".")[-2:])
            found.append(f"re:.*{re.escape(rest)}$")
    found += [f"re:.*{re.escape(start.strip('.').rpartition('.')[2])}.*" for start in names.carried]
    return sorted(set(found))


def fp8_sources(name: str, sources: Mapping[str, TensorSource]) -> tuple[TensorSource, TensorSource] | None:
    """The codes and the scales that a file gets for a tensor in fp8; None for a tensor of another dtype."""
    scale = sources.get(name + SCALE)
    if scale is None:
        return None
    codes = sources[name]
    return TensorSource(
        codes.shape, torch.float8_e4m3fn, lambda: codes.read().view(torch.float8_e4m3fn), (codes,)
    ), scale
