"""`Built`: the parts of a run, as `build` makes them; `Source`: where the batches of its optimiser steps come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blockdiff.canvas import Batch
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.metrics import Record
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.data import Ahead, Data
from blockdiff.training.optimiser import Ema
from blockdiff.training.starting_model import StartingModel
from blockdiff.training.step import Loss


class Source:
    """The batches of every optimiser step, asked for one step after the other: `source(step)`, counted from 1."""

    def __call__(self, step: int) -> Sequence[Batch]:
        """This rank's micro-batches of an optimiser step, on the CPU; with several ranks never none.

        Raises DataError for rows that cannot be used, and Interrupted when a rank is to stop meanwhile.
        """
        raise NotImplementedError

    def may_stop(self, step: int) -> bool:
        """True if a run can be resumed after this optimiser step."""
        return True

    def read(self, ranks: Ranks, seconds: float) -> Record:
        """The metrics of how batches came about since the last call, `seconds` ago, over all ranks."""
        return {}

    def counts(self, ranks: Ranks) -> dict[str, float] | None:
        """The sums behind `read`, over all ranks, for a checkpoint; None if there are none."""
        return None

    def count_on(self, counts: Mapping[str, float], ranks: Ranks) -> None:
        """Go on from the `counts` of a checkpoint."""


class Rows(Source):
    """The batches of a run's rows, made in a thread while the step before them runs."""

    def __init__(self, data: Data, ranks: Ranks, micro_batch_size: int | None) -> None:
        def make(step: int) -> list[Batch]:
            return data.batches(step, ranks.row_rank, ranks.row_world, micro_batch_size)

        self.ahead = Ahead(make, data.steps, is_pinned=ranks.device.type == "cuda")

    def __call__(self, step: int) -> list[Batch]:
        """This rank's micro-batches of an optimiser step."""
        return self.ahead(step)


@dataclass(frozen=True)
class Built:
    """Everything a trainer needs: model, objective, optimiser, data, and the step it begins at."""

    base: StartingModel
    data: Data
    model: Any
    objective: Any
    losses: dict[str, Loss]  # by name, as the objective returns their sums
    mesh: Mesh
    module: nn.Module  # what is called: the objective, wrapped if there are several ranks
    precision: str | None  # what autocast computes in; None if the weights are gathered in that already
    optimiser: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    average: Ema | None
    source: Source
    diffusion: DiffusionSettings
    facts: dict[str, Any]  # what must be the same for the run to be resumed
    steps: int  # the length of the run
    step: int  # the optimiser step of the checkpoint that was restored, 0 = none was

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that are evaluated and exported: their average if there is one."""
        return nullcontext() if self.average is None else self.average.applied()
