"""`Built`, the parts of a run, and `Source`, the batches of its optimiser steps."""

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
    """The batches of a run: `source(step)` for each optimiser step in order, counted from 1."""

    def __call__(self, step: int) -> Sequence[Batch]:
        """Return this rank's micro-batches of an optimiser step, on the CPU; with several ranks at least one.

        Raises DataError for rows that cannot be used, and Interrupted if a rank should stop meanwhile.
        """
        raise NotImplementedError

    def may_stop(self, step: int) -> bool:
        """Whether a run can be resumed after this optimiser step."""
        return True

    def read(self, ranks: Ranks, seconds: float) -> Record:
        """Return metrics of making batches since the last call, `seconds` ago, over all ranks."""
        return {}

    def counts(self, ranks: Ranks) -> dict[str, float] | None:
        """The running sums behind `read`, over all ranks, for a checkpoint; None if there are none."""
        return None

    def restore_counts(self, counts: Mapping[str, float], ranks: Ranks) -> None:
        """Restore the `counts` of a checkpoint."""


class Rows(Source):
    """The batches of a run's rows, prepared in a thread during the step before."""

    def __init__(self, data: Data, ranks: Ranks, micro_batch_size: int | None) -> None:
        def make(step: int) -> list[Batch]:
            return data.batches(step, ranks.row_rank, ranks.row_world, micro_batch_size)

        self.ahead = Ahead(make, data.steps, is_pinned=ranks.device.type == "cuda")

    def __call__(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of an optimiser step."""
        return self.ahead(step)


@dataclass(frozen=True)
class Built:
    """The parts of a run: model, objective, optimiser, data, and the step it begins at."""

    base: StartingModel
    data: Data
    model: Any
    objective: Any
    losses: dict[str, Loss]  # by the names of the objective's sums
    mesh: Mesh
    module: nn.Module  # the objective, wrapped if there are several ranks
    precision: str | None  # the dtype of autocast; None if there is none, or if weights are gathered in it already
    optimiser: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    average: Ema | None
    source: Source
    diffusion: DiffusionSettings
    facts: dict[str, Any]  # the values that a resumed run must share
    steps: int  # the length of the run
    step: int  # the optimiser step of the restored checkpoint, 0 = none

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the weights to evaluate and export, their average if there is one, around a block."""
        return nullcontext() if self.average is None else self.average.applied()
