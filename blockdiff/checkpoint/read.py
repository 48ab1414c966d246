"""`load`: a checkpoint becomes a model, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaConfig

from blockdiff.checkpoint.config import read_config
from blockdiff.checkpoint.files import DTYPES, SIDE_FILES, Carried, Stored, find, read_tensors, stored_tensors
from blockdiff.checkpoint.names import hub_to_ours, is_carried, tie_of
from blockdiff.errors import CheckpointError
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.family import BlockDiffusionModel


def load(
    path_or_hub_id: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "auto",
    kernels: str = "auto",
) -> BlockDiffusionModel:
    """A model from a Hub-layout directory or a Hub id, in evaluation mode: see `load_weights`."""
    directory = find(path_or_hub_id)
    return load_weights(empty(read_config(directory), kernels), directory, dtype, device)


def empty(config: DiffusionGemmaConfig, kernels: str = "auto") -> BlockDiffusionModel:
    """A model whose weights have shapes but no memory (torch's meta device), to be filled or counted."""
    with torch.device("meta"):
        return DiffusionGemma(config, kernels=kernels)


def load_weights(
    model: BlockDiffusionModel,
    path_or_hub_id: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "auto",
) -> BlockDiffusionModel:
    """Fill an empty model with the weights of a checkpoint, one tensor at a time; returns it, in evaluation mode.

    dtype: of all text parameters, or "auto" for the dtype the embedding table is stored in. device: "auto" is cuda
    where there is one. The host holds little beside the model. What is frozen stays frozen. Image tensors are not
    loaded; saving copies them through. Raises CheckpointError.
    """
    directory = find(path_or_hub_id)
    stored = stored_tensors(directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    source = _match(shapes, stored, directory)

    target = resolve_dtype(dtype, stored[source["vocabulary.table"]])
    place = resolve_device(device)
    filled: dict[str, list[str]] = {}
    for ours, hub in source.items():
        filled.setdefault(hub, []).append(ours)
    for hub, tensor in read_tensors(stored, filled):
        for ours in filled[hub]:
            # A copy even where nothing changes: the tensor read is a view of the file.
            fill(model, ours, torch.empty(tensor.shape, dtype=target, device=place).copy_(tensor))

    model.carried = carried_by(directory, stored)
    return model.eval()


def carried_by(directory: Path, stored: Mapping[str, Stored] | None = None) -> Carried:
    """What a checkpoint directory holds beside the weights that the model runs."""
    stored = stored_tensors(directory) if stored is None else stored
    return Carried(
        stored={name: place for name, place in stored.items() if is_carried(name)},
        side_files=tuple(directory / name for name in SIDE_FILES if (directory / name).is_file()),
    )


def fill(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the parameter or buffer called `name`."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        old = owner._parameters[leaf]
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that "auto" or a name stands for; CheckpointError when it is not there."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise CheckpointError(f"device {str(device)!r} is not known; use auto, cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {str(device)!r} was asked for, but torch finds no CUDA device here")
    return place


def resolve_dtype(dtype: str | torch.dtype, table: Stored | None = None) -> torch.dtype:
    """The dtype that a name stands for ("auto": that of the stored embedding table); CheckpointError if none."""
    if dtype == "auto" and table is not None:
        if table.dtype not in DTYPES:
            raise CheckpointError(f"{table.file}: the table is stored as {table.dtype}; name a dtype")
        return DTYPES[table.dtype]
    named = {str(known).removeprefix("torch."): known for known in DTYPES.values()}
    found = named.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise CheckpointError(f"dtype {str(dtype)!r} is not one of auto, {', '.join(named)}")
    return found


def _match(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], directory: Path
) -> dict[str, str]:
    """Our name -> the Hub tensor that fills it; every stored tensor is used, carried, a tie, or refused."""
    ours_of = hub_to_ours(shapes)
    source, missing = {}, []
    for hub, ours in ours_of.items():
        if hub in stored:
            source[ours] = hub
        elif ours.endswith(".encoder_scalar"):
            # NeMo AutoModel writes only the decoder's.
            source[ours] = f"model.decoder.{hub.removeprefix('model.encoder.language_model.')}"
        else:
            missing.append(hub)
    if missing:
        raise CheckpointError(f"{directory}: {_listed(missing, 'missing')}")

    def known(hub: str) -> bool:
        return hub in ours_of or is_carried(hub) or tie_of(hub) in ours_of

    extra = [hub for hub in stored if not known(hub)]
    if extra:
        raise CheckpointError(f"{directory}: {_listed(extra, 'not part of a DiffusionGemma of this config')}")
    for hub, place in stored.items():
        ours_name = ours_of.get(hub) or ours_of.get(tie_of(hub) or "")
        if ours_name is not None and place.shape != shapes[ours_name]:
            raise CheckpointError(
                f"{place.file}: tensor {hub} has shape {list(place.shape)}, "
                f"the config asks for {list(shapes[ours_name])}"
            )
        if ours_name is not None and place.dtype not in DTYPES:
            raise CheckpointError(
                f"{place.file}: tensor {hub} is stored as {place.dtype}; quantized weights are not read"
            )
    return source


def _listed(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{'tensors' if len(names) > 1 else 'tensor'} {shown} {'are' if len(names) > 1 else 'is'} {what}"
