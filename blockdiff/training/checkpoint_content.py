"""The content of a checkpoint of a run, `checkpoints/step-N`: its files, and the tensors and values in them by name.

It holds weights, optimiser state, averaged weights, step, facts and what the next record of the log has counted so far,
and no random state: every draw is addressed. Its tensors are safetensors files and the rest is JSON, so no file is a
pickle. Where nothing was sharded, a file has whole tensors: `model.safetensors`. Otherwise each rank wrote the pieces
that it owns, `model-RANK.safetensors`, and `pieces.json` says where they lie. `checkpoint_writer` writes it,
`checkpoint_reader` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.checkpoint.files import CHECKPOINTS
from blockdiff.errors import RunError
from blockdiff.models.adapters import is_adapter
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import is_spread

FOLDER, TRAINER, PIECES = CHECKPOINTS, "trainer.json", "pieces.json"
MODEL, OPTIMISER, AVERAGE = KINDS = ("model", "optimiser", "ema")  # the tensors, and how their files begin
FORMAT = 7  # of trainer.json and what it lists; a checkpoint of another one is refused
STREAMED = "data.train: content"  # a fact: of a stream, whose rows may be corrected before a run goes on
ALONE = Ranks(torch.device("cpu"))
SHARED = ("qmap1", "qmap2")  # tables that bitsandbytes keeps once for all parameters
# Of parameter groups: the rate is set before every step, the others say how this machine computes.
NOT_RESTORED = ("lr", "fused", "foreach", "capturable")
_COMPLETE = re.compile(r"step-(\d+)")

Facts = Mapping[str, Any]
JsonValue = str | bool | int | float | None


def steps_saved(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run directory by step, oldest first. A directory so named is complete."""
    found = [(_COMPLETE.fullmatch(path.name), path) for path in (run / FOLDER).glob("step-*")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def require_own_names(objective: nn.Module) -> None:
    """Raises RunError where what an objective has beside its model has a name of the model's: one would be lost."""
    names = list(objective.state_dict())
    shared = {short_name(name) for name in names if short_name(name) != name} & {*names}
    if shared:
        raise RunError(f"objective: its tensor {min(shared)} has the name of one of the model; rename it")


def short_name(name: str) -> str:
    """The name of a tensor of the objective: those of its model without the prefix."""
    return name.removeprefix("model.")


def saved_weights(objective: nn.Module) -> dict[str, Tensor]:
    """The weights in a checkpoint: all tensors of the objective, or of a model with adapters these alone.

    The weights that they adapt do not change; the recipe of the run names the checkpoint that has them.
    """
    state = objective.state_dict()
    if any(is_adapter(short_name(name)) for name in state):
        state = {name: x for name, x in state.items() if is_adapter(short_name(name)) or short_name(name) == name}
    return {short_name(name): tensor for name, tensor in state.items()}


def optimiser_state(objective: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimiser state by `parameter name/key`: the tensors, and the JSON values of parameters and groups.

    Raises RunError for state that could not be given back: what is no tensor or JSON value, and what is spread over
    the ranks in another way than its parameter.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, JsonValue] = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimiser.state.get(parameter, {}).items():
            full_name = f"{short_name(name)}/{key}"
            if isinstance(value, Tensor):
                require_like(full_name, parameter, tuple(value.shape))
                tensors[full_name] = value.detach().clone() if key in SHARED else value.detach()
            elif isinstance(value, JsonValue):
                values[full_name] = value
            else:
                kind = type(value).__name__
                raise RunError(f"optimiser: its state {full_name} is a {kind}; only tensors and plain values are saved")
    groups = [
        {key: value for key, value in group.items() if isinstance(value, JsonValue) and key not in NOT_RESTORED}
        for group in optimiser.param_groups
    ]
    return tensors, {"state": values, "groups": groups}


def require_like(full_name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    """Raise RunError for state of a parameter that is spread over ranks in another way than this shape can be."""
    if is_spread(parameter) and shape and shape != tuple(parameter.shape):
        raise RunError(
            f"optimiser: its state {full_name} has the shape {list(shape)}, so it cannot be spread over ranks as its "
            "parameter is; leave parallel.shard and parallel.experts out, or choose optim.name: adamw"
        )
