"""`load_weights`: fill an empty model with the weights of a checkpoint, tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff import memory
from blockdiff.checkpoint.added import added_to, fill, leave_out, listed, read_added, tensor_shapes
from blockdiff.checkpoint.assembled import Assembled, assembled, read_assembled, read_stored, read_whole, stored_apart
from blockdiff.checkpoint.config import read_config
from blockdiff.checkpoint.file_forms import ACTIVATIONS
from blockdiff.checkpoint.files import (
    DTYPES,
    INTEGER,
    SIDE_FILES,
    Carried,
    Stored,
    find,
    read_blocks,
    stored_tensors,
)
from blockdiff.checkpoint.remote_code import code_files
from blockdiff.checkpoint.stored import forms_in_files
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.devices import resolve_device
from blockdiff.errors import CheckpointError
from blockdiff.kernels import Kernels
from blockdiff.kernels.stored import StoredMatrix
from blockdiff.layers.weights import Form, dtype_of, is_scale, is_wide
from blockdiff.models.adapters import is_adapter
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.names import Names
from blockdiff.models.stored import frozen_weights, rounded_bytes
from blockdiff.tensor_pieces import Block, is_spread, local_of, piece_of


def empty(
    config: Family, kernels: str | Kernels = "auto", model: type[BlockDiffusionModel] | None = None
) -> BlockDiffusionModel:
    """Return a model whose weights have shapes but no memory (torch's meta device), to be filled or counted.

    model: a subclass of the family's model class to make instead; the tensors that it adds are saved beside the
    weights. Raises CheckpointError if the config's family is unknown, or its models do not support the config.
    """
    family_class = config.model_class
    if model is not None and not isinstance(model, type):
        raise CheckpointError(f"model: an instance of {type(model).__name__}; give the class, which is filled anew")
    if model is not None and not issubclass(model, family_class):
        raise CheckpointError(
            f"{model.__name__} is no subclass of {family_class.__name__}, the model of {config.model_type}"
        )
    with torch.device("meta"):
        return (model or family_class)(config, kernels=kernels)


def load_weights(
    model: BlockDiffusionModel,
    path_or_hub_id: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> BlockDiffusionModel:
    """Fill an empty model with the weights of a checkpoint, one tensor at a time; returns it, in evaluation mode.

    dtype: of all text parameters, or "auto" for the dtype of the stored embedding table. device: "auto" is cuda if
    there is a GPU. The host holds one tensor in addition to the model. Each rank of a sharded model reads only its part
    of every tensor, on the device and in the dtype of its parameters. Frozen parameters stay frozen. Image tensors fill
    the image side if the model has one; else they are only copied on saving. Tensors that the model's class adds to its
    family are read from `blockdiff.safetensors`; without that file, `reset_parameters` of their modules sets them.
    Weights that the model stores in fewer bits are rounded to that form if the file has another. Raises
    CheckpointError.
    """
    directory = find(path_or_hub_id)
    names = model.config.names
    in_files = stored_apart(directory, names)
    stored = assembled(in_files, names)
    for hub in names.optional:
        if hub not in stored:
            leave_out(model, str(names.to_ours(hub)))
    added = added_to(model)
    shapes = {name: shape for name, shape in tensor_shapes(model).items() if name not in added}
    source = _match(shapes, stored, directory, names)
    _require_numbers(model, source, stored)

    target = resolve_dtype(dtype, stored[source[model.typical]])
    target_device = resolve_device(device)
    require_dtype(model, target)
    require_room(model, target, target_device)
    read_added(model, directory, target, target_device)
    state = model.state_dict()
    filled: dict[tuple[str, Block | None], list[str]] = {}
    frozen = frozen_weights(model)
    for ours, hub in source.items():
        if ours in frozen:
            continue
        block = piece_of(state[ours]).block if is_spread(state[ours]) else None
        filled.setdefault((hub, block), []).append(ours)
    sums = {}
    from_parts = {hub: in_file for hub, in_file in stored.items() if isinstance(in_file, Assembled)}
    whole = [block_of for block_of in filled if block_of[0] not in from_parts]
    parted = [block_of for block_of in filled if block_of[0] in from_parts]
    for hub, block, tensor in chain(read_blocks(stored, whole), read_assembled(from_parts, parted)):
        for ours in filled[hub, block]:
            # A copy even if nothing changes, because the tensor is a view of the file.
            is_float = state[ours].is_floating_point()
            kept_as = dtype_of(ours, target) if is_float else state[ours].dtype
            filling = torch.empty(tensor.shape, dtype=kept_as, device=target_device).copy_(tensor)
            fill(model, ours, filling, is_local=True)
        if tensor.dim() and is_float:  # a scalar may be an infinite limit on purpose
            sums[filled[hub, block][0]] = filling.sum(dtype=torch.float32 if target == torch.float16 else None)
    for ours in sorted(frozen, key=lambda name: (str(stored[source[name]].file), name)):
        module, weight = frozen[ours]
        assert module.stored is not None
        # The device may have room only for this rank's part of a spread tensor.
        device = torch.device("cpu") if is_spread(state[ours]) else target_device
        matrix = _stored_matrix(stored, source[ours], module.stored, device)
        for leaf, part in module.named_parts(weight, matrix):
            name = f"{ours.removesuffix(weight)}{leaf}"
            fill(model, name, part if is_spread(state[name]) else part.to(target_device))
            if part.is_floating_point():
                sums[name], source[name] = part.sum(), source[ours]
    _warn_of_not_finite(model, directory, sums, source)

    model.carried = carried_by(directory, model, in_files)
    return model.eval()


def stored_weights(model: BlockDiffusionModel, directory: Path) -> dict[str, TensorSource]:
    """Return the tensors of a model in a checkpoint, by our names and in any form that `load_weights` accepts.

    Each tensor is read on use. Raises CheckpointError.
    """
    model.config.require_written()
    names, added = model.config.names, added_to(model)
    stored = assembled(stored_apart(directory, names), names)
    shapes = {name: shape for name, shape in tensor_shapes(model).items() if name not in added}
    sources = {}
    source = _match(shapes, stored, directory, names)
    _require_numbers(model, source, stored)
    for ours, hub in source.items():
        in_file = stored[hub]
        sources[ours] = TensorSource(in_file.shape, DTYPES[in_file.dtype], partial(read_whole, in_file, hub))
    return sources


def stored_matrices(model: BlockDiffusionModel, directory: Path) -> Callable[[str, Form], StoredMatrix]:
    """Return a function that reads a weight, by our name, in a form: as it is stored, or rounded to the form."""
    names = model.config.names
    stored = assembled(stored_apart(directory, names), names)
    source = _match(tensor_shapes(model), stored, directory, names)
    return lambda name, form: _stored_matrix(stored, source[name], form, torch.device("cpu"))


def _warn_of_not_finite(
    model: nn.Module, directory: Path, sums: Mapping[str, Tensor], source: Mapping[str, str]
) -> None:
    """Warn once if weights are not finite. Each rank of a sharded model checks its own.

    sums: the sum of each weight, which is cheap. Finite weights may have an infinite sum, too, so weights with such a
    sum are examined.
    """
    is_finite = torch.stack(list(sums.values())).isfinite().tolist()
    state = model.state_dict()
    wrong = [
        source[ours]
        for ours, fine in zip(sums, is_finite, strict=True)
        if not fine and not bool(local_of(state[ours]).isfinite().all())
    ]
    if wrong:
        warnings.warn(f"{directory}: {_are(wrong, 'not finite')}; the model answers nothing with them", stacklevel=3)


def _stored_matrix(stored: Mapping[str, Stored], hub: str, form: Form, device: torch.device) -> StoredMatrix:
    """Return a weight in a form on a device: as the checkpoint has it, or rounded there."""
    in_file = stored[hub]
    if isinstance(in_file, Assembled) and in_file.form is form:
        parts: Any = read_stored(in_file)
        return form(*(part.to(device, copy=True) for part in parts))
    return form.nearest(read_whole(in_file, hub).to(device))


def carried_by(directory: Path, model: BlockDiffusionModel, stored: Mapping[str, Stored] | None = None) -> Carried:
    """Return the contents of a checkpoint directory except the weights that the model runs."""
    names, stored = model.config.names, stored_apart(directory, model.config.names) if stored is None else stored
    has_images = model.image_side is not None
    return Carried(
        forms=forms_in_files(assembled(stored, names), model),
        activations={hub: in_file for hub, in_file in stored.items() if hub.endswith(ACTIVATIONS)},
        stored={hub: in_file for hub, in_file in stored.items() if names.is_carried(hub, has_images)},
        side_files=(
            *(directory / name for name in SIDE_FILES if (directory / name).is_file()),
            *code_files(model.config.values, directory),
        ),
        origin=directory,
    )


def require_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a model was sharded in another dtype, which its parameters keep."""
    for name, tensor in model.state_dict().items():
        is_fixed = tensor.dtype == torch.uint8 or is_scale(name) or is_wide(name) or is_adapter(name)
        if is_spread(tensor) and tensor.dtype != dtype and not is_fixed:
            name_of_dtype = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name} is sharded as {tensor.dtype}, {name_of_dtype} was asked for; cast the model before"
            )


def require_room(model: BlockDiffusionModel, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BlockdiffError if a device has no room for the weights of an empty model.

    Sharded tensors have their memory already and are not counted.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if not is_spread(tensor)}
    held = {name: tensor.nbytes for name, tensor in state.items() if tensor.dtype == torch.uint8 or is_scale(name)}
    numbers = sum(tensor.numel() for name, tensor in state.items() if name not in held)
    fixed, smaller = sum(held.values()), {}
    if dtype.itemsize > 2:
        smaller['dtype="bfloat16"'] = numbers * 2 + fixed
    if not held and not any(map(is_adapter, state)):
        smaller |= {f'quantize="{word}"': size for word, size in rounded_bytes(model, dtype.itemsize).items()}
    memory.require({"weights": numbers * dtype.itemsize + fixed}, device, smaller)


def resolve_dtype(dtype: str | torch.dtype, table: Stored | None = None) -> torch.dtype:
    """Return the torch dtype called `dtype`; CheckpointError if there is none.

    "auto" is the dtype of the stored embedding table `table`, and is refused if that is None.
    """
    if dtype == "auto" and table is not None:
        if table.dtype not in DTYPES:
            raise CheckpointError(f"{table.file}: the table is stored as {table.dtype}; name a dtype")
        return DTYPES[table.dtype]
    named = {str(known).removeprefix("torch."): known for known in DTYPES.values()}
    result = named.get(str(dtype).removeprefix("torch."))
    if result is None:
        raise CheckpointError(f"dtype {str(dtype)!r} is not one of auto, {', '.join(named)}")
    return result


def weights_dtype(dtype: str, path_or_hub_id: str | None) -> torch.dtype:
    """Return the dtype that a model's weights will have.

    "auto" is the dtype of the checkpoint's embedding table, or fp32 if there is no checkpoint.
    """
    if dtype != "auto" or path_or_hub_id is None:
        return resolve_dtype("float32" if dtype == "auto" else dtype)
    directory = find(path_or_hub_id)
    config = read_config(directory)
    return resolve_dtype(dtype, stored_tensors(directory).get(str(config.names.to_hub(config.model_class.typical))))


def _match(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], directory: Path, names: Names
) -> dict[str, str]:
    """Map each of our tensor names to the Hub tensor that fills it, which may be one that it is tied to.

    Raises CheckpointError if a tensor is missing or has another shape, and if a stored one belongs to no model of this
    config.
    """
    ours_of = names.hub_to_ours(shapes)
    source, without_tensors = {}, []
    for hub, ours in ours_of.items():
        if hub in stored:
            source[ours] = hub
        elif (tied := names.tied_to(hub)) in stored:
            source[ours] = str(tied)  # NeMo AutoModel writes one layer scalar for both passes
        else:
            without_tensors.append(hub)
    if without_tensors:
        raise CheckpointError(f"{directory}: {_are(without_tensors, 'missing')}")

    extra = [hub for hub in stored if names.ours_among(hub, shapes) is None and not names.is_carried(hub)]
    if extra:
        raise CheckpointError(f"{directory}: {_are(extra, 'not part of a model of this config')}")
    for hub, in_file in stored.items():
        ours_name = names.ours_among(hub, shapes)
        if ours_name is not None and in_file.shape != shapes[ours_name]:
            raise CheckpointError(
                f"{in_file.file}: tensor {hub} has shape {list(in_file.shape)}, "
                f"the config asks for {list(shapes[ours_name])}"
            )
        if ours_name is not None and in_file.dtype not in (*DTYPES, INTEGER):
            raise CheckpointError(
                f"{in_file.file}: tensor {hub} is stored as {in_file.dtype}; quantized weights are not read"
            )
    return source


def _require_numbers(model: nn.Module, source: Mapping[str, str], stored: Mapping[str, Stored]) -> None:
    """Raise CheckpointError if a tensor is stored as integers but has real numbers in the model."""
    state = model.state_dict()
    for ours, hub in source.items():
        if stored[hub].dtype == INTEGER and state[ours].is_floating_point():
            raise CheckpointError(
                f"{stored[hub].file}: tensor {hub} is stored as {INTEGER}, and the model has real numbers there; "
                "write the file again"
            )


def _are(names: list[str], what: str) -> str:
    return f"{'tensors' if len(names) > 1 else 'tensor'} {listed(names)} {'are' if len(names) > 1 else 'is'} {what}"
