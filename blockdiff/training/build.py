"""`build`: from a recipe to everything that trains, one function to be read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockdiff import checkpoint, evals
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.draft_objective import DraftObjective
from blockdiff.errors import RunError
from blockdiff.evals.questions import questions_of
from blockdiff.models.adapters import draw_adapters
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import load_split, replicate, split
from blockdiff.rl.prompts import Prompts
from blockdiff.rl.reward import make_rewards
from blockdiff.training import optimiser as optimisers
from blockdiff.training import schedule
from blockdiff.training.checkpoint_reader import read_counts, restore
from blockdiff.training.data import Data, read_data
from blockdiff.training.distil import Distil, make_distil
from blockdiff.training.freeze import count_parts
from blockdiff.training.optimiser import Ema
from blockdiff.training.plan.fitting import require_kept, require_step
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.rollouts import Rollouts, make_rollouts
from blockdiff.training.same_run import objective_record, resume_facts
from blockdiff.training.samples import judging_task
from blockdiff.training.starting_model import StartingModel, computed_in, read_starting_model, without_weights
from blockdiff.training.step import Loss, checkpoint_activations


@dataclass(frozen=True)
class Built:
    """Everything a trainer needs: model, objective, optimiser, data, and the step it begins at."""

    base: StartingModel
    data: Data
    model: Any
    objective: Objective
    losses: dict[str, Loss]  # by name, as the objective returns their sums
    mesh: Mesh
    module: nn.Module  # what is called: the objective, wrapped where there are several ranks
    precision: str | None  # what autocast computes in; None where the weights are gathered in that already
    optimiser: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    average: Ema | None
    rollouts: Distil | Rollouts | None  # what the sampler does between optimiser steps
    diffusion: DiffusionSettings
    facts: dict[str, Any]  # what must be the same for the run to be resumed
    steps: int  # the length of the run
    step: int  # the optimiser step of the checkpoint that was restored, 0 = none was


def build(recipe: Recipe, ranks: Ranks, show: Progress, saved: Path | None = None) -> Built:
    """Make everything that a recipe names, and restore the checkpoint `saved`; `show` prints a line for each part.

    A recipe that can be refused without weights is refused before they are read. Optimiser and average are made of
    the parameters as they are spread over the ranks. Raises RecipeError, DataError, CheckpointError or RunError, in one
    line each.
    """
    base = read_starting_model(recipe)
    objective = without_weights(recipe, base)
    model = objective.model
    mesh = make_mesh(recipe, ranks)
    require_kept(objective, recipe, base, ranks)

    data = checked_data(recipe, base, show, ranks)
    for line in data.lines():
        show.line(line)
    if recipe.rl is not None:
        make_rewards(recipe.rl.reward, recipe.given.reward, data.asked)  # what cannot judge is refused here
    require_step(objective, recipe, base, ranks, data, show)

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
    else:
        dtype = "float32" if recipe.model.dtype == "auto" else recipe.model.dtype
        checkpoint.draw_weights(model, seed=recipe.seed, dtype=dtype, device=ranks.device)
    show.line(f"model     {recipe.model.path or f'preset {recipe.model.preset}'}, {_kept(model)}")
    if isinstance(objective, DraftObjective):
        objective.draft_for(load_target(recipe, mesh))
        show.line(f"target    {recipe.objective.draft_for}, {_kept(objective.target)}")
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
    diffusion = DiffusionSettings.of(objective, objective_record(recipe, objective))
    rollouts: Distil | Rollouts | None = make_distil(recipe, base, model, diffusion, precision)
    rollouts = rollouts or make_rollouts(recipe, base, data, objective, diffusion, ranks, precision, show)
    if saved is not None and rollouts is not None:
        rollouts.count_on(read_counts(saved), ranks)
    return Built(
        base=base,
        data=data,
        model=model,
        objective=objective,
        losses=losses_of(recipe, base),
        mesh=mesh,
        module=module,
        precision=precision,
        optimiser=optimiser,
        learning_rate=learning_rate,
        average=average,
        rollouts=rollouts,
        diffusion=diffusion,
        facts=facts,
        steps=data.steps,
        step=step,
    )


def _kept(model: BlockDiffusionModel) -> str:
    """The dtype in which a model's weights are kept, in words, and the one in which they are gathered if it differs."""
    kept, gathered = (str(dtype).removeprefix("torch.") for dtype in (model.kept_dtype, model.dtype))
    dtypes = kept if kept == gathered else f"{kept}, gathered in {gathered}"
    return f"{dtypes}, linear layers and experts in fp8" if stored_layers(model) else dtypes


def load_target(recipe: Recipe, mesh: Mesh) -> BlockDiffusionModel:
    """The model that a drafter drafts for, spread over the ranks as the drafter is; adapters over it are not merged."""
    dtype = recipe.train.autocast or recipe.model.dtype
    return load_split(
        str(recipe.objective.draft_for), mesh, dtype, recipe.model.kernels, quantize=recipe.model.quantize
    )


def losses_of(recipe: Recipe, base: StartingModel) -> dict[str, Loss]:
    """The losses of a run by name, each with what divides it and its weight."""
    canvas, share = methodcaller("canvas_count"), 1.0 if recipe.rl is None else recipe.rl.sft
    if recipe.objective.draft_for is not None:
        return {"draft": Loss(canvas)}
    ar_loss = recipe.objective.ar_loss
    ar = Loss(methodcaller("ar_count"), 0.0 if ar_loss is None else share * ar_loss.weight)
    if recipe.rl is not None:
        return {"canvas": Loss(canvas, share), "ar": ar, "policy": Loss(methodcaller("answer_count"))}
    return {"canvas": Loss(canvas), "ar": ar} if base.denoises else {"ar": ar}


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


def checked_data(recipe: Recipe, base: StartingModel, show: Progress, ranks: Ranks | None = None) -> Data:
    """The data of a recipe, with lines while rows are encoded.

    Raises DataError for a row of `evaluation.prompts` that is no question of `evaluation.task`.
    """
    data = read_data(recipe, base, ranks, show.reading)
    if isinstance(data.prompts, Prompts):
        judging_task(recipe, data.prompts)
    elif data.prompts:
        questions_of(data.prompts, evals.task(recipe.evaluation.task), data.encoder)
    return data
