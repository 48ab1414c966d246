"""Scenarios of `losing_ranks` in which weights are spread over the ranks: one dies, hangs, is slow, or computes NaN."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # here, so that no rank has to import it by itself
from typer.testing import CliRunner

from blockdiff.canvas import Batch
from blockdiff.cli.main import app
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.step import Counts, Gradient
from blockdiff.training.trainer import Trainer
from tests.little_model import LITTLE, save_preset

AT = 5  # the step in which it happens, after the save of step 3


def make_inputs(directory: Path) -> None:
    """Rows, a tokenizer and a preset."""
    words = ["data", "sudoku", "--split", "train=24", "--output", str(directory / "puzzles")]
    assert CliRunner().invoke(app, words).exit_code == 0
    save_preset(directory / "preset.json", LITTLE)


class Disturbed(Trainer):
    """Something happens to the last rank in the middle of a run."""

    disturb: Callable[[Trainer], Any]

    def backpropagate(self, batches: Sequence[Batch], counts: Counts) -> Gradient:
        if (self.ranks.rank, self.step) == (self.ranks.world - 1, AT):
            type(self).disturb(self)
        return super().backpropagate(batches, counts)


def little_run(ranks: Ranks, run: Path, disturb: Callable[[Trainer], Any], **parallel: Any) -> None:
    """Six steps over a mesh, saved after the third and the last."""
    folder = run.parent
    Disturbed.disturb = staticmethod(disturb)
    recipe = {
        "model": {"preset": str(folder / "preset.json"), "tokenizer": str(folder / "puzzles" / "tokenizer")},
        "data": {"train": str(folder / "puzzles" / "train.jsonl"), "cache": "off"},
        "train": {"steps": 6, "batch_size": 8, "save_every": 3, "log_every": 1, "timeout": round(ranks.timeout)},
        "parallel": parallel,
    }
    Disturbed(recipe, output=run).fit()


def by_signal(number: int) -> Callable[[Trainer], None]:
    """The rank gets a signal."""
    return lambda trainer: os.kill(os.getpid(), number)


def poison(trainer: Trainer) -> None:
    """The rank's loss becomes NaN."""

    def spoil(module: Any, given: Any, losses: Any) -> Any:
        return losses | {"canvas": losses["canvas"] * torch.nan}

    trainer.built.objective.register_forward_hook(spoil)


def killed_of_two_by_two(ranks: Ranks, run: Path) -> None:
    little_run(ranks, run, by_signal(signal.SIGKILL), shard="full", experts=2)


def hung_of_two_by_two(ranks: Ranks, run: Path) -> None:
    little_run(ranks, run, by_signal(signal.SIGSTOP), shard="full", experts=2)


def poisoned_of_one_by_two(ranks: Ranks, run: Path) -> None:
    little_run(ranks, run, poison, shard="full", experts=2)
