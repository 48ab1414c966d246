"""What a run writes beside its checkpoints: its recipe and logs, at its end the model, the curves and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blockdiff import checkpoint
from blockdiff.checkpoint.files import ADAPTER, MODEL
from blockdiff.data.dataset import Dataset
from blockdiff.errors import RESUME, CheckpointError, RunError
from blockdiff.files import remove_leftovers, write_text
from blockdiff.metrics import FILE_NAME, SAMPLES, MetricsLog, Record
from blockdiff.plots.curves import draw_curves
from blockdiff.training import state
from blockdiff.training.report import report_line, run_report
from blockdiff.training.run import RECIPE, REPORT

if TYPE_CHECKING:
    from blockdiff.training.build import Built
    from blockdiff.training.recipe import Recipe
    from blockdiff.training.trainer import Trainer


def open_logs(directory: Path, recipe: Recipe, built: Built, checkpoint: Path | None) -> list[Record]:
    """Write what the run is, and cut its logs back to the checkpoint; returns the records that are left."""
    write_text(directory / RECIPE, recipe.resolved())
    write_text(directory / "data.json", json.dumps(built.data.report(), indent=1) + "\n")
    last = -1 if checkpoint is None else built.step  # a new run evaluates at step 0 again
    MetricsLog(directory / SAMPLES).cut(last)
    return MetricsLog(directory / FILE_NAME).cut(last)


def write_model(trainer: Trainer) -> str:
    """Write model/ in the Hub's layout, with the best weights if a metric decides; returns which these are.

    Of a model with adapters these alone are written, as adapter/ in PEFT's format. Of a model that is split over ranks
    all of them call this, and rank 0 writes.
    """
    built, directory = trainer.built, trainer.directory
    found, which = trainer.best_saved(), "the last weights"
    if built.mesh.is_split:
        found = trainer.ranks.agree(found)
    if found is not None:
        step, value = found
        saved, ranks = state.steps_saved(directory)[step], trainer.ranks if built.mesh.is_split else None
        state.restore_weights(saved, built.objective, built.average, ranks)
        which = f"the weights of step {step}, best {trainer.recipe.evaluation.best} {value:.4g}"
    if built.average is not None:
        which += " (averaged)"
    base, beside = built.base, {"tokenizer": built.base.tokenizer, "choices": built.choices, "overwrite": True}
    name = ADAPTER if trainer.recipe.lora.trains else MODEL
    with trainer.averaged(), _refused(trainer):
        if name == ADAPTER:
            checkpoint.save_adapter(
                built.model, directory / name, trainer.recipe.model.path, generation=base.generation, **beside
            )
        else:
            checkpoint.save(built.model, directory / name, generation=base.generation, **beside)
    if trainer.ranks.is_main:
        remove_leftovers(directory, name)  # of an export that was killed
    return f"{directory / name}: {which}"


@contextmanager
def _refused(trainer: Trainer) -> Iterator[None]:
    """What cannot be written at the end of a run is a line that says what is saved."""
    try:
        yield
    except CheckpointError as error:
        raise RunError(f"{error}; the run is saved at step {trainer.saved}, {RESUME}") from error


def write_results(trainer: Trainer, which: str) -> None:
    """Write the curves and the report, and say in one line what the run was; which: what `write_model` wrote."""
    directory, recipe, data = trainer.directory, trainer.recipe, trainer.built.data
    trainer.prune()  # a kill in the last save may have left what it was about to remove
    draw_curves(directory / FILE_NAME, directory / "curves.png", title=directory.name)
    report = run_report(
        trainer.records,
        run=directory.name,
        batch_size=recipe.train.batch_size,
        examples=len(data.train) if isinstance(data.train, Dataset) else None,
        device=trainer.ranks.device,
        world=trainer.ranks.world,
        best=recipe.evaluation.best,
        wall_seconds=time.perf_counter() - trainer.began,
    )
    write_text(directory / REPORT, json.dumps(report, indent=1) + "\n")
    end = "" if trainer.step == trainer.steps else f", ended early at step {trainer.step}"
    trainer.show.line(f"done      {which}{end}; curves.png, report.json")
    trainer.show.line(f"report    {report_line(report)}")
