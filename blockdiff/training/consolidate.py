"""`consolidate`: a checkpoint of a run, whichever ranks wrote it, becomes one in Hub layout."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from blockdiff import checkpoint
from blockdiff.checkpoint.added import fill
from blockdiff.checkpoint.files import Carried, find
from blockdiff.checkpoint.read import carried_by, resolve_dtype
from blockdiff.checkpoint.stream import Source
from blockdiff.errors import CheckpointError, RunError
from blockdiff.models.adapters import adapter_tensors
from blockdiff.models.family import family_of
from blockdiff.sampling.choices import Choices
from blockdiff.training import state
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.run import RECIPE
from blockdiff.training.same_run import objective_record
from blockdiff.training.saved import AVERAGE, MODEL
from blockdiff.training.starting_model import read_starting_model, without_weights


def consolidate(
    saved: Path,
    directory: str | Path,
    *,
    peft: bool = False,
    base: str | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
) -> Path:
    """Make a checkpoint of a run, `RUN/checkpoints/step-N`, one in Hub layout, tensor by tensor; returns `directory`.

    Whichever ranks wrote it, one process is enough, and the host holds one tensor. Averaged weights go before the
    others. Adapters are added to the weights of `model.path`, or with `peft` written alone, for the checkpoint `base`
    (None: `model.path`). dtype: of what is written ("auto": as it is). quantize: as in `checkpoint.export`. Raises
    CheckpointError, RecipeError or RunError.
    """
    run = saved.absolute().parents[1]
    if not (run / RECIPE).is_file():
        raise RunError(f"{saved}: {run} has no {RECIPE}, which says what the weights belong to; keep them together")
    recipe = read_recipe(run / RECIPE, needs_data=False)
    tensors, found = state.opened(saved), read_starting_model(recipe)
    weights = tensors.tensors(MODEL)
    kept = weights[next(name for name in ("vocabulary.table", *weights) if name in weights)].dtype
    objective = without_weights(recipe, found, dtype=None if recipe.lora.trains else kept)
    model, choices = objective.model, Choices.of(objective, objective_record(recipe, objective))
    beside = {"tokenizer": found.tokenizer, "generation": found.generation, "choices": choices}

    def read(name: str, target: torch.dtype | None = None) -> Tensor:
        is_averaged = tensors.has(AVERAGE) and f"model.{name}" in tensors.tensors(AVERAGE)
        value = tensors.read(AVERAGE, f"model.{name}") if is_averaged else tensors.read(MODEL, name)
        return value.to(weights[name].dtype).to(target)

    if recipe.lora.trains:
        path = str(recipe.model.path)
        for name in adapter_tensors(model):
            fill(model, name, read(name))
        if peft:
            return checkpoint.save_adapter(model, directory, base or path, **beside)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_adapter(model, folder, path, **beside)
            return checkpoint.export(path, directory, folder, dtype=dtype, quantize=quantize)
    if peft:
        raise CheckpointError(f"{saved}: has no adapters to write in PEFT's format")
    if quantize is not None:
        raise CheckpointError(f"{saved}: export it as it is first, and then the checkpoint with quantize={quantize!r}")
    cast = None if dtype == "auto" else resolve_dtype(dtype)
    sources = {
        name: Source(weights[name].shape, cast or kept, partial(read, name, cast or kept))
        for name in model.state_dict()
    }
    if recipe.model.path is not None:
        model.carried = carried_by(find(recipe.model.path), family_of(model.config).names)
    else:
        model.carried = Carried(tensors=family_of(model.config).image_tensors(model.config, recipe.seed, kept))
    return checkpoint.save(model, directory, dtype=cast, weights=sources, **beside)
