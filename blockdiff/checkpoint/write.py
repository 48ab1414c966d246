"""`save`: write a model as a Hub-layout directory that transformers loads as it is."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from blockdiff.checkpoint.added import added_metadata, added_to, check_whole, is_own_class
from blockdiff.checkpoint.assembled import file_tensors, fused_in_files
from blockdiff.checkpoint.digests import write_digests
from blockdiff.checkpoint.files import ADDED, CONFIG, GENERATION, INDEX, TOKENIZER_FILES, Carried
from blockdiff.checkpoint.gathering import Gathering
from blockdiff.checkpoint.generation import Generation, default_generation
from blockdiff.checkpoint.images import drawn_images
from blockdiff.checkpoint.quantization_config import written_words
from blockdiff.checkpoint.read import carried_by, resolve_dtype
from blockdiff.checkpoint.remote_code import words_of_missing
from blockdiff.checkpoint.stored import activations_of, parts_in_files, written_forms
from blockdiff.checkpoint.stream import TensorSource, in_order, write_stream
from blockdiff.data.images import PROCESSORS
from blockdiff.errors import CheckpointError
from blockdiff.files import room_remedy, unwritten, whole_directory, write_json
from blockdiff.layers.weights import dtype_of
from blockdiff.models.adapters import is_adapted
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers

SHARD_BYTES = 5 * 10**9


def save(
    model: BlockDiffusionModel,
    directory: str | Path,
    tokenizer: Any = None,
    *,
    generation: Generation | Mapping[str, Any] | None = None,
    diffusion: Any = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    weights: Mapping[str, TensorSource] | None = None,
) -> Path:
    """Write `model` to `directory`, which appears complete or not at all; returns the directory.

    tokenizer: anything with `save_pretrained`, saved with the image processor beside it (None: the files of the
    checkpoint that the model came from are copied). generation: the settings, or the content of generation_config.json
    (None: the old file is copied, or the defaults are written). diffusion: the `DiffusionSettings` to write beside
    them. dtype: cast the text tensors (None: no cast; weights in fewer bits are never cast); image tensors are written
    as they were read. overwrite: replace a checkpoint in `directory`. shard_bytes: the most bytes of a file with
    several tensors. weights: written in place of the model's own tensors, by the same names.

    Tensors that a custom model class adds are written to `blockdiff.safetensors`. One tensor is read and written at a
    time. If the model is sharded, all ranks call this together: each tensor is gathered, and rank 0 writes. Raises
    CheckpointError.
    """
    if not isinstance(model, BlockDiffusionModel):
        kind = type(model).__name__
        raise CheckpointError(f"save: a {kind} is no model of this package; give the model itself, not what holds it")
    if is_adapted(model):
        raise CheckpointError("the model has adapters; merge them first (`blockdiff.merge`), or save them alone")
    model.config.require_written()
    check_whole(model)
    target = Path(directory).expanduser().absolute()
    cast = None if dtype is None else resolve_dtype(dtype)
    carried = model.carried or Carried()
    if model.carried is None and model.image_side is None:
        carried = Carried(tensors=drawn_images(model.config, 0, torch.float32))
    state = model.state_dict()
    gathering = Gathering(state.values())
    if weights is None:
        fixed = {f"{name}.{leaf}" for name, module in stored_layers(model).items() for leaf in module._buffers}
        casts = {name: None if cast is None or name in fixed else dtype_of(name, cast) for name in state}
        sources = {name: gathering.source(state[name], casts[name]) for name in state}
    else:
        sources = dict(weights)
    if (words := words_of_missing(model.config.values, carried.side_files)) is not None:
        warnings.warn(words, stacklevel=2)
    files, index = _divided_into_files(model, sources, carried, shard_bytes)
    in_turn = [file[name] for file in files.values() for name in in_order(file)]
    gathering.order = [first for source in in_turn for first in source.first_sources()]

    def write() -> None:
        _require_free(target, overwrite)
        try:
            with whole_directory(target) as fresh:
                _write(model, fresh, files, index, carried, tokenizer, generation, cast)
                if diffusion is not None:
                    diffusion.save(fresh)
        except (OSError, SafetensorError) as error:
            bytes_to_write = sum(source.nbytes for sources in files.values() for source in sources.values())
            outcome = "what stood there is as it was" if target.exists() else "nothing is left of it"
            raise CheckpointError(
                f"{unwritten(target, error, bytes_to_write)}; {outcome}; {room_remedy(error)}, or choose another place"
            ) from error

    gathering.run(write)
    if model.carried is not None and target in model.carried.directories():
        # the files it pointed to have just been replaced
        model.carried = carried_by(target, model)
    return target


def _require_free(target: Path, overwrite: bool) -> None:
    """Raise CheckpointError if `target` has content, unless it is a checkpoint and `overwrite` is True."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not (target / CONFIG).is_file():
            raise CheckpointError(f"{target} exists and is no checkpoint; choose another directory")
        if not overwrite:
            raise CheckpointError(f"{target} holds a checkpoint already; use another directory or remove it")


def _write(
    model: BlockDiffusionModel,
    fresh: Path,
    files: Mapping[str, Mapping[str, TensorSource]],
    index: Mapping[str, Any] | None,
    carried: Carried,
    tokenizer: Any,
    generation: Generation | Mapping[str, Any] | None,
    cast: torch.dtype | None,
) -> None:
    for file in carried.side_files:
        if tokenizer is not None and file.name in TOKENIZER_FILES:
            continue  # files of two tokenizers must not be mixed
        if not file.is_file():
            raise CheckpointError(f"{file} has gone since the model was loaded; it cannot be copied")
        shutil.copyfile(file, fresh / file.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
        came_from = getattr(tokenizer, "name_or_path", "")  # a directory or a Hub id
        for file in (Path(came_from) / name for name in PROCESSORS if came_from):
            if file.is_file() and not (fresh / file.name).exists():
                shutil.copyfile(file, fresh / file.name)
    if generation is not None or not (fresh / GENERATION).exists():
        settings = _default_generation(model.config, tokenizer) if generation is None else generation
        write_json(fresh / GENERATION, settings.to_dict() if isinstance(settings, Generation) else settings)
    if index is not None:
        write_json(fresh / INDEX, index)
    metadata = {name: {"format": "pt"} | (added_metadata(model) if name == ADDED else {}) for name in files}
    write_digests(fresh, {name: write_stream(fresh / name, files[name], metadata[name]) for name in files})
    dtype = str(cast or model.kept_dtype).removeprefix("torch.")
    write_json(fresh / CONFIG, model.config.written(dtype, written_words(model, written_forms(model))))


def _divided_into_files(
    model: BlockDiffusionModel, tensors: dict[str, TensorSource], carried: Carried, shard_bytes: int
) -> tuple[dict[str, dict[str, TensorSource]], dict[str, Any] | None]:
    """Return the tensors of every file, and the index if the weights are in several files (else None).

    A file has at most `shard_bytes` bytes, or one tensor.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    names = model.config.names
    added = {name: tensors.pop(name) for name in added_to(model)}
    sources: dict[str, TensorSource] = {}
    forms = written_forms(model)
    for weight, part, source in parts_in_files(model, tensors, forms):
        sources |= file_tensors(str(names.to_hub(weight)), source, names, part)
    for name, source in tensors.items():
        sources |= file_tensors(str(names.to_hub(name)), source, names)
    sources = fused_in_files(sources, names)
    sources |= {name: TensorSource.of(tensor) for name, tensor in carried.tensors.items()}
    as_they_are = {**carried.stored, **activations_of(model, forms)}
    sources |= {name: TensorSource.stored(name, in_file) for name, in_file in as_they_are.items()}
    split: Any = split_state_dict_into_shards_factory(
        {name: sources[name].nbytes for name in sorted(sources)},
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    files = {file: {name: sources[name] for name in held} for file, held in split.filename_to_tensors.items()}
    if added or not is_own_class(model):
        files[ADDED] = added
    return files, {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None


def _default_generation(config: Family, tokenizer: Any) -> dict[str, Any]:
    """Return the content of generation_config.json for a model without one, as transformers would write it."""
    settings = default_generation(config, tokenizer)
    special: dict[str, Any] = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    if len(settings.eos_ids) < 2:
        special["eos_token_id"] = config.eos_token_id
    return {**settings.to_dict(), **special, "transformers_version": transformers.__version__}
