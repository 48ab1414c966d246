"""Adapters in and out in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT adapts transformers' modules, of which some stand twice over one weight (encoder and decoder); their adapters are
written as equal copies and read only where they are equal. Experts are its `target_parameters`: A of all experts
stacked as [E r, in], B side by side as [out, r E] with the expert as the fast index.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from blockdiff.checkpoint.files import ADAPTER_CONFIG as CONFIG
from blockdiff.checkpoint.files import GENERATION, find, first_line, read_json
from blockdiff.checkpoint.gathering import Gathering
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.stream import Source, write_stream
from blockdiff.errors import CheckpointError
from blockdiff.files import unwritten, whole_directory, write_text
from blockdiff.layers.lora import AdaptedExperts, LowRank
from blockdiff.models.adapters import TOKEN_ROWS, adapt, adapter_tensors, adapters_of
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.pieces import fill_piece, gathered, is_spread

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ROWS = ".token_adapter.trainable_tokens_delta"
# Settings of PEFT that change what an adapter computes, with the values under which they do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


@dataclass(frozen=True)
class Adapter:
    """An adapter as it lies in a directory, in our names.

    modules: how each is adapted; tensors: by the names of our parameters; tokens: ids of the rows of the embedding
    table that it brings; base: the checkpoint that it was trained on, as far as the file says.
    """

    modules: Mapping[str, LowRank]
    tensors: Mapping[str, Tensor]
    tokens: tuple[int, ...] = ()
    base: str | None = None


def has_adapter(directory: str | Path) -> bool:
    """Whether a directory holds an adapter."""
    return (Path(directory) / CONFIG).is_file()


def save_adapter(
    model: BlockDiffusionModel,
    directory: str | Path,
    base: str | None = None,
    *,
    tokenizer: Any = None,
    generation: Generation | None = None,
    choices: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a model in PEFT's format; the directory appears complete or not at all.

    base: the checkpoint or Hub id that the adapter belongs to; tokenizer, generation, choices: what is to lie beside
    it, as in `save`. Of a sharded model all ranks call this together, and rank 0 writes. Raises CheckpointError for a
    model without adapters and where something else stands.
    """
    tensors = adapter_tensors(model)
    if not tensors:
        raise CheckpointError("the model has no adapters to save")
    target = Path(directory).expanduser().absolute()
    gathering = Gathering(tensors.values())
    sources = _to_peft(model)

    def write() -> None:
        if target.exists() and any(target.iterdir()) and not (overwrite and has_adapter(target)):
            raise CheckpointError(f"{target}: is there already; choose another directory")
        try:
            with whole_directory(target) as fresh:
                config = json.dumps(_config(model, base), indent=2, sort_keys=True)
                (fresh / CONFIG).write_text(config + "\n", encoding="utf-8")
                write_stream(fresh / WEIGHTS, sources, {"format": "pt"})
                if tokenizer is not None:
                    tokenizer.save_pretrained(fresh)
                if generation is not None:
                    write_text(fresh / GENERATION, json.dumps(generation.to_dict(), indent=2, sort_keys=True) + "\n")
                if choices is not None:
                    choices.save(fresh)
        except (OSError, SafetensorError) as error:
            needed = sum(source.nbytes for source in sources.values())
            raise CheckpointError(f"{unwritten(target, error, needed)}; choose a place with room") from error

    gathering.run(write)
    return target


def load_adapter(model: BlockDiffusionModel, directory: str | Path) -> None:
    """Put the adapter of a directory into a model that has its weights, in place: see `read_adapter`."""
    adapter = read_adapter(directory, model)
    adapt(model, adapter.modules, adapter.tokens)
    fill_adapters(model, adapter.tensors, str(directory))


@torch.no_grad()
def fill_adapters(model: BlockDiffusionModel, tensors: Mapping[str, Tensor], where: str) -> None:
    """Give the adapters of a model these values, on its device, in fp32 at least; `where` names them in errors.

    Raises CheckpointError for tensors that are missing or too many, or have other shapes.
    """
    wide = torch.promote_types(model.dtype, torch.float32)
    wanted = {name: list(tensor.shape) for name, tensor in adapter_tensors(model).items()}
    for name in sorted({*wanted, *tensors}):
        found = list(tensors[name].shape) if name in tensors else "missing"
        if found != wanted.get(name):
            asked = wanted.get(name, "no such tensor")
            raise CheckpointError(f"{where}: {name} is {found}, the model asks for {asked}")
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        old = model.get_parameter(name)
        if is_spread(old):
            fill_piece(old, tensor)
            continue
        module = model.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(tensor.to(model.device, wide, copy=True), old.requires_grad))


def read_adapter(directory: str | Path, model: BlockDiffusionModel) -> Adapter:
    """The adapter of a directory, as `save_adapter` or PEFT wrote it for transformers' class of this model.

    Raises CheckpointError for what a model of ours cannot be: adapters that differ between the two copies of a module,
    other kinds than plain LoRA, tensors that fit no module, shapes that do not fit.
    """
    directory = Path(directory).expanduser()
    config = read_json(directory / CONFIG)
    _require_plain(config, directory)
    try:
        stored = load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / WEIGHTS}: cannot be read ({first_line(error)})") from error
    names = family_of(model.config).names
    modules: dict[str, LowRank] = {}
    tensors: dict[str, Tensor] = {}
    copies: dict[str, set[str]] = defaultdict(set)
    for key, tensor in sorted(stored.items()):
        if ROWS in key:
            names_here = {TOKEN_ROWS: tensor}
        else:
            names_here = _from_peft(key, tensor, model, directory)
        for ours, value in names_here.items():
            if ours in tensors and not torch.equal(tensors[ours], value):
                raise CheckpointError(
                    f"{directory / WEIGHTS}: {key} differs from that of the other module over the same weight; "
                    "blockdiff has one adapter for both, so it cannot take this one"
                )
            tensors[ours] = value
            copies[ours].add(key)
    for ours, keys in copies.items():
        if ours != TOKEN_ROWS and len(keys) < len(names.copies(_hub_module(ours, model))):
            raise CheckpointError(
                f"{directory / WEIGHTS}: {min(keys)} adapts one of two modules over the same weight; "
                "blockdiff adapts both alike, so it cannot take this one"
            )
    for ours in tensors:
        if ours != TOKEN_ROWS:
            module, low_rank = ours.rpartition(".")[0], _low_rank(config, ours, tensors, model, directory)
            if modules.setdefault(module, low_rank) != low_rank:
                raise CheckpointError(f"{directory}: the adapters of {module} differ in rank or alpha; one is read")
    for name, low_rank in modules.items():
        _complete(tensors, name, low_rank, model)
    tokens = _tokens(config, tensors, directory)
    return Adapter(modules, tensors, tokens, config.get("base_model_name_or_path"))


def base_of(directory: str | Path) -> str:
    """The checkpoint or Hub id that the adapter in a directory says it belongs to; CheckpointError where it does not.

    A relative path is looked for beside the adapter, too.
    """
    base = read_json(Path(directory) / CONFIG).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(f"{directory}: does not say what it adapts; name the model, and this as its adapter")
    beside = Path(directory) / str(base)
    return str(beside if not Path(base).exists() and beside.is_dir() else base)


def places_of(path_or_hub_id: str | Path, adapter: str | Path | None = None) -> tuple[Path, ...]:
    """Where the tokenizer and the settings of a model may lie, nearest first: beside its adapter, beside its weights.

    The same arguments as in `load`. Raises CheckpointError for what is not there.
    """
    directory = find(path_or_hub_id)
    if adapter is not None:
        return find(adapter), directory
    return (directory, find(base_of(directory), with_weights=False)) if has_adapter(directory) else (directory,)


# -- writing -------------------------------------------------------------------------------------------------------


def _hub_module(ours: str, model: BlockDiffusionModel) -> str:
    """transformers' name of the module that one of our adapter parameters belongs to."""
    names, module = family_of(model.config).names, ours.rpartition(".")[0]
    if module.rpartition(".")[2] == "experts":
        return str(names.to_hub(f"{module}.gate_up_proj")).removesuffix(".gate_up_proj")
    return str(names.to_hub(f"{module}.weight")).removesuffix(".weight")


def peft_names(ours: str, model: BlockDiffusionModel) -> tuple[list[str], Callable[[Tensor], Tensor]]:
    """What PEFT calls the copies of one of our adapter parameters, from transformers' model on, and its arrangement."""
    names = family_of(model.config).names
    if ours == TOKEN_ROWS:
        table = str(names.to_hub("vocabulary.table")).removesuffix(".weight")
        return [name + ROWS for name in names.copies(table)], lambda x: x
    leaf, hub = ours.rpartition(".")[2], _hub_module(ours, model)
    which = "lora_A" if leaf.endswith("A") else "lora_B"
    inner = ".base_layer" if leaf.startswith("gate_up") else ""
    keys = [f"{name}{inner}.{which}.weight" for name in names.copies(hub)]
    if not leaf.startswith(("gate_up", "down")):
        return keys, lambda x: x
    return keys, lambda x: x.flatten(0, 1) if which == "lora_A" else x.permute(1, 2, 0).flatten(1)


def _to_peft(model: BlockDiffusionModel) -> dict[str, Source]:
    """All tensors of the adapters by PEFT's names; those of a sharded model are gathered here."""
    out: dict[str, Source] = {}
    for ours, tensor in adapter_tensors(model).items():
        keys, arrange = peft_names(ours, model)
        out |= dict.fromkeys((PREFIX + key for key in keys), Source.of(arrange(gathered(tensor).cpu())))
    return out


def _config(model: BlockDiffusionModel, base: str | None) -> dict[str, Any]:
    """adapter_config.json: what is adapted as a pattern of names, ranks and alphas that differ as patterns, too."""
    family, adapted = family_of(model.config), adapters_of(model)
    names: dict[str, LowRank] = {}  # transformers' names of adapted modules and parameters
    parameters: list[str] = []
    linears: list[str] = []
    for ours, module in adapted.items():
        for hub in family.names.copies(_hub_module(f"{ours}.x", model)):
            if isinstance(module, AdaptedExperts):
                for leaf in ("gate_up_proj", "down_proj"):
                    parameters.append(f"{hub}.{leaf}")
                    names[f"{hub}.{leaf}"] = module.low_rank
            else:
                linears.append(hub)
                names[hub] = module.low_rank
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
    dropouts = [each.low_rank.dropout for each in adapted.values() if not isinstance(each, AdaptedExperts)]
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
        "lora_dropout": 0.0 if parameters or not dropouts else dropouts[0],
        "use_rslora": bool(first is not None and first.rslora),
        "target_modules": _pattern(linears, every) if linears else [],
        "target_parameters": _suffixes(parameters, every) or None,
    }
    if model.vocabulary.token_rows is not None:
        config["trainable_token_indices"] = {"embed_tokens": list(model.vocabulary.token_ids)}
    return config


def _number(value: float) -> float | int:
    """PEFT writes whole alphas without a point."""
    return int(value) if float(value).is_integer() else value


def _adaptable(model: BlockDiffusionModel) -> list[str]:
    """transformers' names of everything that could be adapted."""
    names = family_of(model.config).names
    known = [hub for ours in model.state_dict() if (hub := names.to_hub(ours)) is not None]
    return [copy.removesuffix(".weight") for hub in known for copy in names.copies(hub)]


_NUMBER = re.compile(r"\.(\d+)\.")


def _pattern(chosen: Sequence[str], every: Sequence[str]) -> str:
    """A regular expression that matches exactly the chosen names among all."""
    tails: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        tails[_NUMBER.sub(".#.", name, count=1)].append(name)
    pieces = []
    for shape, here in tails.items():
        there = [name for name in every if _NUMBER.sub(".#.", name, count=1) == shape]
        layers = r"\d+" if len(here) == len(there) else "(" + "|".join(_NUMBER.search(n)[1] for n in here) + ")"  # type: ignore[index]
        pieces.append(re.escape(shape).replace(r"\#", "#").replace("#", layers))
    return "|".join(sorted(set(pieces)))


def _suffixes(parameters: Sequence[str], every: Sequence[str]) -> list[str]:
    """`experts.gate_up_proj` and such where all of them are adapted, else the whole names."""
    short = sorted({".".join(name.split(".")[-2:]) for name in parameters}, reverse=True)
    all_of_them = [name for name in every if any(name.endswith("." + tail) for tail in short)]
    return short if len(all_of_them) == len(set(parameters)) else sorted(set(parameters))


# -- reading -------------------------------------------------------------------------------------------------------


def _require_plain(config: Mapping[str, Any], directory: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{directory / CONFIG}: peft_type is {kind!r}; only LORA is read")
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise CheckpointError(f"{directory / CONFIG}: {key} is {config[key]!r}; blockdiff reads plain LoRA only")


def _from_peft(key: str, tensor: Tensor, model: BlockDiffusionModel, directory: Path) -> dict[str, Tensor]:
    """Our name and value of one tensor of the file."""
    names = family_of(model.config).names
    match = re.fullmatch(re.escape(PREFIX) + r"(.+?)((?:\.base_layer)*)\.(lora_[AB])\.weight", key)
    problem = f"{directory / WEIGHTS}: {key} is no adapter of a module of this model"
    if match is None:
        raise CheckpointError(problem)
    module, _, which = match.groups()
    ours = names.to_ours(f"{module}.weight")
    if ours is not None:
        return {f"{ours.removesuffix('.weight')}.{which}": tensor}
    ours = names.to_ours(f"{module}.gate_up_proj")
    if ours is None:
        raise CheckpointError(problem)
    ours = ours.removesuffix(".gate_up_proj")
    E, D, F = (int(size) for size in model.get_parameter(f"{ours}.down_proj").shape)
    side = 1 if which == "lora_A" else 0
    widths = {"gate_up": (D, 2 * F)[1 - side], "down": (F, D)[1 - side]}
    # The two parameters of a module are nested in the order of its parameters: gate_up inside, down outside.
    is_inner = ".base_layer" in match[2]
    fitting = [name for name, width in widths.items() if tensor.shape[side] == width]
    if not fitting or tensor.shape[1 - side] % E:
        raise CheckpointError(f"{directory / WEIGHTS}: {key} has the shape {list(tensor.shape)}, which fits no expert")
    name = fitting[0] if len(fitting) == 1 else ("gate_up" if is_inner else "down")
    if which == "lora_A":
        value = tensor.unflatten(0, (E, -1))
    else:
        value = tensor.unflatten(1, (-1, E)).permute(2, 0, 1)
    return {f"{ours}.{name}_{which}": value.contiguous()}


def _low_rank(
    config: Mapping[str, Any], ours: str, tensors: Mapping[str, Tensor], model: BlockDiffusionModel, directory: Path
) -> LowRank:
    """How the module of one of our adapter parameters is adapted; the ranks of the file decide."""
    leaf, hub = ours.rpartition(".")[2], _hub_module(ours, model)
    if leaf.startswith(("gate_up", "down")):
        hub += f".{leaf.partition('_lora')[0]}_proj"
    rank = int(tensors[ours].shape[-2 if leaf.endswith("A") else -1])
    if not rank:
        raise CheckpointError(f"{directory / WEIGHTS}: the adapter of {hub} has rank 0, so it adapts nothing")
    alphas = {_of_pattern(config.get("alpha_pattern") or {}, name, config.get("lora_alpha"))
              for name in family_of(model.config).names.copies(hub)}  # fmt: skip
    alpha = alphas.pop()
    if alphas or not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{directory / CONFIG}: gives {hub} no alpha, or two; lora_alpha must be a number")
    return LowRank(rank, float(alpha), bool(config.get("use_rslora")), float(config.get("lora_dropout") or 0.0))


def _of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, as PEFT looks it up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _complete(
    tensors: dict[str, Tensor], name: str, low_rank: LowRank, model: BlockDiffusionModel
) -> None:
    """Experts of which only one of the two products is adapted get a B of 0 for the other."""
    if not name.endswith(".experts"):
        return
    E, D, F = (int(size) for size in model.get_parameter(f"{name}.down_proj").shape)
    for leaf, (inputs, outputs) in {"gate_up": (D, 2 * F), "down": (F, D)}.items():
        names = f"{name}.{leaf}_lora_A", f"{name}.{leaf}_lora_B"
        if tensors.keys().isdisjoint(names):
            tensors[names[0]] = torch.zeros(E, low_rank.rank, inputs)
            tensors[names[1]] = torch.zeros(E, outputs, low_rank.rank)


def _tokens(config: Mapping[str, Any], tensors: Mapping[str, Tensor], directory: Path) -> tuple[int, ...]:
    given = config.get("trainable_token_indices")
    lists = list(given.values()) if isinstance(given, dict) else [given] if given else []
    if (TOKEN_ROWS in tensors) != bool(lists) or len({tuple(each) for each in lists}) > 1:
        raise CheckpointError(f"{directory / CONFIG}: trainable_token_indices do not say which rows the file holds")
    tokens = tuple(int(token) for token in lists[0]) if lists else ()
    if tokens and tensors[TOKEN_ROWS].shape[0] != len(tokens):
        raise CheckpointError(f"{directory}: {len(tokens)} token ids and {tensors[TOKEN_ROWS].shape[0]} rows")
    return tokens
