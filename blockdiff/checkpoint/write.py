"""`save`: a model becomes a Hub-layout directory that loads in transformers as it is."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from blockdiff.checkpoint.added import added_to, check_whole, write_added
from blockdiff.checkpoint.files import (
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER_FILES,
    Carried,
    read_tensors,
)
from blockdiff.checkpoint.generation import Generation, default_generation
from blockdiff.checkpoint.read import carried_by, resolve_dtype
from blockdiff.errors import CheckpointError
from blockdiff.files import unwritten, whole_directory
from blockdiff.models.adapters import is_adapted
from blockdiff.models.family import BlockDiffusionModel, family_of

SHARD_BYTES = 5 * 10**9


def save(
    model: BlockDiffusionModel,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    generation: Generation | Mapping[str, Any] | None = None,
    choices: Any = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `model` to `directory`, which appears complete or not at all; returns the directory.

    tokenizer: anything with `save_pretrained`; None carries the files of the checkpoint the model came from.
    generation: the settings, or the content of generation_config.json; None carries the old ones or writes the
    defaults. choices: what sampling has to know beyond that (`sampling.Choices`). dtype: cast the text tensors (None:
    as they are); image tensors are written as they were read. overwrite: replace a checkpoint that stands there.
    What a tweaked model class adds is written to `blockdiff.safetensors`. Raises CheckpointError.
    """
    if not isinstance(model, BlockDiffusionModel):
        kind = type(model).__name__
        raise CheckpointError(f"save: a {kind} is no model of this package; give the model itself, not what holds it")
    if is_adapted(model):
        raise CheckpointError("the model has adapters; merge them first (`blockdiff.merge`), or save them alone")
    family_of(model.config).check(model.config)
    check_whole(model)
    target = Path(directory).expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not (target / CONFIG).is_file():
            raise CheckpointError(f"{target} exists and is no checkpoint; choose another directory")
        if not overwrite:
            raise CheckpointError(f"{target} holds a checkpoint already; use another directory or remove it")
    try:
        with whole_directory(target) as fresh:
            _write(model, fresh, tokenizer, generation, dtype, shard_bytes)
            if choices is not None:
                choices.save(fresh)
    except (OSError, SafetensorError) as error:
        tensors = model.state_dict().values()
        needed = sum(tensor.numel() * (resolve_dtype(dtype) if dtype else tensor.dtype).itemsize for tensor in tensors)
        kept = "what stood there is as it was" if target.exists() else "nothing is left of it"
        raise CheckpointError(f"{unwritten(target, error, needed)}; {kept}, choose a place with room") from error
    if model.carried is not None and target in model.carried.directories():
        # the files it pointed to have just been replaced
        model.carried = carried_by(target, family_of(model.config).names)
    return target


def _write(
    model: BlockDiffusionModel,
    fresh: Path,
    tokenizer: Any,
    generation: Generation | Mapping[str, Any] | None,
    dtype: str | torch.dtype | None,
    shard_bytes: int,
) -> None:
    family = family_of(model.config)
    carried = model.carried or Carried(tensors=family.image_tensors(model.config, 0, torch.float32))
    for file in carried.side_files:
        if tokenizer is not None and file.name in TOKENIZER_FILES:
            continue  # the old tokenizer's; a mixture of two would be neither
        if not file.is_file():
            raise CheckpointError(f"{file} has gone since the model was loaded; it cannot be copied")
        shutil.copyfile(file, fresh / file.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
    if generation is not None or not (fresh / GENERATION).exists():
        given = _default_generation(model.config) if generation is None else generation
        _write_json(fresh / GENERATION, given.to_dict() if isinstance(given, Generation) else given)

    added, cast = added_to(model), resolve_dtype(dtype) if dtype is not None else None
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in added}
    ours = {str(family.names.to_hub(name)): tensor for name, tensor in state.items()}
    _write_weights(fresh, ours, carried, cast, shard_bytes)
    write_added(model, fresh, cast)
    for file in fresh.glob("*.safetensors"):  # written such that only their owner can read them, unlike the others
        file.chmod((fresh / GENERATION).stat().st_mode)

    config = copy.deepcopy(model.config)
    config.architectures = [family.architecture]
    config.dtype = cast or model.dtype
    config.save_pretrained(fresh)


def _write_weights(
    fresh: Path, ours: Mapping[str, Tensor], carried: Carried, cast: torch.dtype | None, shard_bytes: int
) -> None:
    """Shards of at most `shard_bytes` (one tensor at least); the host holds one at a time."""
    from huggingface_hub import split_state_dict_into_shards_factory

    sizes = {name: tensor.numel() * (cast or tensor.dtype).itemsize for name, tensor in ours.items()}
    sizes |= {name: tensor.nbytes for name, tensor in carried.tensors.items()}
    sizes |= {name: place.nbytes for name, place in carried.stored.items()}
    split: Any = split_state_dict_into_shards_factory(
        dict(sorted(sizes.items())),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    if split.is_sharded:
        _write_json(fresh / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    for file, names in split.filename_to_tensors.items():
        tensors = {name: ours[name].detach().to("cpu", cast) for name in names if name in ours}
        tensors |= {name: carried.tensors[name].cpu() for name in names if name in carried.tensors}
        tensors |= dict(read_tensors(carried.stored, [name for name in names if name in carried.stored]))
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, fresh / file, metadata={"format": "pt"})


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _default_generation(config: Any) -> dict[str, Any]:
    """generation_config.json for a model that brings none, as transformers would write it."""
    outline = family_of(config).outline(config)
    special = {"bos_token_id": outline.bos, "eos_token_id": outline.eos, "pad_token_id": outline.pad}
    return {**default_generation(config).to_dict(), **special, "transformers_version": transformers.__version__}
