"""`build`: from a recipe to everything that trains, one function to be read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockdiff import checkpoint, evals, memory
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.diffusion.corruption import Corruption
from blockdiff.errors import RecipeError, RunError
from blockdiff.evals.run import questions_of
from blockdiff.models.family import family_of
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate
from blockdiff.sampling import Generation
from blockdiff.sampling.choices import Choices
from blockdiff.training import optimiser as optimisers
from blockdiff.training import schedule, state
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.data import Data, read_data
from blockdiff.training.ema import Ema
from blockdiff.training.facts import facts_of, objective_record
from blockdiff.training.freeze import count_parts, freeze
from blockdiff.training.objects import MaskToken, UniformTokens
from blockdiff.training.optimiser import trainable
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """What a run starts from, as far as it is known without the weights."""

    config: Any
    tokenizer: Any
    generation: Generation  # what generation_config.json of the trained model will say
    eos_id: int
    pad_id: int

    @property
    def canvas_length(self) -> int:
        """L of the model."""
        return family_of(self.config).outline(self.config).canvas_length

    @property
    def vocab_size(self) -> int:
        """V of the model."""
        return family_of(self.config).outline(self.config).vocab_size


@dataclass(frozen=True)
class Parts:
    """What a trainer trains, with what, and on what."""

    origin: Origin
    data: Data
    model: Any
    objective: Objective
    module: nn.Module  # what is called: the objective, wrapped where there are several ranks
    optimiser: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    average: Ema | None
    choices: Choices
    facts: dict[str, Any]  # what must be the same for the run to be resumed
    step: int  # the optimiser step of the checkpoint that was restored, 0 = none was


def read_origin(recipe: Recipe) -> Origin:
    """Config, tokenizer and settings of the model a recipe starts from; reads no weights."""
    m, generation = recipe.model, None
    if m.path is not None:
        config = checkpoint.read_config(m.path)
        tokenizer = load_tokenizer(m.tokenizer or find(m.path, with_weights=False))
        generation = Generation.from_pretrained(m.path)
    elif m.tokenizer is not None:
        tokenizer = load_tokenizer(m.tokenizer)
        config = checkpoint.fitted(checkpoint.preset_config(str(m.preset)), tokenizer)
    else:
        raise RecipeError(
            f"model.tokenizer: missing; the preset {m.preset} has random weights and no tokenizer, name one"
        )
    special = checkpoint.special_tokens(config, generation, tokenizer)
    if not special.eos_ids:
        raise RecipeError("model: neither generation_config.json nor the tokenizer names an eos token; set one")
    settings = {key: value for key, value in recipe.generation.model_dump().items() if value is not None}
    try:
        generation = replace(generation or checkpoint.default_generation(config), **settings)
    except ValueError as error:
        raise RecipeError(f"generation: {error}") from None
    origin = Origin(config, tokenizer, generation, special.eos_ids[0], special.pad_id)
    if len(tokenizer) > origin.vocab_size:
        raise RecipeError(
            f"model.tokenizer: {len(tokenizer)} tokens, but the model has {origin.vocab_size}; "
            "use the tokenizer the weights were trained with"
        )
    return origin


def build(
    recipe: Recipe,
    ranks: Ranks,
    show: Progress,
    saved: Path | None = None,
) -> Parts:
    """Make everything that a recipe names, and restore the checkpoint `saved`; says on the terminal what it is.

    Raises RecipeError, DataError, CheckpointError or RunError in one line.
    """
    m, o, t = recipe.model, recipe.objective, recipe.train
    origin = read_origin(recipe)
    corruption = "mask" if isinstance(o.corruption, MaskToken) else "uniform"
    family_of(origin.config).require(predictions=o.prediction, corruptions=corruption, meshes="replicate")
    model = checkpoint.empty(origin.config, kernels=m.kernels)
    objective = (recipe.given.objective or Objective)(
        model,
        o.schedule,
        corruption_of(recipe, origin),
        seed=recipe.seed,
        weight=o.weight,
        prediction=o.prediction,
        positions=o.positions,
        stop_gradient=o.stop_gradient,
    )
    freeze(model, recipe.optim.freeze, trains_routers(recipe))
    require_memory(model, recipe, ranks.device)

    data = read_data(recipe, origin, ranks)
    for line in data.lines():
        show.line(line)
    if data.prompts:
        # A wrong row is refused before training.
        questions_of(data.prompts, evals.task(recipe.evaluation.task), data.encoder)

    if t.activation_checkpointing:
        checkpoint_activations(model)
    if m.compile:
        for layer in model.layers:
            layer.compile()
    if m.path is not None:
        checkpoint.load_weights(model, m.path, dtype=m.dtype, device=ranks.device)
    else:
        dtype = "float32" if m.dtype == "auto" else m.dtype
        checkpoint.draw_weights(model, seed=recipe.seed, dtype=dtype, device=ranks.device)
    show.line(f"model     {m.path or f'preset {m.preset}'}, {model.dtype}".replace("torch.", ""))
    show.parts(count_parts(model))

    module = replicate(objective, ranks)
    p = recipe.optim
    optimiser = optimisers.build(
        objective,
        name=p.name,
        lr=p.lr,
        betas=p.betas,
        eps=p.eps,
        weight_decay=p.weight_decay,
        layer_decay=p.layer_decay,
        make=recipe.given.optimiser,
    )
    learning_rate = partial(
        schedule.learning_rate, p.schedule, peak=p.lr, steps=t.steps, warmup_steps=p.warmup_steps
    )
    average = Ema(objective, recipe.optim.ema) if recipe.optim.ema is not None else None
    facts = facts_of(recipe, origin, data, objective)
    step = 0
    if saved is not None:
        step = state.restore(saved, objective, optimiser, facts, average=average, ranks=ranks)
        if step > t.steps:
            raise RunError(f"{saved}: already at step {step}, past train.steps = {t.steps}; raise train.steps to go on")
    choices = Choices.of(objective, objective_record(recipe, objective))
    return Parts(
        origin, data, model, objective, module, optimiser, learning_rate, average, choices, facts, step
    )


def require_memory(model: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Refuse a model without memory whose training cannot fit on a device; activations are not counted."""
    o, dtype = recipe.optim, recipe.model.dtype
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    trained = sum(parameter.numel() for parameter in trainable(model).values())
    needs = partial(memory.of_training, numbers, trained, is_averaged=o.ema is not None)
    smaller = {
        "optim.name: adamw_8bit": needs(dtype, "adamw_8bit"),
        "model.dtype: bfloat16": needs("bfloat16", o.name),
        "both": needs("bfloat16", "adamw_8bit"),
    }
    totals = {choice: sum(parts.values()) for choice, parts in smaller.items()}
    memory.require(needs(dtype, o.name), device, totals)


def trains_routers(recipe: Recipe) -> bool:
    """Whether the routers train: by default only from scratch, where they have learnt nothing yet."""
    if recipe.objective.router == "auto":
        return recipe.model.path is None
    return recipe.objective.router == "trained"


def corruption_of(recipe: Recipe, origin: Origin) -> Corruption:
    """What a corrupted token becomes, for this tokenizer; the recipe may hold one that was given from Python."""
    chosen = recipe.objective.corruption
    if not isinstance(chosen, UniformTokens | MaskToken):
        return chosen
    return chosen.of(origin.tokenizer, origin.vocab_size, (origin.eos_id, origin.pad_id, origin.tokenizer.bos_token_id))
