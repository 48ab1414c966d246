"""The tensors of a checkpoint by name: of what trains, and of its optimiser's state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.errors import RunError
from blockdiff.models.adapters import is_adapter

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


def load_weights(path: Path, objective: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill the tensors of an objective; RunError naming the first that is missing or of another shape or dtype."""
    state = weights_of(objective)
    _refuse_difference(path, _shapes(state), _shapes(weights))
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])


def pack(objective: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: the tensors, and the plain values of parameters and groups."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Plain] = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            full_name = f"{_short(name)}/{key}"
            if isinstance(value, Tensor):
                value = value.detach().contiguous()
                tensors[full_name] = value.clone() if key in SHARED else value
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
    path: Path,
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    values: dict[str, Any],
) -> None:
    """Give an optimiser what `pack` made; RunError naming a parameter that is not trained now."""
    named = {_short(name): parameter for name, parameter in objective.named_parameters()}
    place = {
        parameter: index
        for index, parameter in enumerate(p for group in optimiser.param_groups for p in group["params"])
    }
    state: dict[int, dict[str, Any]] = {}
    for full_name, value in {**tensors, **values["state"]}.items():
        name, _, key = full_name.rpartition("/")
        parameter = named.get(name)
        if parameter is None or parameter not in place:
            raise RunError(f"{path}: {name} was trained in the run to resume and is not trained now")
        state.setdefault(place[parameter], {})[key] = value
    groups = optimiser.state_dict()["param_groups"]
    for group, saved in zip(groups, values["groups"], strict=False):
        group |= saved
    # load_state_dict puts every tensor where this optimiser wants it (the step counter of a fused one, say).
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def _shapes(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in state.items()}


def _refuse_difference(path: Path, ours: dict[str, str], theirs: dict[str, str]) -> None:
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            saved, wanted = theirs.get(name, "missing"), ours.get(name, "missing")
            raise RunError(f"{path}: {name} is {saved} there and {wanted} in the model")
