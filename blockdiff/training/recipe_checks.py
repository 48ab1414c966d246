"""Looking at a recipe before anything is loaded: for what would only fail late, and for keys without effect."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blockdiff.diffusion.schedule import Schedule
from blockdiff.diffusion.weight import NoWeight
from blockdiff.errors import RecipeError
from blockdiff.metrics import METRICS
from blockdiff.training.recipe import Recipe, RlSection
from blockdiff.training.recipe_choices import UniformTokens
from blockdiff.training.run import require_decisive
from blockdiff.training.trackers import check as check_trackers

OF_OPTIMISERS = ("name", "betas", "eps", "weight_decay")
OF_PROMPTS = ("prompts_every", "prompts_count", "task", "strategy")
OF_CANVASES = {
    "objective": (
        *("schedule", "time", "corruption", "weight"),
        *("positions", "prediction", "stop_gradient", "sweep", "coin", "distil"),
    ),
    "data": ("canvases",),
}
OF_DRAFTERS = ("heldout_accepted_length", "heldout_draft_accuracy", "heldout_draft_loss")  # held-out metrics
NOT_OF_DRAFTERS = {
    "objective": (*OF_CANVASES["objective"], "ar_loss", "router", "images"),
    "data": ("canvases",),
    "evaluation": ("prompts", "strategy"),
}


def refuse(recipe: Recipe, world: int = 1) -> None:
    """Raise RecipeError for what would fail, or silently do nothing, after a long training."""
    check_trackers(recipe.train.trackers)
    refuse_schedule(recipe.objective.schedule)
    if recipe.train.epochs is not None and recipe.data.streaming is not None:
        raise RecipeError("train.epochs: the rows of a stream are not counted beforehand; give train.steps instead")
    if recipe.train.batch_size < world // recipe.parallel.tensor:
        raise RecipeError(f"train.batch_size: {recipe.train.batch_size} is less than {world} processes; raise it")
    if recipe.optim.name == "adamw_8bit" and recipe.parallel.names != ("replicate",):
        raise RecipeError(
            "optim.name: adamw_8bit keeps its state in blocks of whole tensors, which parallel.shard and "
            "parallel.experts split; use adamw"
        )
    if recipe.model.compile and recipe.parallel.shard == "full":
        raise RecipeError(
            "model.compile: gathering weights within a layer (parallel.shard: full) breaks it up for the compiler; "
            "leave one of the two out"
        )
    _refuse_unasked(recipe)
    _refuse_undistilled(recipe)
    if recipe.rl is not None:
        _refuse_unreinforced(recipe, recipe.rl)
    if recipe.model.quantize is not None and not recipe.lora.trains and recipe.objective.draft_for is None:
        raise RecipeError("model.quantize: weights in fp8 stand still; train adapters over them (`lora: {rank: 16}`)")
    if recipe.model.quantize is not None and recipe.parallel.shard == "full":
        raise RecipeError(
            "model.quantize: parallel.shard: full splits parameters, and weights in fp8 are buffers, which every "
            "process would hold whole; split them with parallel.tensor or parallel.experts alone"
        )
    _refuse_unmeasured(recipe)


def _refuse_unmeasured(recipe: Recipe) -> None:
    """Raise RecipeError for a metric that is to decide and that this run does not measure, or not in time."""
    metric, patience = recipe.evaluation.best, recipe.evaluation.patience
    if metric is None:
        if patience is not None:
            raise RecipeError("evaluation.patience: needs evaluation.best, the metric it waits for")
        return
    require_decisive(metric)
    if METRICS[metric].kind == "heldout":
        needs, source, key, every = "data.heldout", recipe.data.heldout, "train.eval_every", recipe.train.eval_every
    else:
        asked = recipe.evaluation
        needs, source, key, every = "evaluation.prompts", asked.prompts, "evaluation.prompts_every", asked.prompts_every
    if source is None:
        raise RecipeError(f"evaluation.best: {metric} is measured on {needs}, which is not set")
    if metric in ("heldout_ar_loss", "heldout_ar_accuracy") and recipe.objective.ar_loss is None:
        raise RecipeError(f"evaluation.best: {metric} is not measured with objective.ar_loss: none")
    is_drafted = recipe.objective.draft_for is not None
    if METRICS[metric].kind == "heldout" and (metric in OF_DRAFTERS) != is_drafted:
        others = f"of a drafter there are {', '.join(OF_DRAFTERS)}"
        others = others if is_drafted else "it is a drafter's (objective.draft_for)"
        raise RecipeError(f"evaluation.best: {metric} is not measured; {others}")
    if metric == "sample_reward" and recipe.rl is None:
        raise RecipeError("evaluation.best: sample_reward is not measured; it is of reinforcement learning (rl)")
    if patience is not None and not every:
        raise RecipeError(f"evaluation.patience: {metric} is measured at the end only; set {key}")


def _refuse_unasked(recipe: Recipe) -> None:
    """Raise RecipeError for a start that would train nothing or, without being asked to, everything."""
    lora, is_given = recipe.lora, "lora" in recipe.model_fields_set
    if recipe.model.path is not None and not is_given and recipe.objective.draft_for is None:
        raise RecipeError(
            "lora: missing; say what trains of model.path: adapters (`lora: {rank: 16}`) or all weights (`lora: none`)"
        )
    if lora.trains and recipe.model.path is None:
        raise RecipeError(
            f"lora: adapts the weights of a checkpoint, and the preset {recipe.model.preset} has none; leave lora out, "
            "or name a checkpoint with model.path"
        )
    if is_given and not lora.trains and lora != type(lora)():
        raise RecipeError("lora: no part has a rank, so nothing would be adapted; set lora.rank, or write `lora: none`")
    for key in ("router", "images"):
        if lora.trains and getattr(recipe.objective, key) == "trained":
            raise RecipeError(
                f"objective.{key}: trained: with lora only adapters train; choose frozen, or use `lora: none`"
            )
    if "images" in lora.ranks and recipe.objective.images == "none":
        raise RecipeError("lora.parts: images adapts the image side; set objective.images: frozen, so that it is there")
    if isinstance(lora.alpha, dict) and (unknown := lora.alpha.keys() - lora.ranks.keys()):
        raise RecipeError(f"lora.alpha: {min(unknown)} is no part with a rank (there are: {', '.join(lora.ranks)})")


def _refuse_undistilled(recipe: Recipe) -> None:
    """Raise RecipeError for what does not go with a step distillation."""
    if recipe.objective.distil is None:
        return
    if recipe.model.path is None:
        raise RecipeError("objective.distil: random weights settle on nothing; name a trained model with model.path")
    if recipe.parallel.names != ("replicate",):
        raise RecipeError(
            "objective.distil: every process samples at its own pace, so it must hold the whole model; leave "
            "parallel.shard, parallel.experts and parallel.tensor out"
        )
    if recipe.objective.images != "none":
        raise RecipeError("objective.distil: rows with images are not rolled out; leave objective.images out")
    if not isinstance(recipe.objective.weight, NoWeight) or recipe.objective.prediction != "posterior":
        key, value = ("weight", "none") if recipe.objective.prediction == "posterior" else ("prediction", "posterior")
        raise RecipeError(
            f"objective.distil: objective.{key} needs a noise level, and a state of the sampler has none; write {value}"
        )


def _refuse_unreinforced(recipe: Recipe, rl: RlSection) -> None:
    """Raise RecipeError for what does not go with reinforcement learning."""
    o, t, answers = recipe.objective, recipe.train, rl.prompts * rl.group
    if recipe.model.path is None:
        raise RecipeError("rl: random weights earn no rewards; name a trained model with model.path")
    if t.batch_size > answers or answers % t.batch_size:
        raise RecipeError(
            f"train.batch_size: {t.batch_size} does not divide the {answers} answers of a round (rl.prompts times "
            "rl.group)"
        )
    if t.epochs is not None:
        raise RecipeError("train.epochs: rounds of rollouts have no end; give train.steps instead")
    if rl.reward is None and recipe.given.reward is None:
        raise RecipeError("rl.reward: missing; name a task or module:function, or give reward= from Python")
    if recipe.given.objective is not None:
        raise RecipeError("given.objective: the objective of rollouts is the policy's; leave one of the two out")
    others = {"distil": o.distil is not None, "draft_for": o.draft_for is not None, "images": o.images != "none"}
    for key in (name for name, is_asked in others.items() if is_asked):
        raise RecipeError(f"objective.{key}: goes without reinforcement learning; leave it out")
    why = "is of rows with responses, and rl answers prompts; leave it out"
    _refuse_changed(recipe, {"data": ("pack", "streaming", "max_length", "on_bad_row", "turns")}, why)
    if rl.policy == "canvas" and (not isinstance(o.corruption, UniformTokens) or o.prediction != "posterior"):
        key, value = ("corruption", "uniform") if o.prediction == "posterior" else ("prediction", "posterior")
        raise RecipeError(f"rl.policy: canvas: its draws are known for objective.{key}: {value} alone; choose head")
    if rl.signal == "through" and recipe.parallel.names != ("replicate",):
        raise RecipeError("rl.signal: through makes logits of all tokens on one device; leave parallel out")
    if recipe.lora.dropout:
        raise RecipeError("lora.dropout: the policy that is scored would not be the one that drew; leave it out")
    if rl.kl and not recipe.lora.trains:
        raise RecipeError("rl.kl: the reference is the model without its adapters; train adapters (`lora: {rank: 16}`)")
    if rl.kl and recipe.lora.tokens:
        raise RecipeError("rl.kl: the reference would have the rows of lora.tokens as they train; leave them out")
    steps, e = rl.steps(t.batch_size), recipe.evaluation
    due = {"train.save_every": t.save_every, "train.eval_every": t.eval_every, "train.steps": t.steps or 0}
    for name, every in (due | {"evaluation.prompts_every": e.prompts_every}).items():
        if every % steps:
            raise RecipeError(f"{name}: {every} is within a round of rollouts; choose a multiple of its {steps} steps")


def refuse_of_causal(recipe: Recipe) -> None:
    """Raise RecipeError for what a recipe says of canvases where the model is causal and has none."""
    if recipe.objective.ar_loss is None:
        raise RecipeError("objective.ar_loss: none: next tokens are all that a causal model learns; leave it out")
    why = "is of canvases, and the model is causal; leave it out, or give the model canvases (`blockdiff init --from`)"
    _refuse_changed(recipe, OF_CANVASES, why)


def refuse_of_drafter(recipe: Recipe) -> None:
    """Raise RecipeError for what a recipe says that is nothing of a drafter's objective."""
    _refuse_changed(recipe, NOT_OF_DRAFTERS, "a drafter learns without it (objective.draft_for); leave it out")
    if recipe.lora.trains:
        raise RecipeError("lora: a drafter trains whole, and is small; leave lora out")


def _refuse_changed(recipe: Recipe, keys: Mapping[str, tuple[str, ...]], why: str) -> None:
    """Raise RecipeError for the first of some keys that has not its default."""
    for name, of_section in keys.items():
        section = getattr(recipe, name)
        for key in of_section:
            if getattr(section, key) != type(section).model_fields[key].default:
                raise RecipeError(f"{name}.{key}: {why}")


def refuse_schedule(schedule: Schedule) -> None:
    """Raise RecipeError for a noise schedule that keeps other shares of tokens than one can."""
    t = torch.linspace(0, 1, 129, dtype=torch.float64)
    alpha, noise, name = schedule.alpha(t), schedule.noise(t), type(schedule).__name__
    wrong = None
    if not all(isinstance(each, torch.Tensor) and each.shape == t.shape for each in (alpha, noise)):
        wrong = "alpha(t) and noise(t) must be tensors of the shape of t"
    elif not ((alpha > -1e-6) & (alpha < 1 + 1e-6)).all():
        wrong = f"alpha(t) is from {alpha.min():.3g} to {alpha.max():.3g}, and a probability is from 0 to 1"
    elif (rising := alpha.diff() > 1e-6).any():
        wrong = f"alpha(t) rises after t = {t[:-1][rising][0]:.3g}, and more noise must not keep more tokens"
    elif not torch.allclose(noise, 1 - alpha, atol=1e-4):
        wrong = "noise(t) must be 1 - alpha(t)"
    if wrong:
        raise RecipeError(f"objective.schedule: {name}: {wrong}; change it (docs/extending.md)")


def without_effect(recipe: Recipe, steps: int) -> list[str]:
    """A line for every key that was changed but does nothing beside those of other sections, in a run of `steps`.

    A warm-up that never ends gets a line, too.
    """
    d, t, e, o, c = recipe.data, recipe.train, recipe.evaluation, recipe.optim, recipe.objective
    keeps_some = not t.keep_every or (t.save_every > 0 and t.keep_every % t.save_every == 0)
    needs = [
        (o, "optim", ("momentum",), o.name == "muon", "optim.name: muon"),
        (o, "optim", OF_OPTIMISERS, recipe.given.optimiser is None, "no optimiser from Python"),
        (c, "objective", ("anchors", "loss", "targets"), c.draft_for is not None, "objective.draft_for"),
        (t, "train", ("eval_every",), d.heldout is not None, "data.heldout"),
        (t, "train", ("keep_every",), keeps_some, "to be a multiple of train.save_every"),
        (e, "evaluation", ("rows",), d.heldout is not None, "data.heldout"),
        (e, "evaluation", OF_PROMPTS, e.prompts is not None, "evaluation.prompts"),
    ]
    if (lora := recipe.lora).trains:
        has_linear = any(part != "experts" for part in lora.ranks)
        needs.append((lora, "lora", ("alpha", "rslora"), bool(lora.ranks), "a part with a rank"))
        needs.append((lora, "lora", ("dropout",), has_linear, "a part of linear layers with a rank"))
    if (rl := recipe.rl) is not None:
        has_examples = rl.sft > 0 or d.heldout is not None
        needs.append((d, "data", ("canvases",), has_examples, "rl.sft or data.heldout"))
        has_ratios = rl.steps(t.batch_size) > 1
        needs.append((rl, "rl", ("signal",), rl.policy == "canvas", "rl.policy: canvas"))
        needs.append((rl, "rl", ("clip",), has_ratios, "several steps a round (rl.epochs or train.batch_size)"))
    warmup = recipe.optim.warmup_steps or 0
    endless = f"optim.warmup_steps: the warm-up of {warmup} steps does not end within the {steps} steps of the run"
    return [endless] * (warmup >= steps) + [
        f"{name}.{key} has no effect: it needs {what}"
        for section, name, keys, is_there, what in needs
        for key in keys
        if not is_there and getattr(section, key) != type(section).model_fields[key].default
    ]
