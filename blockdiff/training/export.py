"""The files of a run other than checkpoints: recipe and logs, and at its end the model, the curves and the report.

`consolidate` exports a model from any checkpoint of a run.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from blockdiff import checkpoint
from blockdiff.checkpoint.added import fill
from blockdiff.checkpoint.digests import compare, read_back
from blockdiff.checkpoint.files import ADAPTER, MODEL, REPORT, Carried, find, read_json
from blockdiff.checkpoint.images import drawn_images
from blockdiff.checkpoint.read import carried_by, resolve_dtype
from blockdiff.checkpoint.stream import TensorSource
from blockdiff.data.dataset import Dataset
from blockdiff.errors import RESUME, CheckpointError, RunError
from blockdiff.files import remove_leftovers, write_text
from blockdiff.layers.weights import dtype_of
from blockdiff.metrics import FILE_NAME, SAMPLES, MetricsLog, Record
from blockdiff.models.adapters import adapter_tensors
from blockdiff.plots.curves import draw_curves
from blockdiff.training.checkpoint_content import AVERAGE, steps_saved
from blockdiff.training.checkpoint_content import MODEL as WEIGHTS
from blockdiff.training.checkpoint_reader import open_checkpoint, restore_weights
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.report import report_line, run_report
from blockdiff.training.run import CURVES, DATA, RECIPE, best_saved, remove_run
from blockdiff.training.starting_model import strategy_of

if TYPE_CHECKING:
    from blockdiff.training.build import Built
    from blockdiff.training.recipe import Recipe
    from blockdiff.training.trainer import Trainer


def open_logs(directory: Path, recipe: Recipe, built: Built, checkpoint: Path | None) -> list[Record]:
    """Write the recipe and the data's counts, truncate the logs to a checkpoint, and return the remaining records.

    checkpoint: None for a new run, which removes the files of an earlier run in the directory.
    """
    write_text(directory / RECIPE, recipe.resolved())
    if checkpoint is None:
        remove_run(directory)
    write_text(directory / DATA, json.dumps(built.data.report(), indent=1) + "\n")
    last = -1 if checkpoint is None else built.step  # a new run evaluates at step 0 again
    MetricsLog(directory / SAMPLES).cut(last)
    return MetricsLog(directory / FILE_NAME).cut(last)


def write_model(trainer: Trainer) -> str:
    """Write the best weights, or the last without `evaluation.best`, and return in words which ones.

    They are written to model/ in the Hub's layout; adapters alone to adapter/ in PEFT's format. If the model is split
    over ranks, all of them must call it, and rank 0 writes.
    """
    built, directory = trainer.built, trainer.directory
    best, which = best_saved(directory, trainer.records, trainer.recipe.evaluation.best), "the last weights"
    if built.mesh.is_split:
        best = trainer.ranks.agree(best)
    if best is not None:
        step, value = best
        saved, ranks = steps_saved(directory)[step], trainer.ranks if built.mesh.is_split else None
        restore_weights(saved, built.objective, built.average, ranks)
        which = f"the weights of step {step}, best {trainer.recipe.evaluation.best} {value:.4g}"
    if built.average is not None:
        which += " (averaged)"
    base, parts = built.base, {"tokenizer": built.base.tokenizer, "diffusion": built.diffusion, "overwrite": True}
    name = _exported(trainer.recipe)
    with built.averaged(), _refused(trainer):
        if name == ADAPTER:
            checkpoint.save_adapter(
                built.model, directory / name, trainer.recipe.model.path, generation=base.generation, **parts
            )
        else:
            checkpoint.save(built.model, directory / name, generation=base.generation, **parts)
    if trainer.ranks.is_main:
        remove_leftovers(directory, name)  # of an export that was killed
    return f"{directory / name}: {which}"


def _exported(recipe: Recipe) -> str:
    """The name of the directory in a run that has the trained weights."""
    return ADAPTER if recipe.lora.trains else MODEL


@contextmanager
def _refused(trainer: Trainer) -> Iterator[None]:
    """Turn a CheckpointError of a block into a RunError that names the step that is saved."""
    try:
        yield
    except CheckpointError as error:
        raise RunError(f"{error}; the run is saved at step {trainer.saved}, {RESUME}") from error


def write_results(trainer: Trainer, which: str) -> None:
    """Write the curves and the report, verify the model's files, and print the report in one line.

    which: the result of `write_model`. Raises RunError if the model's files cannot be read back.
    """
    directory, recipe, data = trainer.directory, trainer.recipe, trainer.built.data
    draw_curves(directory / FILE_NAME, directory / CURVES, title=directory.name)
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
    with _refused(trainer):
        read_back(directory / _exported(recipe))
    end = "" if trainer.step == trainer.steps else f", ended early at step {trainer.step}"
    trainer.show.line(f"done      {which}{end}; curves.png, report.json")
    trainer.show.line(f"report    {report_line(report)}")


def write_sampled(saved: Path, directory: Path) -> None:
    """Export a checkpoint of a run for sampling: its adapter alone if it has one, else the whole model."""
    recipe = read_recipe(saved.absolute().parents[1] / RECIPE, needs_data=False)
    consolidate(saved, directory, peft=recipe.lora.trains)


def _prompt_form(run: Path, recipe: Recipe) -> Literal["raw", "chat"] | None:
    """The form of the prompts that a run was trained on, from its data.json; None if unknown."""
    if recipe.data.chat:
        return "chat"
    form = read_json(run / DATA).get("prompts") if (run / DATA).is_file() else None
    return form if form in ("raw", "chat") else None


def consolidate(
    saved: Path,
    directory: str | Path,
    *,
    peft: bool = False,
    base: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    merge_into: str | None = None,
) -> Path:
    """Export a run's checkpoint, `RUN/checkpoints/step-N`, in Hub layout to `directory`, and return that.

    One process exports a checkpoint of any number of ranks, with one tensor in memory at a time. Averaged weights are
    preferred. Adapters are merged into the weights of `model.path`.

    peft: write only the adapters, for the checkpoint `base` (None: `model.path`).
    dtype: the dtype of the files ("auto": the checkpoint's).
    quantize, merge_into: as in `checkpoint.export`.

    Raises CheckpointError, RecipeError or RunError.
    """
    run = saved.absolute().parents[1]
    if not (run / RECIPE).is_file():
        raise RunError(f"{saved}: {run} has no {RECIPE}, which describes the model; keep them together")
    tensors = open_checkpoint(saved)  # before the recipe, whose keys may have other names in another version
    recipe = read_recipe(run / RECIPE, needs_data=False)
    kind = kind_of(recipe)
    start = kind.start(recipe)
    weights = tensors.tensors(WEIGHTS)
    typical = start.config.model_class.typical
    saved_dtype = weights[typical if typical in weights else next(iter(weights))].dtype
    objective = kind.without_weights(recipe, start, dtype=None if recipe.lora.trains else saved_dtype)
    model, prompts = objective.model, _prompt_form(run, recipe)
    diffusion = replace(kind.diffusion(objective), prompts=prompts, strategy=strategy_of(recipe))
    parts = {"tokenizer": start.tokenizer, "generation": start.generation, "diffusion": diffusion}

    def read(name: str, target: torch.dtype | None = None) -> Tensor:
        is_averaged = tensors.has(AVERAGE) and f"model.{name}" in tensors.tensors(AVERAGE)
        value = tensors.read(AVERAGE, f"model.{name}") if is_averaged else tensors.read(WEIGHTS, name)
        return value.to(weights[name].dtype).to(target)

    if recipe.lora.trains:
        path = str(recipe.model.path)
        model.carried = carried_by(find(path), model)
        for name in adapter_tensors(model):
            fill(model, name, read(name))
        if peft:
            return read_back(checkpoint.save_adapter(model, directory, base or path, **parts))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_adapter(model, folder, path, **parts)
            return checkpoint.export(path, directory, folder, dtype=dtype, quantize=quantize, merge_into=merge_into)
    if peft:
        raise CheckpointError(f"{saved}: has no adapters to write in PEFT's format")
    if merge_into is not None:
        raise CheckpointError(f"{saved}: has no adapters to merge; leave merge_into out")
    if quantize is not None:
        raise CheckpointError(f"{saved}: export it as it is first, and then the checkpoint with quantize={quantize!r}")
    cast = None if dtype == "auto" else resolve_dtype(dtype)
    targets = {name: dtype_of(name, cast or saved_dtype) for name in model.state_dict()}
    sources = {
        name: TensorSource(weights[name].shape, target, partial(read, name, target)) for name, target in targets.items()
    }
    if recipe.model.path is not None:
        compare([find(recipe.model.path)])
        model.carried = carried_by(find(recipe.model.path), model)
    else:
        images = {} if model.image_side is not None else drawn_images(model.config, recipe.seed, saved_dtype)
        model.carried = Carried(tensors=images)
    return read_back(checkpoint.save(model, directory, dtype=cast, weights=sources, **parts))
