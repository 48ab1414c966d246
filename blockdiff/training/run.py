"""`Run`: what a run directory holds, for those who look at it afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from blockdiff import checkpoint
from blockdiff.errors import RunError
from blockdiff.metrics import FILE_NAME, Record, read
from blockdiff.training import best

RECIPE, REPORT = "recipe.yaml", "report.json"


@dataclass(frozen=True)
class Run:
    """A run directory: `Run("runs/a")`, and what `blockdiff.train` returns.

    A run that goes on or was stopped has records and a best step, and no report and no model yet. What is not there is
    a RunError, or of the model a CheckpointError.
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))

    @property
    def records(self) -> list[Record]:
        """The records of metrics.jsonl, in order."""
        return read(self._file(FILE_NAME))

    @property
    def report(self) -> dict[str, Any]:
        """The figures of the whole run, as report.json has them."""
        report: dict[str, Any] = json.loads(self._file(REPORT).read_text(encoding="utf-8"))
        return report

    @property
    def best(self) -> tuple[int, float] | None:
        """The saved step with the best value of `evaluation.best`, and that value; None where no metric decides.

        At the end of a run its weights are exported.
        """
        recipe = yaml.safe_load(self._file(RECIPE).read_text(encoding="utf-8"))
        return best.best_saved(self.directory, self.records, recipe["evaluation"]["best"])

    def model(self, **options: Any) -> Any:
        """The exported model, with its adapters if it has some; `options` go to `blockdiff.load`.

        The dtype is the stored one unless they say another.
        """
        return checkpoint.load(self.directory, **{"dtype": "auto", **options})

    def _file(self, name: str) -> Path:
        path = self.directory / name
        if not path.is_file():
            raise RunError(f"{path}: no such file; the run has not come to write it, or the directory holds no run")
        return path
