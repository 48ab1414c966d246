"""Freezing of parameters by pattern, and the table that shows which train."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from blockdiff.errors import RunError
from blockdiff.models.adapters import is_adapter
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import frozen_weights

_LAYER = re.compile(r"(?<![^.])layers\.\d+\.")


class PartCounts(NamedTuple):
    """A row of the table: a part of the model, its number of tensors, and its trained and frozen parameters."""

    part: str
    tensors: int
    trained: int
    frozen: int


def freeze(model: BlockDiffusionModel, patterns: Sequence[str], trains_routers: bool = True) -> dict[str, int]:
    """Freeze the parameters whose names match a pattern (`*`, `?`, `[ab]`).

    Returns how many elements each pattern matches. It also freezes parameters that no loss reaches and, unless
    `trains_routers`, the routers. Raises RunError if a pattern matches nothing (it then names similar ones), if the
    model has adapters and a pattern matches none of them, or if nothing would train.
    """
    named = dict(model.named_parameters())
    for part in model.config.selecting_parts:
        for parameter in model.parameters_of(part):
            parameter.requires_grad_(False)
    if not trains_routers:
        for parameter in model.parameters_of("router"):
            parameter.requires_grad_(False)
    counts, is_adapted = dict[str, int](), any(map(is_adapter, named))
    for pattern in patterns:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise RunError(f"optim.freeze: {pattern!r} matches no parameter{_close(pattern, list(named))}")
        if is_adapted and not any(map(is_adapter, matching)):
            raise RunError(
                f"optim.freeze: {pattern!r} matches no adapter, but only adapters train; leave it out, "
                "or match some (*lora_*)"
            )
        counts[pattern] = sum(named[name].numel() for name in matching)
    frozen = {name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not any(parameter.requires_grad and name not in frozen for name, parameter in named.items()):
        raise RunError(f"optim.freeze: {', '.join(patterns)} leave nothing to train; freeze less")
    for name in frozen:
        named[name].requires_grad_(False)
    return counts


def count_parts(model: BlockDiffusionModel) -> list[PartCounts]:
    """Count the parameters of each part of a model's family, in the model's order; weights in fewer bits come last."""
    sums = dict[str, list[int]]()
    frozen = {name: module.held(weight) for name, (module, weight) in frozen_weights(model).items()}
    for name, weight in (dict(model.named_parameters()) | frozen).items():
        row = sums.setdefault(model.config.part_of(name), [0, 0, 0])
        row[0] += 1
        row[2 if name in frozen or not weight.requires_grad else 1] += math.prod(weight.shape)
    return [PartCounts(part, *row) for part, row in sums.items()]


def _close(pattern: str, names: list[str]) -> str:
    """Suggest similar names. Layers look alike, so their numbers are written as `*`."""
    kinds = list(dict.fromkeys(_LAYER.sub("layers.*.", name) for name in names))
    close = get_close_matches(pattern, kinds, n=3, cutoff=0.4)
    return f"; close are {', '.join(close)}" if close else f"; names look like {', '.join(kinds[:3])}"
