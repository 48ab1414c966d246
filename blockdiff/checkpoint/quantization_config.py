"""The words of a config.json about weights in fewer bits: what they say of a model's layers, and what is written.

Files are told by their tensors; the words are for what has none at hand, a plan, and for the programs that read them.
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


def said(config: Family) -> Mapping[str, Any]:
    """The words of a config about weights in fewer bits; empty if it has none."""
    found = config.values.get(QUANTIZATION)
    return found if isinstance(found, Mapping) else {}


def layers_said(model: BlockDiffusionModel) -> dict[str, Form]:
    """The layers that the config says are in fewer bits, each with its form."""
    found, groups = {}, list(_groups(said(model.config)))
    for layer, module in model.named_modules():
        names = _hub_modules(model, layer, module)
        form = next((form for targets, form in groups if names and _matches(names[0], targets)), None)
        if form is not None and not _matches(names[0], _ignored_by(said(model.config))):
            found[layer] = form
    return found


def _groups(words: Mapping[str, Any]) -> Iterator[tuple[list[str], Form]]:
    """Patterns of the modules of a form, and the form."""
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
    """True for a module that one of the patterns names, in the ways of compressed-tensors and of ModelOpt."""
    return any(
        re.match(pattern[3:], module) is not None
        if pattern.startswith("re:")
        else pattern in ("Linear", module) or fnmatchcase(module, pattern)
        for pattern in map(str, patterns)
    )


def _hub_modules(model: BlockDiffusionModel, layer: str, module: nn.Module) -> list[str]:
    """The names that files have of a linear layer's module, or of those of the first expert."""
    if not isinstance(module, Linear | Experts):
        return []
    names = model.config.names
    hubs = [hub for weight in module.WEIGHTS if (hub := names.to_hub(f"{layer}.{weight}")) is not None]
    pieces = [piece for hub in hubs for piece in names.pieces_of(hub, True)]
    return [name.replace("[]", "0").removesuffix(WEIGHT) for name in pieces or hubs]


def written_words(model: BlockDiffusionModel, forms: Mapping[str, FileForm]) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config.json; None for one without weights in fewer bits.

    forms: of stored weights. Words that were read are kept with the weights that were; what is no longer in fewer bits
    is ignored then, too.
    """
    if not stored_layers(model):
        return None
    read_forms: Mapping[str, FileForm] = {} if model.carried is None else model.carried.forms
    if forms.items() <= read_forms.items():
        gone = {name.rpartition(".")[0] for name in read_forms.keys() - forms.keys()}
        modules = [each for layer in gone for each in _hub_modules(model, layer, model.get_submodule(layer))]
        return {**said(model.config), "ignore": [*_ignored_by(said(model.config)), *sorted(modules)]}
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
    """Patterns of the modules of the layers in a form: by what follows the number of a layer."""
    layers = {layer: module for layer, module in stored_layers(model).items() if module.stored is form}
    modules = {_tail(name) for layer, module in layers.items() for name in _hub_modules(model, layer, module)}
    return sorted(f"re:.*{re.escape(tail)}$".replace(r"\.0\.", r"\.\d+\.") for tail in modules)


def _ignored(model: BlockDiffusionModel) -> list[str]:
    """Patterns of the names of linear layers that are not in fewer bits."""
    names = model.config.names
    found = ["lm_head"]
    for layer, module in model.named_modules():
        hub = names.to_hub(f"{layer}.weight")
        if isinstance(module, nn.Linear) and getattr(module, "stored", None) is None and hub is not None:
            found.append(f"re:.*{re.escape(_tail(hub.removesuffix(WEIGHT)))}$")
    found += [f"re:.*{re.escape(start.strip('.').rpartition('.')[2])}.*" for start in names.carried]
    return sorted(set(found))


def _tail(module: str) -> str:
    """The name of a module behind the number of its layer, or its last two words."""
    _, number, rest = module.rpartition(".layers.")
    return rest.partition(".")[2] if number else ".".join(rest.split(".")[-2:])


def warn_of_activations(config: Family, directory: Path) -> None:
    """Warn if another program's checkpoint rounds inputs, or keys and values, which stay as they are here."""
    words = said(config)
    groups = [group for group in (words.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    what = ["the inputs of layers"] * any(group.get("input_activations") for group in groups)
    what += ["keys and values"] * bool(words.get("kv_cache_scheme") or words.get("kv_cache_quant_algo"))
    if what and not has_digests(directory):
        warnings.warn(
            f"{directory}: its {CONFIG} rounds {' and '.join(what)} to fewer bits, too; here only weights are rounded",
            stacklevel=3,
        )
