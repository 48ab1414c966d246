"""Checks of a recipe before anything is loaded: settings that would fail late, and keys without effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from blockdiff.errors import RecipeError
from blockdiff.metrics import METRICS
from blockdiff.training.kinds import kinds
from blockdiff.training.kinds.kind import Needs, kind_of
from blockdiff.training.recipe import Recipe
from blockdiff.training.run import require_decisive
from blockdiff.training.starting_model import refuse_sharding
from blockdiff.training.trackers import check as check_trackers

OF_OPTIMISERS = ("name", "betas", "eps", "weight_decay")
OF_PROMPTS = ("prompts_every", "prompts_count", "task", "strategy")


def refuse(recipe: Recipe, world: int = 1) -> None:
    """Raise RecipeError for a recipe that would fail, or silently do nothing, only after long training.

    world: the number of processes.
    """
    check_trackers(recipe.train.trackers)
    kind = kind_of(recipe)
    for name in ("objective", "reward"):
        if getattr(recipe.given, name) and name not in kind.given:
            raise RecipeError(f"given.{name}: runs of kind {recipe.objective.kind} have none; leave it out")
    kind.refuse(recipe)
    if recipe.train.epochs is not None and recipe.data.streaming is not None:
        raise RecipeError("train.epochs: the rows of a stream are not counted beforehand; set train.steps instead")
    if recipe.train.batch_size < world // recipe.parallel.tensor:
        raise RecipeError(f"train.batch_size: {recipe.train.batch_size} is less than {world} processes; raise it")
    if recipe.optim.name == "adamw_8bit" and recipe.parallel.names != ("replicate",):
        raise RecipeError(
            "optim.name: adamw_8bit needs whole tensors, but parallel.shard and parallel.experts split them; set "
            "optim.name: adamw"
        )
    if recipe.model.compile and recipe.parallel.shard == "full":
        raise RecipeError(
            "model.compile: cannot compile layers whose weights are gathered inside them; leave out model.compile or "
            "parallel.shard: full"
        )
    _refuse_ambiguous_start(recipe)
    if recipe.model.rounds:
        if not recipe.lora.trains and not kind.trains_whole:
            form = recipe.model.quantize
            raise RecipeError(f"model.quantize: weights in {form} are frozen; train adapters (lora: {{rank: 16}})")
        refuse_sharding(recipe)
    _refuse_unmeasured_best(recipe)


def _refuse_unmeasured_best(recipe: Recipe) -> None:
    """Raise RecipeError if the run does not measure `evaluation.best`, or measures it too late for `patience`."""
    metric, patience = recipe.evaluation.best, recipe.evaluation.patience
    if metric is None:
        if patience is not None:
            raise RecipeError("evaluation.patience: needs a metric to watch; set evaluation.best, too")
        return
    require_decisive(metric)
    if METRICS[metric].kind == "heldout":
        needs, source, key, every = "data.heldout", recipe.data.heldout, "train.eval_every", recipe.train.eval_every
    else:
        e = recipe.evaluation
        needs, source, key, every = "evaluation.prompts", e.prompts, "evaluation.prompts_every", e.prompts_every
    if source is None:
        raise RecipeError(f"evaluation.best: {metric} is measured on {needs}; set {needs}")
    kind = kind_of(recipe)
    if metric not in kind.measured and any(metric in each.metrics for each in kinds().values()):
        remedy = f"choose one of {', '.join(kind.measured)}" if kind.measured else "choose another metric"
        raise RecipeError(f"evaluation.best: runs of kind {recipe.objective.kind} do not measure {metric}; {remedy}")
    if patience is not None and not every:
        raise RecipeError(f"evaluation.patience: {metric} is measured only at the end; set {key}")


def _refuse_ambiguous_start(recipe: Recipe) -> None:
    """Raise RecipeError for a start that would train nothing, or all weights without an explicit choice."""
    lora, is_given = recipe.lora, "lora" in recipe.model_fields_set
    if recipe.model.path is not None and not is_given and not kind_of(recipe).trains_whole:
        raise RecipeError(
            "lora: missing; choose what trains of model.path: adapters (lora: {rank: 16}) or all weights (lora: none)"
        )
    if lora.trains and recipe.model.path is None:
        raise RecipeError(
            f"lora: adapts the weights of a checkpoint, and the preset {recipe.model.preset} has none; leave lora out, "
            "or name a checkpoint with model.path"
        )
    if is_given and not lora.trains and lora != type(lora)():
        raise RecipeError("lora: no part has a rank, so nothing would be adapted; set lora.rank, or write lora: none")
    for key in ("router", "images"):
        if lora.trains and getattr(recipe.model, key) == "trained":
            raise RecipeError(f"model.{key}: trained: with lora only adapters train; set frozen, or write lora: none")
    if "images" in lora.ranks and recipe.model.images == "none":
        raise RecipeError("lora.parts: images adapts the image side; set model.images: frozen, which loads it")
    if isinstance(lora.alpha, dict) and (unknown := lora.alpha.keys() - lora.ranks.keys()):
        raise RecipeError(f"lora.alpha: {min(unknown)} is no part with a rank; those are {', '.join(lora.ranks)}")


def refuse_changed(recipe: Recipe, keys: Mapping[str, Collection[str]], why: str) -> None:
    """Raise RecipeError for the first of some keys, listed by section, whose value is not its default."""
    for name, listed in keys.items():
        section = getattr(recipe, name)
        for key in listed:
            if getattr(section, key) != type(section).model_fields[key].default:
                raise RecipeError(f"{name}.{key}: {why}")


def without_effect(recipe: Recipe, steps: int) -> list[str]:
    """Return a line for each changed key that other keys leave without effect, in a run of `steps` optimiser steps.

    A warm-up that does not end within the run gets a line, too.
    """
    d, t, e, o = recipe.data, recipe.train, recipe.evaluation, recipe.optim
    keeps_some = not t.keep_every or (t.save_every > 0 and t.keep_every % t.save_every == 0)
    needs: list[Needs] = [
        (o, "optim", ("momentum",), o.name == "muon", "optim.name: muon"),
        (o, "optim", OF_OPTIMISERS, recipe.given.optimiser is None, "no optimiser from Python"),
        (t, "train", ("eval_every",), d.heldout is not None, "data.heldout"),
        (t, "train", ("keep_every",), keeps_some, "to be a multiple of train.save_every"),
        (e, "evaluation", ("rows",), d.heldout is not None, "data.heldout"),
        (e, "evaluation", OF_PROMPTS, e.prompts is not None, "evaluation.prompts"),
    ]
    if (lora := recipe.lora).trains:
        has_linear = lora.path is not None or any(part != "experts" for part in lora.ranks)
        needs.append((lora, "lora", ("alpha", "rslora", "noisy_only"), bool(lora.ranks), "a part with a rank"))
        needs.append((lora, "lora", ("dropout",), has_linear, "a part of linear layers with a rank"))
    needs += kind_of(recipe).without_effect(recipe)
    warmup = recipe.optim.warmup_steps or 0
    endless = f"optim.warmup_steps: the warm-up of {warmup} steps does not end within the {steps} steps of the run"
    return [endless] * (warmup >= steps) + [
        f"{name}.{key} has no effect: it needs {what}"
        for section, name, keys, is_there, what in needs
        for key in keys
        if not is_there and getattr(section, key) != type(section).model_fields[key].default
    ]
