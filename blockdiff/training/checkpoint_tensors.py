"""The tensors of a checkpoint by name: of what trains, of its optimiser's state, and of the average."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.models.adapters import is_adapter
from blockdiff.pieces import is_spread, like, piece_of
from blockdiff.training.saved import OPTIMISER, Saved

SHARED = ("qmap1", "qmap2")  # tables that bitsandbytes keeps once for all parameters
# Of parameter groups: the rate is set before every step, the others say how this machine computes.
NOT_RESTORED = ("lr", "fused", "foreach", "capturable")
Plain = str | bool | int | float | None  # what JSON has


def require_own_names(objective: nn.Module) -> None:
    """Raises RunError where what an objective has beside its model has a name of the model's: one would be lost."""
    names = list(objective.state_dict())
    shared = {_short(name) for name in names if _short(name) != name} & {*names}
    if shared:
        raise RunError(f"objective: its tensor {min(shared)} has the name of one of the model; rename it")


def _short(name: str) -> str:
    """The name of a tensor of the objective: those of its model without the prefix."""
    return name.removeprefix("model.")


def weights_of(objective: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds: all tensors of the objective, or of a model with adapters these alone.

    The weights that they adapt stand still, and the checkpoint that they come from is a fact of the run.
    """
    state = objective.state_dict()
    if any(is_adapter(_short(name)) for name in state):
        state = {name: x for name, x in state.items() if is_adapter(_short(name)) or _short(name) == name}
    return {_short(name): tensor for name, tensor in state.items()}


def fill(checkpoint: Path, kind: str, tensors: Mapping[str, Tensor], saved: Saved) -> None:
    """Give tensors the values that a checkpoint has for them, each rank its own pieces.

    Raises RunError naming the first that is missing or of another shape or dtype, before any is changed.
    """
    ours = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
    theirs = {name: f"{found.dtype} {list(found.shape)}" for name, found in saved.tensors(kind).items()}
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "missing"), ours.get(name, "missing")
            raise RunError(f"{checkpoint / kind}.safetensors: {name} is {there} there and {here} in the model")
    with torch.no_grad():
        for name, tensor in tensors.items():
            piece = piece_of(tensor)
            saved.copy(kind, name, piece.block, piece.local)


def pack(objective: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: the tensors, and the plain values of parameters and groups.

    Raises RunError for state that could not be given back: what is no tensor or plain value, and what is spread over
    the ranks in another way than its parameter.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Plain] = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            full_name = f"{_short(name)}/{key}"
            if isinstance(value, Tensor):
                _require_like(full_name, parameter, tuple(value.shape))
                tensors[full_name] = value.detach().clone() if key in SHARED else value.detach()
            elif isinstance(value, Plain):
                values[full_name] = value
            else:
                kind = type(value).__name__
                raise RunError(f"optimiser: its state {full_name} is a {kind}; only tensors and plain values are saved")
    groups = [
        {key: value for key, value in group.items() if isinstance(value, Plain) and key not in NOT_RESTORED}
        for group in optimiser.param_groups
    ]
    return tensors, {"state": values, "groups": groups}


def unpack(
    checkpoint: Path, objective: nn.Module, optimiser: torch.optim.Optimizer, saved: Saved, values: dict[str, Any]
) -> None:
    """Give an optimiser what `pack` made, each rank its own pieces; RunError for a parameter that does not train now.

    State in the shape of its parameter is spread as that is now; other state is the same on all ranks.
    """
    named = {_short(name): parameter for name, parameter in objective.named_parameters()}
    place = {
        parameter: index
        for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for full_name in (*saved.tensors(OPTIMISER), *values["state"]):
        name, _, key = full_name.rpartition("/")
        parameter = named.get(name)
        if parameter is None or parameter not in place:
            raise RunError(
                f"{checkpoint / OPTIMISER}.safetensors: {name} was trained in the run to resume and is not trained now"
            )
        value: Any = values["state"].get(full_name)
        if (found := saved.tensors(OPTIMISER).get(full_name)) is not None:
            _require_like(full_name, parameter, found.shape)
            has_its_shape = found.shape == tuple(parameter.shape)
            block = piece_of(parameter).block if has_its_shape else None
            value = saved.read(OPTIMISER, full_name, block)
            # One at a time goes where it stays, so that the host does not hold the state of all parameters.
            value = like(parameter, value.to(parameter.device)) if has_its_shape else value
        state.setdefault(place[parameter], {})[key] = value
    groups = optimiser.state_dict()["param_groups"]
    for group, kept in zip(groups, values["groups"], strict=False):
        group |= kept
    # load_state_dict puts every tensor where this optimiser wants it (the step counter of a fused one, say).
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _require_like(full_name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    if is_spread(parameter) and shape and shape != tuple(parameter.shape):
        raise RunError(
            f"optimiser: its state {full_name} has the shape {list(shape)}, so it cannot be spread over ranks as its "
            "parameter is; leave parallel.shard and parallel.experts out, or choose optim.name: adamw"
        )
