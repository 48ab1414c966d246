"""`build`: from a recipe to everything that trains, one function to be read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockdiff import checkpoint, evals
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.diffusion.corruption import Corruption, MaskCorruption
from blockdiff.errors import CheckpointError, RecipeError, RunError
from blockdiff.evals.questions import questions_of
from blockdiff.kernels import Kernels
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.models.fp8 import fp8_layers, layers_in_fp8, put_in_fp8
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate, split
from blockdiff.sampling import Generation
from blockdiff.sampling.choices import Choices
from blockdiff.training import optimiser as optimisers
from blockdiff.training import schedule, state
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.checkpoint_tensors import require_own_names
from blockdiff.training.data import Data, read_data
from blockdiff.training.ema import Ema
from blockdiff.training.facts import facts_of, objective_record
from blockdiff.training.freeze import count_parts, freeze
from blockdiff.training.objects import MaskToken, UniformTokens
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.refuse import refuse_of_causal
from blockdiff.training.sections import LoraSection


@dataclass(frozen=True)
class Base:
    """The model that a run starts from, as far as it is known without weights."""

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
    def denoises(self) -> bool:
        """Whether the model has canvases, or is causal alone."""
        return family_of(self.config).outline(self.config).denoises

    @property
    def vocab_size(self) -> int:
        """V of the model."""
        return family_of(self.config).outline(self.config).vocab_size


@dataclass(frozen=True)
class Built:
    """What a trainer trains, with what, and on what."""

    base: Base
    data: Data
    model: Any
    objective: Objective
    mesh: Mesh
    module: nn.Module  # what is called: the objective, wrapped where there are several ranks
    precision: str | None  # what autocast computes in; None where the weights are gathered in that already
    optimiser: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    average: Ema | None
    choices: Choices
    facts: dict[str, Any]  # what must be the same for the run to be resumed
    steps: int  # the length of the run
    step: int  # the optimiser step of the checkpoint that was restored, 0 = none was


def build(recipe: Recipe, ranks: Ranks, show: Progress, saved: Path | None = None) -> Built:
    """Make everything that a recipe names, and restore the checkpoint `saved`; `show` prints what it is.

    What can be refused without weights is refused before they are read. Optimiser and average are made of the
    parameters as they are spread over the ranks. Raises RecipeError, DataError, CheckpointError or RunError, in one
    line each.
    """
    base = read_base(recipe)
    objective = without_weights(recipe, base)
    model = objective.model
    mesh = mesh_of(recipe, ranks)
    # these plan what this function builds
    from blockdiff.training.plan.device_memory import require_kept, require_step

    require_kept(objective, recipe, base, ranks)
    if ranks.device.type == "cpu" and recipe.given.objective is None:
        objective.one_sweep = True  # fewer, larger calls

    data = checked_data(recipe, base, ranks)
    for line in data.lines():
        show.line(line)
    require_step(objective, recipe, base, ranks, data, show)

    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    if recipe.model.compile:
        for layer in model.layers:
            layer.compile()
    precision: str | None = recipe.train.autocast
    if mesh.is_split:
        split(model, mesh, checkpoint.dtype_of(recipe.model.dtype, recipe.model.path), computed_in(recipe))
        precision = precision if mesh.shard == "none" else None
    if recipe.model.path is not None:
        checkpoint.load_weights(model, recipe.model.path, dtype=recipe.model.dtype, device=ranks.device)
        draw_adapters(model, recipe.seed, ranks.device, model.vocabulary.table.dtype)
    else:
        dtype = "float32" if recipe.model.dtype == "auto" else recipe.model.dtype
        checkpoint.draw_weights(model, seed=recipe.seed, dtype=dtype, device=ranks.device)
    show.line(f"model     {recipe.model.path or f'preset {recipe.model.preset}'}, {_kept(model)}")
    if mesh.is_split:
        show.line(f"mesh      {mesh}")
    show.parts(count_parts(model))
    if mesh.offload:
        move_own(objective, ranks.device)
    else:
        objective.to(ranks.device)  # what it has beside the model
    module = replicate(objective, mesh)

    optimiser = optimisers.build(
        objective,
        name=recipe.optim.name,
        lr=recipe.optim.lr,
        betas=recipe.optim.betas,
        eps=recipe.optim.eps,
        weight_decay=recipe.optim.weight_decay,
        layer_decay=recipe.optim.layer_decay,
        make=recipe.given.optimiser,
    )
    learning_rate = partial(
        schedule.learning_rate,
        recipe.optim.schedule,
        peak=recipe.optim.lr,
        steps=data.steps,
        warmup_steps=warmup_steps(recipe, data.steps),
    )
    average = Ema(objective, recipe.optim.ema) if recipe.optim.ema is not None else None

    facts, step = facts_of(recipe, base, data, objective), 0
    if saved is not None:
        step = state.restore(saved, objective, optimiser, facts, average=average, ranks=ranks)
        if step > data.steps:
            key = "steps" if recipe.train.epochs is None else "epochs"
            length = f"{getattr(recipe.train, key):g}"
            raise RunError(f"{saved}: already at step {step}, past train.{key} = {length}; raise train.{key} to go on")
    choices = Choices.of(objective, objective_record(recipe, objective))
    made = (base, data, model, objective, mesh, module, precision, optimiser, learning_rate, average, choices)
    return Built(*made, facts, data.steps, step)


def _kept(model: BlockDiffusionModel) -> str:
    """The dtype of a model's weights as they are kept, and that in which they are gathered if it is another one."""
    kept, gathered = (str(dtype).removeprefix("torch.") for dtype in (model.vocabulary.table.dtype, model.dtype))
    said = kept if kept == gathered else f"{kept}, gathered in {gathered}"
    layers = layers_in_fp8(model).values()
    inputs = " with their inputs" if any(layer.rounds_inputs for layer in layers) else ""
    return f"{said}, linear layers and experts in fp8{inputs}" if layers else said


def without_weights(
    recipe: Recipe, base: Base, kernels: str | Kernels | None = None, dtype: torch.dtype | None = None
) -> Any:
    """The objective and its model with adapters, frozen as the recipe says, whose weights have no memory.

    kernels: others than the recipe's; dtype: of the weights (None: they get theirs when they are filled).
    """
    corruption = corruption_of(recipe, base)
    model = checkpoint.empty(base.config, kernels=kernels or recipe.model.kernels)
    if recipe.model.quantize is not None:
        put_in_fp8(model, fp8_layers(model), recipe.model.quantize == "fp8-dynamic")
    if dtype is not None:
        model.to(dtype)
    objective = (recipe.given.objective or Objective)(
        model,
        recipe.objective.schedule,
        corruption,
        seed=recipe.seed,
        weight=recipe.objective.weight,
        prediction=recipe.objective.prediction,
        positions=recipe.objective.positions,
        stop_gradient=recipe.objective.stop_gradient,
    )
    if recipe.parallel.names != ("replicate",):
        objective.one_sweep = True  # each layer is gathered three times in a step, not five times
    require_own_names(objective)
    choose_trained(model, recipe, base.tokenizer)
    return objective


def read_base(recipe: Recipe) -> Base:
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
    base = Base(config, tokenizer, generation, special.eos_ids[0], special.pad_id)
    if not base.denoises:
        refuse_of_causal(recipe)
    if len(tokenizer) > base.vocab_size:
        raise RecipeError(
            f"model.tokenizer: {len(tokenizer)} tokens, but the model has {base.vocab_size}; "
            "use the tokenizer the weights were trained with"
        )
    return base


def put_adapters(model: BlockDiffusionModel, lora: LoraSection, tokenizer: Any) -> None:
    """Give a model without weights the adapters that a recipe asks for; RecipeError names what it lacks."""
    tokens = []
    for token in lora.tokens:
        known = token if isinstance(token, int) else tokenizer.get_vocab().get(token)
        if known is None:
            raise RecipeError(f"lora.tokens: {token!r} is no token of the tokenizer; name one as it is spelt, or by id")
        tokens.append(int(known))
    if len(set(tokens)) < len(tokens):
        raise RecipeError("lora.tokens: names a token twice")
    try:
        adapt(model, targets(model, lora.low_rank()), tokens)
    except CheckpointError as error:
        raise RecipeError(f"lora: {error}") from None


def choose_trained(model: BlockDiffusionModel, recipe: Recipe, tokenizer: Any) -> None:
    """Give a model without weights its adapters, and freeze what does not train."""
    if recipe.lora.trains:
        put_adapters(model, recipe.lora, tokenizer)
    freeze(model, recipe.optim.freeze, trains_routers(recipe))


def mesh_of(recipe: Recipe, ranks: Ranks) -> Mesh:
    """How the ranks share the work, as the recipe says; RunError for what does not divide."""
    asked = recipe.parallel
    return Mesh.of(ranks, asked.shard, asked.experts, asked.offload, asked.tensor)


def computed_in(recipe: Recipe) -> torch.dtype | None:
    """The dtype in which sharded weights are gathered; None = their own."""
    return None if recipe.train.autocast is None else getattr(torch, recipe.train.autocast)


def move_own(objective: nn.Module, device: torch.device) -> None:
    """Move what an objective has beside its model, which is where it belongs, to a device."""
    for name, part in objective.named_children():
        if name != "model":
            part.to(device)
    for tensor in [*objective.parameters(recurse=False), *objective.buffers(recurse=False)]:
        tensor.data = tensor.data.to(device)


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """How many steps of a run of `steps` warm up, as the recipe says or by default."""
    return schedule.default_warmup(steps) if recipe.optim.warmup_steps is None else recipe.optim.warmup_steps


def trains_routers(recipe: Recipe) -> bool:
    """Whether the routers train: by default only from scratch, where they have learnt nothing yet.

    Adapters train alone, whatever this says.
    """
    if recipe.objective.router == "auto":
        return recipe.model.path is None
    return recipe.objective.router == "trained"


def corruption_of(recipe: Recipe, base: Base) -> Corruption:
    """What a corrupted token becomes, for this tokenizer; the recipe may hold one that was given from Python.

    Raises CheckpointError where the family supports neither it nor the rest of the objective.
    """
    corruption: Any = recipe.objective.corruption
    if isinstance(corruption, UniformTokens | MaskToken):
        reserved = (base.eos_id, base.pad_id, base.tokenizer.bos_token_id)
        corruption = corruption.for_tokenizer(base.tokenizer, base.vocab_size, reserved)
    noise = "mask" if isinstance(corruption, MaskCorruption) else "uniform"
    family = family_of(base.config)
    family.require(predictions=recipe.objective.prediction, corruptions=noise)
    for mesh in recipe.parallel.names:
        family.require(meshes=mesh)
    return corruption


def checked_data(recipe: Recipe, base: Base, ranks: Ranks | None = None) -> Data:
    """The data of a recipe, whose prompts are questions of its task; DataError for a row that is none."""
    data = read_data(recipe, base, ranks)
    if data.prompts:
        questions_of(data.prompts, evals.task(recipe.evaluation.task), data.encoder)
    return data
