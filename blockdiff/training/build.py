"""`build`: from a recipe to the parts of its run, in one function to read from top to bottom."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import nn

from blockdiff import checkpoint
from blockdiff.checkpoint.adapter_base import warn_of_other_weights
from blockdiff.checkpoint.adapters import fill_adapters
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.opening import require_as_written
from blockdiff.errors import RunError
from blockdiff.models.adapters import draw_adapters
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import forms_of
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate, split
from blockdiff.training import optimiser as optimisers
from blockdiff.training import schedule
from blockdiff.training.built import Built, Source
from blockdiff.training.checkpoint_reader import read_counts, restore
from blockdiff.training.data import first_day
from blockdiff.training.freeze import count_parts
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.optimiser import Ema
from blockdiff.training.plan.fitting import require_resident, require_step
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.same_run import resume_facts
from blockdiff.training.starting_model import adapter_to_train, computed_in, strategy_of


def build(recipe: Recipe, ranks: Ranks, show: Progress, saved: Path | None = None) -> Built:
    """Build the parts of a recipe's run and restore the checkpoint `saved` (None: start at step 0).

    Every check that needs no weights is made before they are read. Optimiser and average are built from the parameters
    that the mesh has distributed. `show` prints a line for each part. Raises RecipeError, DataError, CheckpointError or
    RunError, in one line each.
    """
    kind = kind_of(recipe)
    base = kind.start(recipe)
    objective = kind.without_weights(recipe, base)
    model = objective.model
    mesh, adapter = make_mesh(recipe, ranks), adapter_to_train(recipe, model)
    require_resident(objective, recipe, base, ranks)

    run = None if saved is None else saved.absolute().parents[1]
    day = date.fromisoformat(ranks.from_main("reading the date of the run", lambda: str(first_day(run))))
    data = kind.read_data(recipe, base, ranks, show.reading, day)
    for line in data.lines():
        show.line(line)
    kind.check_data(recipe, data)
    require_step(objective, recipe, base, ranks, data, show)

    for name in [*([] if recipe.model.path is None else [recipe.model.path]), *kind.others()]:
        with show.waiting(f"model     comparing {name} with its digests"):
            adapter_of = recipe.lora.path if name == recipe.model.path else None
            ranks.from_main(f"comparing {name}", partial(require_as_written, name, adapter_of))

    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    if recipe.model.compile:
        for layer in model.layers:
            layer.compile()
    precision: str | None = recipe.train.autocast
    if mesh.is_split:
        split(model, mesh, checkpoint.weights_dtype(recipe.model.dtype, recipe.model.path), computed_in(recipe))
        precision = precision if mesh.shard == "none" else None
    if recipe.model.path is not None:
        checkpoint.load_weights(model, recipe.model.path, dtype=recipe.model.dtype, device=ranks.device)
        if recipe.lora.trains:
            draw_adapters(model, recipe.seed, ranks.device, model.kept_dtype)
        if adapter is not None:
            if ranks.is_main:
                warn_of_other_weights(find(str(recipe.lora.path)), find(recipe.model.path))
            fill_adapters(model, adapter.parts, str(recipe.lora.path))
    else:
        dtype = "float32" if recipe.model.dtype == "auto" else recipe.model.dtype
        checkpoint.draw_weights(model, seed=recipe.seed, dtype=dtype, device=ranks.device)
    show.line(f"model     {recipe.model.path or f'preset {recipe.model.preset}'}, {_dtypes(model)}")
    if adapter is not None:
        show.line(f"adapter   {recipe.lora.path}, trains on")
    for word, name, other in kind.load_others(recipe, objective, mesh):
        show.line(f"{word:<9} {name}, {_dtypes(other)}")
    if mesh.is_split:
        show.line(f"mesh      {mesh}")
    show.parts(count_parts(model))
    if mesh.offload:
        move_except_model(objective, ranks.device)
    else:
        objective.to(ranks.device)  # moves the objective's own tensors; the model's are on the device already
    objective.train()  # loaded models are in eval mode, without dropout
    module = replicate(objective, mesh)

    optimiser = optimisers.build(
        objective,
        name=recipe.given.optimiser or recipe.optim.name,
        lr=recipe.optim.lr,
        betas=recipe.optim.betas,
        eps=recipe.optim.eps,
        momentum=recipe.optim.momentum,
        weight_decay=recipe.optim.weight_decay,
    )
    learning_rate = partial(
        schedule.learning_rate,
        recipe.optim.schedule,
        peak=recipe.optim.lr,
        steps=data.steps,
        warmup_steps=warmup_steps(recipe, data.steps),
    )
    average = Ema(objective, recipe.optim.ema) if recipe.optim.ema is not None else None

    facts, step = resume_facts(recipe, base, data, objective, ranks, show), 0
    if saved is not None:
        step = restore(saved, objective, optimiser, facts, average=average, ranks=ranks)
        if step > data.steps:
            key = "steps" if recipe.train.epochs is None else "epochs"
            length = f"{getattr(recipe.train, key):g}"
            raise RunError(f"{saved}: already at step {step}, past train.{key} = {length}; raise train.{key}")
    built = Built(
        base=base,
        data=data,
        model=model,
        objective=objective,
        losses=kind.losses(objective),
        mesh=mesh,
        module=module,
        precision=precision,
        optimiser=optimiser,
        learning_rate=learning_rate,
        average=average,
        source=Source(),
        diffusion=replace(kind.diffusion(objective), prompts=data.train.form, strategy=strategy_of(recipe)),
        facts=facts,
        steps=data.steps,
        step=step,
    )
    source = kind.source(recipe, built, ranks, show)
    if saved is not None and source.counts(ranks) is not None:
        source.restore_counts(read_counts(saved), ranks)
    return replace(built, source=source)


def _dtypes(model: BlockDiffusionModel) -> str:
    """Describe the dtype in which a model's weights are stored, and that in which they are gathered if it differs."""
    stored, gathered = (str(dtype).removeprefix("torch.") for dtype in (model.kept_dtype, model.dtype))
    dtypes = stored if stored == gathered else f"{stored}, gathered in {gathered}"
    forms = " and ".join(forms_of(model))
    return f"{dtypes}, linear layers and experts in {forms}" if forms else dtypes


def make_mesh(recipe: Recipe, ranks: Ranks) -> Mesh:
    """The mesh of a recipe. Raises RunError if the processes do not divide into it."""
    p = recipe.parallel
    return Mesh.of(ranks, p.shard, p.experts, p.offload, p.tensor)


def move_except_model(objective: nn.Module, device: torch.device) -> None:
    """Move an objective to a device, except its model, which is offloaded."""
    for name, part in objective.named_children():
        if name != "model":
            part.to(device)
    for tensor in [*objective.parameters(recurse=False), *objective.buffers(recurse=False)]:
        tensor.data = tensor.data.to(device)


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """The number of warm-up steps in a run of `steps` steps: the recipe's, or the default."""
    return schedule.default_warmup(steps) if recipe.optim.warmup_steps is None else recipe.optim.warmup_steps
