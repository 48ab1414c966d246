"""`build`: from a recipe to everything that trains, one function to be read from top to bottom."""

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
from blockdiff.training.plan.fitting import require_kept, require_step
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.same_run import resume_facts
from blockdiff.training.starting_model import adapter_to_train, computed_in, strategy_of


def build(recipe: Recipe, ranks: Ranks, show: Progress, saved: Path | None = None) -> Built:
    """Make everything that a recipe names, and restore the checkpoint `saved`; `show` prints a line for each part.

    A recipe that can be refused without weights is refused before they are read. Optimiser and average are made of
    the parameters as they are spread over the ranks. Raises RecipeError, DataError, CheckpointError or RunError, in one
    line each.
    """
    kind = kind_of(recipe)
    base = kind.start(recipe)
    objective = kind.without_weights(recipe, base)
    model = objective.model
    mesh, adapter = make_mesh(recipe, ranks), adapter_to_train(recipe, model)
    require_kept(objective, recipe, base, ranks)

    began = partial(first_day, None if saved is None else saved.absolute().parents[1])
    day = date.fromisoformat(ranks.from_main("reading the date of the run", lambda: str(began())))
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
    show.line(f"model     {recipe.model.path or f'preset {recipe.model.preset}'}, {_kept(model)}")
    if adapter is not None:
        show.line(f"adapter   {recipe.lora.path}, trains on")
    for word, name, other in kind.load_others(recipe, objective, mesh):
        show.line(f"{word:<9} {name}, {_kept(other)}")
    if mesh.is_split:
        show.line(f"mesh      {mesh}")
    show.parts(count_parts(model))
    if mesh.offload:
        move_own(objective, ranks.device)
    else:
        objective.to(ranks.device)  # the objective's own tensors; the model's are there already
    objective.train()  # loaded weights are in eval mode, in which nothing is dropped out
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
            raise RunError(f"{saved}: already at step {step}, past train.{key} = {length}; raise train.{key} to go on")
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
        source.count_on(read_counts(saved), ranks)
    return replace(built, source=source)


def _kept(model: BlockDiffusionModel) -> str:
    """The dtype in which a model's weights are kept, in words, and the one in which they are gathered if it differs."""
    kept, gathered = (str(dtype).removeprefix("torch.") for dtype in (model.kept_dtype, model.dtype))
    dtypes = kept if kept == gathered else f"{kept}, gathered in {gathered}"
    forms = " and ".join(forms_of(model))
    return f"{dtypes}, linear layers and experts in {forms}" if forms else dtypes


def make_mesh(recipe: Recipe, ranks: Ranks) -> Mesh:
    """The mesh that a recipe asks for; RunError for what does not divide."""
    asked = recipe.parallel
    return Mesh.of(ranks, asked.shard, asked.experts, asked.offload, asked.tensor)


def move_own(objective: nn.Module, device: torch.device) -> None:
    """Move an objective's own tensors to a device; those of its model, which is offloaded, stay where they are."""
    for name, part in objective.named_children():
        if name != "model":
            part.to(device)
    for tensor in [*objective.parameters(recurse=False), *objective.buffers(recurse=False)]:
        tensor.data = tensor.data.to(device)


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """The number of steps of a run of `steps` that warm up, as the recipe says or by default."""
    return schedule.default_warmup(steps) if recipe.optim.warmup_steps is None else recipe.optim.warmup_steps
