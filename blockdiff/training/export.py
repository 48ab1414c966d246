"""The files of a run beside its checkpoints: recipe and logs, at its end the model, the curves and the report.

`consolidate` makes a model of any checkpoint, too.
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
    """Write what the run is, and cut its logs back to the checkpoint; returns the records that are left.

    Without a checkpoint what another run has left there is removed.
    """
    write_text(directory / RECIPE, recipe.resolved())
    if checkpoint is None:
        remove_run(directory)
    write_text(directory / DATA, json.dumps(built.data.report(), indent=1) + "\n")
    last = -1 if checkpoint is None else built.step  # a new run evaluates at step 0 again
    MetricsLog(directory / SAMPLES).cut(last)
    return MetricsLog(directory / FILE_NAME).cut(last)


def write_model(trainer: Trainer) -> str:
    """Write model/ in the Hub's layout, with the best weights if a metric decides; returns which these are.

    Of a model with adapters these alone are written, as adapter/ in PEFT's format. Of a model that is split over ranks
    all of them call this, and rank 0 writes.
    """
    built, directory = trainer.built, trainer.directory
    found, which = best_saved(directory, trainer.records, trainer.recipe.evaluation.best), "the last weights"
    if built.mesh.is_split:
        found = trainer.ranks.agree(found)
    if found is not None:
        step, value = found
        saved, ranks = steps_saved(directory)[step], trainer.ranks if built.mesh.is_split else None
        restore_weights(saved, built.objective, built.average, ranks)
        which = f"the weights of step {step}, best {trainer.recipe.evaluation.best} {value:.4g}"
    if built.average is not None:
        which += " (averaged)"
    base, beside = built.base, {"tokenizer": built.base.tokenizer, "diffusion": built.diffusion, "overwrite": True}
    name = _exported(trainer.recipe)
    with built.averaged(), _refused(trainer):
        if name == ADAPTER:
            checkpoint.save_adapter(
                built.model, directory / name, trainer.recipe.model.path, generation=base.generation, **beside
            )
        else:
            checkpoint.save(built.model, directory / name, generation=base.generation, **beside)
    if trainer.ranks.is_main:
        remove_leftovers(directory, name)  # of an export that was killed
    return f"{directory / name}: {which}"


def _exported(recipe: Recipe) -> str:
    """The directory of a run that has what it trained."""
    return ADAPTER if recipe.lora.trains else MODEL


@contextmanager
def _refused(trainer: Trainer) -> Iterator[None]:
    """Turns a CheckpointError inside into a RunError that says which step is saved."""
    try:
        yield
    except CheckpointError as error:
        raise RunError(f"{error}; the run is saved at step {trainer.saved}, {RESUME}") from error


def write_results(trainer: Trainer, which: str) -> None:
    """Write the curves and the report, read back the model, and say in one line what the run was.

    which: what `write_model` wrote. Raises RunError where it is not what is there.
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
    """Write what sampling reads of a checkpoint of a run: its adapter alone if it has one, or else the whole model."""
    recipe = read_recipe(saved.absolute().parents[1] / RECIPE, needs_data=False)
    consolidate(saved, directory, peft=recipe.lora.trains)


def _prompt_form(run: Path, recipe: Recipe) -> Literal["raw", "chat"] | None:
    """The form of the prompts that a run was trained on, which it has written beside its counts of rows."""
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
    """Make a checkpoint of a run, `RUN/checkpoints/step-N`, one in Hub layout, tensor by tensor; returns `directory`.

    Whichever ranks wrote it, one process is enough, and the host holds one tensor. Averaged weights go before the
    others. Adapters are added to the weights of `model.path`, or with `peft` written alone, for the checkpoint `base`
    (None: `model.path`). dtype: of what is written ("auto": as it is). quantize, merge_into: as in `checkpoint.export`.
    Raises CheckpointError, RecipeError or RunError.
    """
    run = saved.absolute().parents[1]
    if not (run / RECIPE).is_file():
        raise RunError(f"{saved}: {run} has no {RECIPE}, which says what the weights belong to; keep them together")
    tensors = open_checkpoint(saved)  # before the recipe, whose keys another version may have called otherwise
    recipe = read_recipe(run / RECIPE, needs_data=False)
    kind = kind_of(recipe)
    found = kind.start(recipe)
    weights = tensors.tensors(WEIGHTS)
    typical = found.config.model_class.typical
    kept = weights[typical if typical in weights else next(iter(weights))].dtype
    objective = kind.without_weights(recipe, found, dtype=None if recipe.lora.trains else kept)
    model, prompts = objective.model, _prompt_form(run, recipe)
    diffusion = replace(kind.diffusion(objective), prompts=prompts, strategy=strategy_of(recipe))
    beside = {"tokenizer": found.tokenizer, "generation": found.generation, "diffusion": diffusion}

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
            return read_back(checkpoint.save_adapter(model, directory, base or path, **beside))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_adapter(model, folder, path, **beside)
            return checkpoint.export(path, directory, folder, dtype=dtype, quantize=quantize, merge_into=merge_into)
    if peft:
        raise CheckpointError(f"{saved}: has no adapters to write in PEFT's format")
    if merge_into is not None:
        raise CheckpointError(f"{saved}: has no adapters to merge; leave merge_into out")
    if quantize is not None:
        raise CheckpointError(f"{saved}: export it as it is first, and then the checkpoint with quantize={quantize!r}")
    cast = None if dtype == "auto" else resolve_dtype(dtype)
    targets = {name: dtype_of(name, cast or kept) for name in model.state_dict()}
    sources = {
        name: TensorSource(weights[name].shape, target, partial(read, name, target)) for name, target in targets.items()
    }
    if recipe.model.path is not None:
        compare([find(recipe.model.path)])
        model.carried = carried_by(find(recipe.model.path), model)
    else:
        images = {} if model.image_side is not None else drawn_images(model.config, recipe.seed, kept)
        model.carried = Carried(tensors=images)
    return read_back(checkpoint.save(model, directory, dtype=cast, weights=sources, **beside))
