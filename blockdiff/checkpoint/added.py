"""Tensors without Hub names, in `blockdiff.safetensors` beside the weights.

A custom model class adds such tensors to its family's, and `convert` adds them to a causal model's. The rest of the
checkpoint is the family's own, so transformers loads it as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from blockdiff.checkpoint.files import ADDED, metadata_in, tensors_in
from blockdiff.errors import CheckpointError
from blockdiff.layers.weights import is_scale
from blockdiff.models.adapters import is_adapter
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import frozen_weights
from blockdiff.tensor_pieces import fill_piece, is_spread, local_of

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(model: nn.Module) -> Shapes:
    """Return the shapes of a model's tensors, by our names, without adapters and scales.

    A weight that is stored in fewer bits has the shape of its matrix.
    """
    state = model.state_dict().items()
    shapes = {name: tuple(tensor.shape) for name, tensor in state if not is_adapter(name) and not is_scale(name)}
    return shapes | {name: module.held(weight).shape for name, (module, weight) in frozen_weights(model).items()}


def added_to(model: BlockDiffusionModel) -> Shapes:
    """Return the shapes of a model's tensors that Hub checkpoints of its family do not have, by our names."""
    family_model, to_hub = _own(model), model.config.names.to_hub
    return {
        name: shape for name, shape in tensor_shapes(model).items() if name not in family_model or to_hub(name) is None
    }


def beyond_family(model: BlockDiffusionModel) -> Shapes:
    """Return the shapes of a model's tensors that the family's own model of this config does not have."""
    family_model = _own(model)
    return {name: shape for name, shape in tensor_shapes(model).items() if name not in family_model}


def check_whole(model: BlockDiffusionModel) -> None:
    """Raise CheckpointError if the model, once saved, could not be loaded again.

    That is so if a tensor of its config is missing or has another shape, or if a model of the family's own class has
    additional tensors.
    """
    shapes, family_model = tensor_shapes(model), _own(model)
    for name, shape in family_model.items():
        if name not in shapes:
            raise CheckpointError(f"the model has no {name}, which its config asks for; it cannot be saved")
        if shapes[name] != shape:
            raise CheckpointError(
                f"{name} has the shape {list(shapes[name])}, the config asks for {list(shape)}; it cannot be saved"
            )
    added = [name for name in shapes if name not in family_model]
    if added and is_own_class(model):
        raise CheckpointError(
            f"the model has {listed(added)}, which a {_model_class(model).__name__} has not; add it in a subclass, "
            "whose instances can be saved and loaded (load(..., model=...))"
        )


def added_metadata(model: BlockDiffusionModel) -> dict[str, str]:
    """Return the metadata of `blockdiff.safetensors`: the model class. It exists even if no tensor is added."""
    return {"class": _model_class(model).__qualname__}


def read_added(model: BlockDiffusionModel, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the tensors that a model's class adds from `blockdiff.safetensors`; without that file, draw them.

    Raises CheckpointError if the file belongs to another class, and if it is missing although the config requires it.
    """
    file, added = directory / ADDED, added_to(model)
    if not file.exists():
        if unnamed := [name for name in added if name not in beyond_family(model)]:
            raise CheckpointError(
                f"{directory}: no {ADDED}, which has {listed(unnamed)} of a model with this config; "
                "`blockdiff init --from` makes one of a causal model"
            )
        draw_added(model, 0, dtype, device)
        return
    name_of_class, tensors = added_in(directory)
    if tensors != added or not (added or not is_own_class(model)):
        raise CheckpointError(
            f"{file}: holds what the model class {name_of_class} adds ({listed(list(tensors))}); load it with model=, "
            f"that class; {_model_class(model).__name__} adds {listed(list(added))}"
        )
    for name, tensor in load_file(file).items():
        fill(model, name, _cast(tensor, dtype, device))


def added_in(directory: Path) -> tuple[str, Shapes]:
    """Return the name of the model class that `blockdiff.safetensors` belongs to, and the shapes of its tensors.

    Only the header is read. Raises CheckpointError if the file cannot be read.
    """
    shapes = {name: stored.shape for name, stored in tensors_in(directory / ADDED).items()}
    return metadata_in(directory / ADDED).get("class", "another class"), shapes


def draw_added(model: BlockDiffusionModel, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fill the tensors that a model's class adds by the `reset_parameters` of their modules, drawn from `seed`.

    Raises CheckpointError if a module has no such method (torch's own layers have it).
    """
    added, state = beyond_family(model), model.state_dict(keep_vars=True)
    spread = {name: state[name] for name in added if is_spread(state[name])}
    for name in added:
        _put(model, name, torch.zeros(state[name].shape, dtype=state[name].dtype))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for owner in dict.fromkeys(name.rpartition(".")[0] for name in added):
            module: Any = model.get_submodule(owner)
            if not hasattr(module, "reset_parameters"):
                kind = type(module).__name__
                raise CheckpointError(f"no file has what {kind} adds ({owner}), and it has no reset_parameters()")
            module.reset_parameters()
    state = model.state_dict()
    for name in added:
        if name in spread:
            _put(model, name, spread[name])
        fill(model, name, _cast(state[name].detach(), dtype, device))


def fill(model: nn.Module, name: str, tensor: Tensor, is_local: bool = False) -> None:
    """Replace the parameter or buffer `name` by `tensor`.

    One that is spread over ranks is kept, and this rank's piece of `tensor` is copied into it. is_local: `tensor` is
    that piece already.
    """
    owner, leaf = _place(model, name)
    there = owner._parameters.get(leaf, owner._buffers.get(leaf))
    if there is None or not is_spread(there):
        _put(model, name, tensor)
    elif is_local:
        local_of(there).copy_(tensor)
    else:
        fill_piece(there, tensor)


def leave_out(model: nn.Module, name: str) -> None:
    """Remove the parameter or buffer `name` from the model: it becomes None."""
    owner, leaf = _place(model, name)
    setattr(owner, leaf, None)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer `name`. A plain tensor becomes a parameter with the old `requires_grad`."""
    owner, leaf = _place(model, name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    elif isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
    else:
        old = owner._parameters[leaf]
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=old is not None and old.requires_grad)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner_name, _, leaf = name.rpartition(".")
    return model.get_submodule(owner_name), leaf


def listed(names: list[str]) -> str:
    """Return the first three names as text, with the number of the others."""
    return (", ".join(names[:3]) or "nothing") + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _own(model: BlockDiffusionModel) -> Shapes:
    """Return the shapes of the tensors of the family's own model of the same config."""
    config = model.config
    with torch.device("meta"):
        family_model = config.model_class(config, model.kernels)
        family_model.image_side = None if model.image_side is None else config.image_side()
    return tensor_shapes(family_model)


def is_own_class(model: BlockDiffusionModel) -> bool:
    """Return True if the model is of its family's own class, not of a subclass."""
    return _model_class(model) is model.config.model_class


def _model_class(model: nn.Module) -> type:
    """Return the class that a model had before FSDP2 replaced it by a subclass."""
    if not hasattr(model, "set_reshard_after_forward"):
        return type(model)
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _cast(tensor: Tensor, dtype: torch.dtype | None, device: Any) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
