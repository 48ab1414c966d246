"""`Run`: what a run directory holds, for those who look at it afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdiff import checkpoint
from blockdiff.errors import RecipeError
from blockdiff.metrics import FILE_NAME, Record, read
from blockdiff.training import best
from blockdiff.training.recipe import AnyRecipe, Recipe, read_recipe

REPORT = "report.json"


@dataclass(frozen=True)
class Run:
    """A run directory: `Run("runs/a")`, and what `blockdiff.train` returns."""

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))

    @property
    def records(self) -> list[Record]:
        """The records of metrics.jsonl, in order."""
        return read(self.directory / FILE_NAME)

    @property
    def report(self) -> dict[str, Any]:
        """The figures of the whole run, as report.json has them."""
        report: dict[str, Any] = json.loads((self.directory / REPORT).read_text(encoding="utf-8"))
        return report

    @property
    def best(self) -> tuple[int, float] | None:
        """The step whose weights are exported and its value of `evaluation.best`; None where no metric decides."""
        metric = self.report["best_metric"]
        return None if metric is None else best.best_saved(self.directory, self.records, metric)

    def model(self, **options: Any) -> Any:
        """The exported model; `options` go to `blockdiff.load`, the dtype is the stored one unless they say another."""
        return checkpoint.load(self.directory / "model", **{"dtype": "auto", **options})


def settled(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    **parts: Any,
) -> Recipe:
    """The recipe of a run: with its directory in it, and with `parts` of the objective that are not None.

    Raises RecipeError where no directory is named, and for a part that lacks a method.
    """
    read_in = read_recipe(recipe, overrides)
    where = output if output is not None else read_in.output
    if where is None:
        name = recipe if isinstance(recipe, str | Path) else "recipe"
        raise RecipeError(f"{name}: output: missing; give --output DIR or set it in the recipe")
    given = {key: part for key, part in parts.items() if part is not None}
    changed = {
        "output": str(Path(where).expanduser().absolute()),
        "objective": read_in.objective.model_copy(update=given),
    }
    return read_recipe(read_in.model_copy(update=changed))  # checks the objects
