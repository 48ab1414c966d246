"""What a run writes beside its checkpoints: the logs it begins with, and at its end the model, pictures and report."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from blockdiff import checkpoint
from blockdiff.data.dataset import Dataset
from blockdiff.files import remove_leftovers, write_text
from blockdiff.metrics import FILE_NAME, MetricsLog, Record
from blockdiff.plots.curves import draw_curves
from blockdiff.training import state
from blockdiff.training.report import report_line, run_report
from blockdiff.training.run import REPORT
from blockdiff.training.samples import FILE_NAME as SAMPLES
from blockdiff.training.trackers import Trackers

if TYPE_CHECKING:
    from blockdiff.training.trainer import Trainer


def open_logs(trainer: Trainer, is_new: bool) -> list[Record]:
    """Write what the run is, cut its logs back to the step it goes on from, and open its trackers.

    Returns the records that are left. For the main process only.
    """
    directory, recipe = trainer.directory, trainer.recipe
    write_text(directory / "recipe.yaml", recipe.resolved())
    data = json.dumps(trainer.parts.data.report(), indent=1)
    write_text(directory / "data.json", data + "\n")
    last = -1 if is_new else trainer.step  # a new run evaluates at step 0 again
    records = MetricsLog(directory / FILE_NAME).cut(last)
    MetricsLog(directory / SAMPLES).cut(last)
    if recipe.train.trackers:
        settings = recipe.model_dump(mode="json")
        trainer.trackers = Trackers(recipe.train.trackers, directory, settings, trainer.step)
    return records


def export(trainer: Trainer) -> str:
    """Write model/ in the Hub's layout, with the best weights if a metric decides; says which in words."""
    parts, directory = trainer.parts, trainer.directory
    found, which = trainer.best_saved(), "the last weights"
    if found is not None:
        step, value = found
        state.restore_weights(state.steps_saved(directory)[step], parts.objective, parts.average)
        which = f"the weights of step {step}, best {trainer.recipe.evaluation.best} {value:.4g}"
    if parts.average is not None:
        which += " (averaged)"
    with trainer.averaged():
        checkpoint.save(
            parts.model,
            directory / "model",
            tokenizer=parts.origin.tokenizer,
            generation=parts.origin.generation,
            overwrite=True,
            choices=parts.choices,
        )
    remove_leftovers(directory, "model")  # of an export that was killed
    return which


def finish(trainer: Trainer) -> None:
    """Export the model, draw the curves, write the report, and say in one line what the run was."""
    directory, recipe, data = trainer.directory, trainer.recipe, trainer.parts.data
    trainer.prune()  # a kill in the last save may have left what it was about to remove
    which = export(trainer)
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
    end = "" if trainer.step == recipe.train.steps else f", ended early at step {trainer.step}"
    trainer.show.line(f"done      {directory}/model: {which}{end}; curves.png, report.json")
    trainer.show.line(f"report    {report_line(report)}")
