"""The `quantization_config` of a config.json: the stored forms of a model's layers, read and written.

Tensors decide how weights are read. This entry serves a plan, which has no tensors, and other programs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from blockdiff.checkpoint.config import QUANTIZATION
from blockdiff.checkpoint.digests import has_digests
from blockdiff.checkpoint.file_forms import FILE_FORMS, WEIGHT, WRITTEN, FileForm
from blockdiff.checkpoint.files import CONFIG
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import Form
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers


def quantization_words(config: Family) -> Mapping[str, Any]:
    """Return the `quantization_config` of a model; empty if it has none."""
    words = config.values.get(QUANTIZATION)
    return words if isinstance(words, Mapping) else {}


def layers_described(model: BlockDiffusionModel) -> dict[str, Form]:
    """Return the layers that the config describes as stored in fewer bits, each with its form."""
    layers, groups = {}, list(_groups(quantization_words(model.config)))
    for layer, module in model.named_modules():
        names = _hub_modules(model, layer, module)
        form = next((form for targets, form in groups if names and _matches(names[0], targets)), None)
        if form is not None and not _matches(names[0], _ignored_by(quantization_words(model.config))):
            layers[layer] = form
    return layers


def _groups(words: Mapping[str, Any]) -> Iterator[tuple[list[str], Form]]:
    """Yield each form in a `quantization_config` with the patterns of the modules that have it: (patterns, form)."""
    groups = words.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        keys = ("type", "num_bits", "group_size")
        for form, in_files in WRITTEN.items():
            if isinstance(weights, Mapping) and all(weights.get(key) == in_files.weights.get(key) for key in keys):
                yield list(group.get("targets") or ["Linear"]), form
    for in_files in FILE_FORMS:
        if not groups and in_files.form is not None and in_files.algorithm == words.get("quant_algo"):
            yield ["Linear"], in_files.form


def _ignored_by(words: Mapping[str, Any]) -> list[str]:
    ignored = words.get("ignore") or words.get("exclude_modules")
    return list(ignored) if isinstance(ignored, list) else []


def _matches(module: str, patterns: list[str]) -> bool:
    """Return True if a pattern matches a module, in the syntax of compressed-tensors or of ModelOpt."""
    return any(
        re.match(pattern[3:], module) is not None
        if pattern.startswith("re:")
        else pattern in ("Linear", module) or fnmatchcase(module, pattern)
        for pattern in map(str, patterns)
    )


def _hub_modules(model: BlockDiffusionModel, layer: str, module: nn.Module) -> list[str]:
    """Return the Hub names of a linear layer's module, or of the modules of the first expert in an expert layer."""
    if not isinstance(module, Linear | Experts):
        return []
    names = model.config.names
    hubs = [hub for weight in module.WEIGHTS if (hub := names.to_hub(f"{layer}.{weight}")) is not None]
    pieces = [piece for hub in hubs for piece in names.pieces_of(hub, True)]
    return [name.replace("[]", "0").removesuffix(WEIGHT) for name in pieces or hubs]


def written_words(model: BlockDiffusionModel, forms: Mapping[str, FileForm]) -> dict[str, Any] | None:
    """Return the `quantization_config` of a model's config.json; None if no weight is stored in fewer bits.

    forms: the form in files of each stored weight. If all are as they were read, the entry is as it was read, and
    modules that are no longer stored in fewer bits are added to its `ignore`.
    """
    if not stored_layers(model):
        return None
    read_forms: Mapping[str, FileForm] = {} if model.carried is None else model.carried.forms
    if forms.items() <= read_forms.items():
        gone = {name.rpartition(".")[0] for name in read_forms.keys() - forms.keys()}
        modules = [each for layer in gone for each in _hub_modules(model, layer, model.get_submodule(layer))]
        return {
            **quantization_words(model.config),
            "ignore": [*_ignored_by(quantization_words(model.config)), *sorted(modules)],
        }
    kept_in = {module.stored for module in stored_layers(model).values()}
    in_turn = [form for form in WRITTEN if form in kept_in]
    groups = {
        f"group_{n}": {
            "targets": ["Linear"] if len(in_turn) == 1 else _targets(model, form),
            **({} if len(in_turn) == 1 else {"format": WRITTEN[form].words}),
            "weights": WRITTEN[form].weights,
            "input_activations": WRITTEN[form].inputs,
        }
        for n, form in enumerate(in_turn)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": WRITTEN[in_turn[0]].words if len(in_turn) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _ignored(model),
    }


def _targets(model: BlockDiffusionModel, form: Form) -> list[str]:
    """Return patterns of the modules in a form, by the part of their names behind the layer number."""
    layers = {layer: module for layer, module in stored_layers(model).items() if module.stored is form}
    modules = {_tail(name) for layer, module in layers.items() for name in _hub_modules(model, layer, module)}
    return sorted(f"re:.*{re.escape(tail)}$".replace(r"\.0\.", r"\.\d+\.") for tail in modules)


def _ignored(model: BlockDiffusionModel) -> list[str]:
    """Return patterns of the linear layers that are not stored in fewer bits."""
    names = model.config.names
    patterns = ["lm_head"]
    for layer, module in model.named_modules():
        hub = names.to_hub(f"{layer}.weight")
        if isinstance(module, nn.Linear) and getattr(module, "stored", None) is None and hub is not None:
            patterns.append(f"re:.*{re.escape(_tail(hub.removesuffix(WEIGHT)))}$")
    patterns += [f"re:.*{re.escape(start.strip('.').rpartition('.')[2])}.*" for start in names.carried]
    return sorted(set(patterns))


def _tail(module: str) -> str:
    """Return the part of a module's name behind the layer number, or its last two words."""
    _, number, rest = module.rpartition(".layers.")
    return rest.partition(".")[2] if number else ".".join(rest.split(".")[-2:])


def warn_of_activations(config: Family, directory: Path) -> None:
    """Warn if another program's checkpoint rounds inputs, or keys and values; here these are not rounded."""
    words = quantization_words(config)
    groups = [group for group in (words.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    what = ["the inputs of layers"] * any(group.get("input_activations") for group in groups)
    what += ["keys and values"] * bool(words.get("kv_cache_scheme") or words.get("kv_cache_quant_algo"))
    if what and not has_digests(directory):
        warnings.warn(
            f"{directory}: its {CONFIG} rounds {' and '.join(what)} to fewer bits, too; here only weights are rounded",
            stacklevel=3,
        )
