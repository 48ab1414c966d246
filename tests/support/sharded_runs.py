"""The ranks of `test_sharded_runs.py`: whole runs of a recipe that spreads the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blockdiff
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_content import steps_saved


class Watching(blockdiff.Callback):
    """Notes which checkpoints there are at every step."""

    def __init__(self) -> None:
        self.there: list[list[int]] = []
        self.completed: list[int] = []

    def on_step(self, trainer: blockdiff.Trainer) -> None:
        self.there.append(list(steps_saved(trainer.directory)))

    def on_save(self, trainer: blockdiff.Trainer) -> None:
        self.completed.append(max(steps_saved(trainer.directory)))


def train(ranks: Ranks, folder: Path, recipe: dict[str, Any], overrides: list[str], output: str) -> None:
    """Train, or go on."""
    watching = Watching()
    blockdiff.train(recipe, overrides, output=folder / output, resume=True, callbacks=[watching])
    (folder / f"{output}-{ranks.rank}.json").write_text(json.dumps([watching.there, watching.completed]))
