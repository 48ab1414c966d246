"""PEFT's `adapter_config.json`: which modules of a model are adapted, and how."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdiff.checkpoint.adapter_names import WEIGHTS, Part, fused_rank, hub_module
from blockdiff.checkpoint.adapter_patterns import NamePatterns
from blockdiff.checkpoint.expert_adapters import expert_modules
from blockdiff.checkpoint.files import ADAPTER_CONFIG as CONFIG
from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import TOKEN_ROWS, adapters_of
from blockdiff.models.model import BlockDiffusionModel

# Settings that are read (READ), and settings that change nothing if the adapter has its tensors (INERT).
READ = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout"),
    *("target_modules", "target_parameters", "trainable_token_indices", "base_model_name_or_path"),
    *("exclude_modules", "layers_to_transform"),
)
INERT = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "layers_pattern"),
    *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
)
# Every other setting must be null, false or empty, or have one of these values, with which PEFT computes plain LoRA.
LARGEST_RANK = 65_536
NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or _is_list(value, str)


# For settings that are read: a test of the value, and its description in errors.
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda x: type(x) is int and 1 <= x <= LARGEST_RANK, f"a whole number from 1 to {LARGEST_RANK}"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (lambda x: _is_number(x) and 0 <= x < 1, "a number from 0 on and below 1"),
    "rank_pattern": (lambda x: isinstance(x, dict), "an object"),
    "alpha_pattern": (lambda x: isinstance(x, dict) and all(map(_is_number, x.values())), "an object of numbers"),
    "target_modules": (_is_names, "a text or a list of texts"),
    "exclude_modules": (_is_names, "a text or a list of texts"),
    "target_parameters": (_is_names, "a text or a list of texts"),
    "layers_to_transform": (lambda x: isinstance(x, int) or _is_list(x, int), "a number or a list of numbers"),
    "trainable_token_indices": (
        lambda x: _is_list(x, int) or (isinstance(x, dict) and all(_is_list(each, int) for each in x.values())),
        "a list of token ids, or one for each module",
    ),
}


def peft_config(model: BlockDiffusionModel, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json for a model's adapters.

    The most frequent rank and alpha are `r` and `lora_alpha`; others are given by patterns of names. base: the
    checkpoint or Hub id of the model, None if unknown.
    """
    family_names, adapted = model.config.names, adapters_of(model)
    names: dict[str, LowRank] = {}  # transformers' names of adapted modules and parameters
    parameters: list[str] = []
    linears: list[str] = []
    dropouts: list[float] = []
    for ours, module in adapted.items():
        low_rank = module.low_rank
        assert low_rank is not None
        one = hub_module(f"{ours}.x", model)
        whole = family_names.fused_of(one)
        for hub in family_names.copies(one if whole is None else whole[0]):
            if isinstance(module, Experts) and family_names.experts_apart:
                apart = [each for leaf in module.WEIGHTS for each in expert_modules(f"{ours}.{leaf}", family_names)]
                linears += apart
                names |= dict.fromkeys(apart, low_rank)
            elif isinstance(module, Experts):
                for leaf in module.WEIGHTS:
                    parameters.append(f"{hub}.{leaf}")
                    names[f"{hub}.{leaf}"] = low_rank
            else:
                linears += [hub] * (hub not in names)
                names[hub] = low_rank if whole is None else fused_rank(low_rank, whole[2])
        dropouts += [] if isinstance(module, Experts) else [low_rank.dropout]
    ranks = Counter((each.rank, each.alpha) for each in names.values())
    (rank, alpha), _ = ranks.most_common(1)[0] if ranks else ((8, 8.0), 0)
    every = _adaptable(model)
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    for other in ranks:
        if other != (rank, alpha):
            pattern = _pattern([name for name, each in names.items() if (each.rank, each.alpha) == other], every)
            rank_pattern[pattern], alpha_pattern[pattern] = other[0], _number(other[1])
    first = next(iter(names.values()), None)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "lora_dropout": 0.0
        if any(isinstance(each, Experts) for each in adapted.values()) or not dropouts
        else dropouts[0],
        "use_rslora": bool(first is not None and first.rslora),
        "target_modules": _pattern(linears, every) if linears else [],
        "target_parameters": _suffixes(parameters, every) or None,
    }
    if model.vocabulary.token_rows is not None:
        table = family_names.to_module(str(family_names.to_hub("vocabulary.table")).removesuffix(".weight"))
        config["trainable_token_indices"] = {table.rpartition(".")[2]: list(model.vocabulary.token_ids)}
    return config


def _number(value: float) -> float | int:
    """Convert a whole alpha to an integer, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value


def _adaptable(model: BlockDiffusionModel) -> list[str]:
    """Return transformers' names of all modules and parameters of a model, of which a pattern selects some."""
    names = model.config.names
    hub_names = [hub for ours in model.state_dict() if (hub := names.to_hub(ours)) is not None]
    apart = {hub: names.pieces_of(hub) for hub in hub_names if names.experts_apart}
    hub_names = [each for hub in hub_names for each in apart.get(hub) or [hub]]
    modules = [names.to_module(copy.removesuffix(".weight")) for hub in hub_names for copy in names.copies(hub)]
    wholes = [names.fused_of(module) for module in modules]
    return [*dict.fromkeys(one if all_ is None else all_[0] for one, all_ in zip(modules, wholes, strict=True))]


_NUMBER = re.compile(r"\.(\d+)\.")


def _pattern(chosen: Sequence[str], every: Sequence[str]) -> str:
    """Return a regular expression that matches all names in `chosen` and no other name in `every`.

    `[]` in a name matches any number.
    """
    tails: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        tails[_NUMBER.sub(".#.", name, count=1)].append(name)
    pieces = []
    for shape, here in tails.items():
        there = [name for name in every if _NUMBER.sub(".#.", name, count=1) == shape]
        layers = r"\d+" if len(here) == len(there) else "(" + "|".join(_NUMBER.search(n)[1] for n in here) + ")"  # type: ignore[index]
        pieces.append(re.escape(shape).replace(r"\#", "#").replace("#", layers).replace(r"\[\]", r"\d+"))
    return "|".join(sorted(set(pieces)))


def _suffixes(parameters: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return the last two words of each name (`experts.gate_up_proj`), or whole names if others end so, too."""
    short = sorted({".".join(name.split(".")[-2:]) for name in parameters}, reverse=True)
    all_of_them = [name for name in every if any(name.endswith("." + tail) for tail in short)]
    return short if len(all_of_them) == len(set(parameters)) else sorted(set(parameters))


def require_plain(config: Mapping[str, Any], directory: Path, patterns: NamePatterns) -> None:
    """Raise CheckpointError if an adapter is not plain LoRA, or if a setting has a value that cannot be read."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory / CONFIG}: peft_type is {kind!r}; only LORA is read")
    for key, value in config.items():
        if value and key not in (*READ, *INERT) and value not in NEUTRAL.get(key, ()):
            raise CheckpointError(
                f"{directory / CONFIG}: {key:.80} is {value!r:.80}, and only plain LoRA over the base's weights is "
                "read; let PEFT write it so (save_pretrained with path_initial_model_for_weight_conversion)"
            )
    for key, (is_form, words) in FORMS.items():
        if config.get(key) is not None and not is_form(config[key]):
            raise CheckpointError(f"{directory / CONFIG}: {key} is {config[key]!r:.80}; it must be {words}")
    for key in ("target_modules", "exclude_modules"):
        if isinstance(pattern := config.get(key), str):
            patterns.matches(key, pattern, "")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(key) or ():
            patterns.matches(key, pattern, "")


def read_low_rank(
    config: Mapping[str, Any],
    ours: str,
    parts: Mapping[str, Part],
    model: BlockDiffusionModel,
    directory: Path,
    patterns: NamePatterns,
    noisy_only: bool,
) -> LowRank:
    """Return rank and alpha, by file and config, of the module that has our adapter parameter `ours`.

    Raises CheckpointError if the rank is 0 or the config gives no single alpha.
    """
    leaf, hub = ours.rpartition(".")[2], hub_module(ours, model)
    if (whole := model.config.names.fused_of(hub)) is not None:
        hub = whole[0]
    family_names, modules = model.config.names, []
    if leaf.startswith(("gate_up", "down")):
        weight = f"{leaf.partition('_lora')[0]}_proj"
        modules = expert_modules(f"{ours.rpartition('.')[0]}.{weight}", family_names)
        hub = modules[0].replace("[]", "0") if modules else f"{hub}.{weight}"
    rank = int(parts[ours].shape[-2 if leaf.endswith("A") else -1])
    if not rank:
        raise CheckpointError(f"{directory / WEIGHTS}: the adapter of {hub} has rank 0, so it adapts nothing")
    names, alpha_of = family_names.copies(hub), config.get("alpha_pattern") or {}
    alphas = {_of_pattern(alpha_of, name, config.get("lora_alpha"), patterns) for name in names}
    alpha = alphas.pop()
    if alphas or not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{directory / CONFIG}: gives {hub} no alpha, or two; lora_alpha must be a number")
    dropout = float(config.get("lora_dropout") or 0.0)
    low_rank = LowRank(rank, float(alpha), bool(config.get("use_rslora")), dropout, noisy_only)
    of_one = _of_pattern(config.get("rank_pattern") or {}, hub, config.get("r"), patterns)
    if len(modules) > 1 and rank == len(modules) * of_one:  # adapters of several matrices, joined to one
        return fused_rank(replace(low_rank, rank=of_one), len(modules))
    return low_rank


def _of_pattern(alphas: Mapping[str, Any], name: str, default: Any, patterns: NamePatterns) -> Any:
    """Return the value of the first pattern in `alphas` that matches the end of `name`, as in PEFT, or `default`."""
    alphas_found = (
        alpha for end, alpha in alphas.items() if patterns.matches("alpha_pattern", rf"(.*\.)?({end})", name)
    )
    return next(alphas_found, default)


def trained_tokens(config: Mapping[str, Any], parts: Mapping[str, Part], directory: Path) -> tuple[int, ...]:
    """Return the token ids of the embedding rows in an adapter's file, () if it has none.

    Raises CheckpointError if config and file disagree.
    """
    indices = config.get("trainable_token_indices")
    lists = list(indices.values()) if isinstance(indices, dict) else [indices] if indices else []
    if (TOKEN_ROWS in parts) != bool(lists) or len({tuple(each) for each in lists}) > 1:
        raise CheckpointError(f"{directory / CONFIG}: trainable_token_indices do not say which rows the file holds")
    tokens = tuple(lists[0]) if lists else ()
    if tokens and parts[TOKEN_ROWS].shape[0] != len(tokens):
        raise CheckpointError(f"{directory}: {len(tokens)} token ids and {parts[TOKEN_ROWS].shape[0]} rows")
    return tokens
