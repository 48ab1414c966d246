"""Read and write adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from blockdiff.checkpoint.adapter_base import BASE, base_record, require_base, require_every_target
from blockdiff.checkpoint.adapter_config import peft_config, read_low_rank, require_plain, trained_tokens
from blockdiff.checkpoint.adapter_names import (
    PREFIX,
    WEIGHTS,
    Part,
    adapts_images,
    apart,
    fused,
    hub_module,
    parts_in,
    peft_names,
)
from blockdiff.checkpoint.adapter_patterns import NamePatterns
from blockdiff.checkpoint.digests import write_digests
from blockdiff.checkpoint.expert_adapters import LEAVES, expert_tensors
from blockdiff.checkpoint.files import ADAPTER_CONFIG as CONFIG
from blockdiff.checkpoint.files import GENERATION, metadata_in, read_json
from blockdiff.checkpoint.gathering import Gathering
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.images import with_image_side
from blockdiff.checkpoint.stored import FORM, stored_as
from blockdiff.checkpoint.stream import TensorSource, write_stream
from blockdiff.errors import CheckpointError
from blockdiff.files import room_remedy, unwritten, whole_directory, write_json, write_text
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import TOKEN_ROWS, adapt, adapter_tensors, adapters_of
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.tensor_pieces import gathered, is_spread, local_of, piece_of

NOISY_ONLY = "noisy_only"  # metadata key in the file of an adapter that acts on noisy tokens only


@dataclass(frozen=True)
class Adapter:
    """An adapter in a directory, by our names.

    modules: rank and alpha of each adapted module; parts: the tensors by parameter name, each read on use; tokens: ids
    of the embedding rows that it brings; base: the checkpoint that it was trained on (None: not recorded).
    """

    modules: Mapping[str, LowRank]
    parts: Mapping[str, Part]
    tokens: tuple[int, ...] = ()
    base: str | None = None


def is_noisy_only(directory: str | Path, family: type[Family] | Family) -> bool:
    """Return True if the adapter in `directory` acts on noisy tokens only.

    Its file says so. If blockdiff did not write it, the name of the directory decides.
    """
    file = Path(directory) / WEIGHTS
    metadata = metadata_in(file) if file.exists() else {}
    return NOISY_ONLY in metadata or (BASE not in metadata and Path(directory).name in family.noisy_adapters)


def has_adapter(directory: str | Path) -> bool:
    """Return True if `directory` holds an adapter."""
    return (Path(directory) / CONFIG).is_file()


def brings_rows(directory: str | Path) -> bool:
    """Return True if the adapter in `directory` includes trained rows of the embedding table."""
    return bool(_read_config(Path(directory)).get("trainable_token_indices"))


README = """\
# A LoRA adapter

It is in PEFT's format: transformers with PEFT computes with it what blockdiff does.

To merge it, use `blockdiff export` of the run that made it. Where encoder and decoder share their weights
(DiffusionGemma), PEFT's `merge_and_unload()` would add the adapter to them twice.
"""

OF_NOISY_TOKENS = """\
# A LoRA adapter of noisy tokens

It is in PEFT's format, and acts on the tokens of canvases only: blockdiff computes clean tokens, which are encoded, by
the base alone. With PEFT, encode them within `disable_adapter()`. It cannot be merged.
"""


def save_adapter(
    model: BlockDiffusionModel,
    directory: str | Path,
    base: str | None = None,
    *,
    tokenizer: Any = None,
    generation: Generation | None = None,
    diffusion: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a model in PEFT's format; the directory appears complete or not at all. Returns it.

    base: the checkpoint or Hub id that the adapter belongs to. tokenizer, generation, diffusion: written beside it, as
    in `save`. overwrite: replace an adapter in the directory. If the model is sharded, all ranks call this together,
    and rank 0 writes. Raises CheckpointError if the model has no adapters, if some but not all of them act on noisy
    tokens only, and if the directory has other content.
    """
    tensors = adapter_tensors(model)
    if not tensors:
        raise CheckpointError("the model has no adapters to save")
    kinds = {module.low_rank.noisy_only for module in adapters_of(model).values() if module.low_rank is not None}
    if len(kinds) > 1:
        raise CheckpointError("some adapters of the model are of noisy tokens only; one file has adapters of one kind")
    of_noisy = True in kinds
    target = Path(directory).expanduser().absolute()
    gathering = Gathering(model.parameters())  # if any parameter is sharded, only rank 0 writes
    sources = _to_peft(model)

    def write() -> None:
        is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
        if not is_free and not (overwrite and has_adapter(target)):
            raise CheckpointError(f"{target}: is there already; choose another directory")
        try:
            with whole_directory(target) as fresh:
                write_json(fresh / CONFIG, peft_config(model, base))
                form, metadata = stored_as(model), {"format": "pt", BASE: base_record(model)}
                metadata |= {} if form is None else {FORM: form}
                metadata |= {NOISY_ONLY: "true"} if of_noisy else {}
                write_text(fresh / "README.md", OF_NOISY_TOKENS if of_noisy else README)
                write_digests(fresh, {WEIGHTS: write_stream(fresh / WEIGHTS, sources, metadata)})
                if tokenizer is not None:
                    tokenizer.save_pretrained(fresh)
                if generation is not None:
                    write_json(fresh / GENERATION, generation.to_dict())
                if diffusion is not None:
                    diffusion.save(fresh)
        except (OSError, SafetensorError) as error:
            bytes_to_write = sum(source.nbytes for source in sources.values())
            raise CheckpointError(
                f"{unwritten(target, error, bytes_to_write)}; {room_remedy(error)}, or choose another place"
            ) from error

    gathering.run(write)
    return target


def load_adapter(model: BlockDiffusionModel, directory: str | Path) -> None:
    """Add the adapter in `directory` to a model, in place: see `read_adapter`.

    All its tensors are read before the first module is adapted.
    """
    adapter = read_adapter(directory, model)
    parts = {name: Part.of(part.read(None)) for name, part in adapter.parts.items()}
    adapt(model, adapter.modules, adapter.tokens)
    fill_adapters(model, parts, str(directory))


@torch.no_grad()
def fill_adapters(model: BlockDiffusionModel, parts: Mapping[str, Part], where: str) -> None:
    """Set the adapters of a model to the values of `parts`, on the model's device, in fp32 or wider.

    `where` names their source in errors. Each rank reads its own piece of a sharded adapter. If the model is on the
    meta device, its adapters are on the CPU. Raises CheckpointError if a tensor is missing, unknown or of another
    shape.
    """
    check_parts(model, parts, where)
    wide = torch.promote_types(model.dtype, torch.float32)
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    for name, part in parts.items():
        owner, _, leaf = name.rpartition(".")
        old = model.get_parameter(name)
        if is_spread(old):
            local_of(old).copy_(part.read(piece_of(old).block))
            continue
        values = part.read(None).to(device, wide, copy=True)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values, old.requires_grad))


def check_parts(model: BlockDiffusionModel, parts: Mapping[str, Part], where: str) -> None:
    """Raise CheckpointError unless `parts` have the names and shapes of the model's adapter tensors.

    `where` names their source in the error.
    """
    model_shapes = {name: list(tensor.shape) for name, tensor in adapter_tensors(model).items()}
    for name in sorted({*model_shapes, *parts}):
        actual = list(parts[name].shape) if name in parts else "missing"
        if actual != model_shapes.get(name):
            of_model = model_shapes.get(name, "no such tensor")
            raise CheckpointError(f"{where}: {name} is {actual}, the model asks for {of_model}")


def read_adapter(directory: str | Path, model: BlockDiffusionModel) -> Adapter:
    """Read the adapter in `directory`, written by `save_adapter` or by PEFT for transformers' class of this model.

    Tensors are read on use; read at once are only those of the image side, of single experts and of matrices that
    transformers fuses. If the adapter changes the image side, the model gets its image side. Raises CheckpointError if
    the adapter is not plain LoRA, if it belongs to another model, and if a tensor fits no module in name or shape.
    Reading a part raises it if the adapters of a module's two copies differ.
    """
    directory = Path(directory).expanduser()
    config, patterns = _read_config(directory), NamePatterns(directory / CONFIG)
    require_plain(config, directory, patterns)
    require_base(directory, model)
    if adapts_images(directory, model):
        with_image_side(model)
    parts, noisy_only = parts_in(directory, model), is_noisy_only(directory, model.config)
    require_every_target(config, parts, model, directory, patterns)
    modules: dict[str, LowRank] = {}
    for ours in parts:
        if ours != TOKEN_ROWS:
            module = ours.rpartition(".")[0]
            low_rank = read_low_rank(config, ours, parts, model, directory, patterns, noisy_only)
            if modules.setdefault(module, low_rank) != low_rank:
                raise CheckpointError(f"{directory}: the adapters of {module} differ in rank or alpha; one is read")
    wholes: dict[str, list[str]] = defaultdict(list)
    for name, low_rank in modules.items():
        _complete(parts, name, low_rank, model)
        whole = model.config.names.fused_of(hub_module(f"{name}.x", model))
        if whole is not None and {f"{name}.lora_A", f"{name}.lora_B"} <= parts.keys():
            wholes[whole[0]].append(name)
    apart(modules, parts, wholes)
    tokens = trained_tokens(config, parts, directory)
    return Adapter(modules, parts, tokens, config.get("base_model_name_or_path"))


def _read_config(directory: Path) -> dict[str, Any]:
    """Return the content of an adapter's config; CheckpointError if `directory` holds no adapter."""
    if not (directory / CONFIG).exists():
        raise CheckpointError(
            f"{directory}: holds no adapter (no {CONFIG}); name the directory of one, as RUN/adapter of a run with lora"
        )
    return read_json(directory / CONFIG)


def adapted_checkpoint(directory: str | Path) -> str:
    """Return the checkpoint or Hub id that the adapter in `directory` names as its base.

    A relative path that does not exist is looked up in the adapter's directory. Raises CheckpointError if no base is
    named.
    """
    base = _read_config(Path(directory)).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(f"{directory}: does not say what it adapts; name the model, and this as its adapter")
    beside = Path(directory) / str(base)
    return str(beside if not Path(base).exists() and beside.is_dir() else base)


def _to_peft(model: BlockDiffusionModel) -> dict[str, TensorSource]:
    """Return all adapter tensors by PEFT's names. Tensors of a sharded model are gathered here."""
    out: dict[str, TensorSource] = {}
    names = model.config.names
    wholes: dict[tuple[str, int], dict[tuple[str, int], Tensor]] = defaultdict(dict)
    for ours, tensor in adapter_tensors(model).items():
        whole = None if ours == TOKEN_ROWS else names.fused_of(hub_module(ours, model))
        if whole is not None:
            module, index, count = whole
            wholes[module, count][ours.rpartition(".")[2], index] = gathered(tensor).cpu()
            continue
        if names.experts_apart and ours.rpartition(".")[2] in LEAVES:
            parts_of = expert_tensors(ours, gathered(tensor).cpu(), names)
            out |= {PREFIX + key: TensorSource.of(part) for key, part in parts_of.items()}
            continue
        keys, arrange = peft_names(ours, model)
        out |= dict.fromkeys((PREFIX + key for key in keys), TensorSource.of(arrange(gathered(tensor).cpu())))
    for (module, count), parts in wholes.items():
        for leaf, tensor in fused(module, parts, count).items():
            keys = [f"{PREFIX}{name}.{leaf}.weight" for name in names.copies(module)]
            out |= dict.fromkeys(keys, TensorSource.of(tensor))
    return out


def _complete(parts: dict[str, Part], name: str, low_rank: LowRank, model: BlockDiffusionModel) -> None:
    """Add an adapter of zeros for the product of experts that has none, if only the other one is adapted."""
    if not name.endswith(".experts"):
        return
    experts: Any = model.get_submodule(name)
    E, D, F = (int(size) for size in experts.held("down_proj").shape)
    for leaf, (inputs, outputs) in {"gate_up": (D, 2 * F), "down": (F, D)}.items():
        names = f"{name}.{leaf}_lora_A", f"{name}.{leaf}_lora_B"
        if parts.keys().isdisjoint(names):
            parts[names[0]] = Part.zeros(E, low_rank.rank, inputs)
            parts[names[1]] = Part.zeros(E, outputs, low_rank.rank)
