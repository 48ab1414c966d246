"""The model that a run starts from, before weights are read: config, tokenizer, and the objective without memory."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from blockdiff import checkpoint
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.opening import model_files
from blockdiff.checkpoint.tokenizer import load_tokenizer, mismatch, rows_needed
from blockdiff.data.template import give_template, turn_ends
from blockdiff.data.tokenise import takes_images
from blockdiff.diffusion.corruption import Corruption, MaskCorruption
from blockdiff.draft_objective import BlockMask, DraftObjective
from blockdiff.errors import BlockdiffError, CheckpointError, RecipeError
from blockdiff.kernels import Kernels
from blockdiff.models.adapters import adapt, targets
from blockdiff.models.family import family_of
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import quantised_layers, store
from blockdiff.objective import Objective
from blockdiff.rl.policy import PolicyObjective, policy_of, rollout_strategy
from blockdiff.sampling import Generation
from blockdiff.training.checkpoint_content import require_own_names
from blockdiff.training.freeze import freeze
from blockdiff.training.recipe import LoraSection, ObjectiveSection, Recipe
from blockdiff.training.recipe_checks import refuse_of_causal, refuse_of_drafter
from blockdiff.training.recipe_choices import MaskToken, UniformTokens


@dataclass(frozen=True)
class StartingModel:
    """The model that a run starts from, as far as it is known without weights."""

    config: Any
    tokenizer: Any
    generation: Generation  # what generation_config.json of the trained model will say
    eos_id: int
    pad_id: int
    target_config: Any = None  # of the model that a drafter drafts for

    @property
    def canvas_length(self) -> int:
        """The length L of the model's canvases."""
        return family_of(self.config).outline(self.config).canvas_length

    @property
    def denoises(self) -> bool:
        """True where the model denoises canvases, False where it is causal alone."""
        return family_of(self.config).outline(self.config).denoises

    @property
    def mask_id(self) -> int | None:
        """The mask token of a drafter's blocks; None of a model that is no drafter."""
        return family_of(self.config).outline(self.config).mask

    @property
    def vocab_size(self) -> int:
        """The size V of the model's vocabulary."""
        return family_of(self.config).outline(self.config).vocab_size


def with_objective_of_base(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with the objective that `model.path` was trained with, in the keys that the recipe leaves out.

    The text says what was taken that is no default, and what the recipe has otherwise; empty: nothing. The order of
    passes (`sweep`), the parts that train (`router`, `images`), `distil` and `draft_for` are not taken, and nothing is
    of a model that is not there.
    """
    if recipe.model.path is None:
        return recipe, ""
    try:
        directory = find(recipe.model.path, with_weights=False)
    except CheckpointError:  # `read_starting_model` says what is wrong with it
        return recipe, ""
    base = DiffusionSettings.from_pretrained(directory).objective
    own = recipe.objective.model_dump(mode="json", exclude={"sweep", "router", "images", "distil", "draft_for"})
    taken: dict[str, Any] = {}
    for key in base.keys() & own.keys() - recipe.objective.model_fields_set:
        with suppress(ValidationError):  # of a part that was given from Python
            taken[key] = getattr(ObjectiveSection.model_validate({key: base[key]}), key)
    unlike = [key for key in own if key in base and own[key] != base[key]]
    as_base = [f"{key} {base[key]} (default {own[key]})" for key in unlike if key in taken]
    otherwise = [f"{key} {own[key]} (there {base[key]})" for key in unlike if key not in taken]
    said = [f"as model.path was trained: {', '.join(as_base)}"] * bool(as_base)
    said += [f"not as model.path was trained: {', '.join(otherwise)}"] * bool(otherwise)
    recipe = recipe.model_copy(update={"objective": recipe.objective.model_copy(update=taken)})
    return recipe, "; ".join(said)


def read_starting_model(recipe: Recipe) -> StartingModel:
    """Read the config, tokenizer and settings of the model that a recipe starts from, and no weights."""
    m, generation = recipe.model, None
    if recipe.objective.draft_for is not None:
        return _read_drafter(recipe)
    if m.path is not None:
        config = checkpoint.read_config(m.path)
        if family_of(config).outline(config).is_drafter:
            raise RecipeError(f"model.path: {m.path} is a drafter; say for which model, objective.draft_for")
        tokenizer = load_tokenizer(m.tokenizer or find(m.path, with_weights=False))
        generation = Generation.from_pretrained(m.path)
    elif m.tokenizer is not None:
        tokenizer = load_tokenizer(m.tokenizer)
        config = checkpoint.fitted(checkpoint.preset_config(str(m.preset)), tokenizer)
    else:
        raise RecipeError(
            f"model.tokenizer: missing; the preset {m.preset} has random weights and no tokenizer, name one"
        )
    base = _with_tokens(recipe, config, generation, tokenizer)
    if not base.denoises:
        refuse_of_causal(recipe)
    return base


def _read_drafter(recipe: Recipe) -> StartingModel:
    """The same for a drafter, whose tokens and settings are those of its target."""
    m = recipe.model
    config = checkpoint.preset_config(str(m.preset)) if m.path is None else checkpoint.read_config(m.path)
    if family_of(config).outline(config).mask is None:
        raise RecipeError(
            f"objective.draft_for: {m.path or m.preset} is no drafter; `blockdiff init --drafter-for` makes one"
        )
    refuse_of_drafter(recipe)
    files = model_files(str(recipe.objective.draft_for), with_weights=False)
    tokenizer = files.tokenizer() if m.tokenizer is None else load_tokenizer(m.tokenizer)
    target = checkpoint.read_config(files.weights)
    return _with_tokens(recipe, config, files.generation(), tokenizer, target)


def _with_tokens(
    recipe: Recipe, config: Any, generation: Generation | None, tokenizer: Any, target: Any = None
) -> StartingModel:
    """The starting model with the special tokens and the settings that its tokenizer and generation bring."""
    give_template(tokenizer, recipe.data.template)
    special = checkpoint.special_tokens(target or config, generation, tokenizer)
    if not special.eos_ids:
        raise RecipeError("model: neither generation_config.json nor the tokenizer names an eos token; set one")
    ends = tuple(dict.fromkeys((*special.eos_ids, *turn_ends(tokenizer))))
    settings = {key: value for key, value in recipe.generation.model_dump().items() if value is not None}
    try:
        generation = replace(generation or checkpoint.default_generation(config), eos_ids=ends, **settings)
    except ValueError as error:
        raise RecipeError(f"generation: {error}") from None
    base = StartingModel(config, tokenizer, generation, special.eos_ids[0], special.pad_id, target)
    if (count := rows_needed(tokenizer)) > base.vocab_size:
        raise RecipeError(
            f"model.tokenizer: {count} tokens, but the model has {base.vocab_size}; "
            "use the tokenizer the weights were trained with"
        )
    if (doubt := mismatch(tokenizer, base.vocab_size)) is not None:
        warnings.warn(f"model.tokenizer: {doubt}", stacklevel=2)
    return base


def planned_model(recipe: Recipe) -> StartingModel:
    """`read_starting_model` for a plan: where a released model is not to be had, its shape from a preset.

    One warning says so. There is no tokenizer then; where the recipe needs one, CheckpointError is raised as it was.
    """
    try:
        return read_starting_model(recipe)
    except CheckpointError:
        named = [name for name in (recipe.model.path, recipe.objective.draft_for) if name is not None]
        presets = {name: checkpoint.released_preset(name) for name in named}
        is_spelt = any(isinstance(token, str) for token in recipe.lora.tokens)
        if None in presets.values() or is_spelt or not isinstance(recipe.objective.corruption, UniformTokens):
            raise
    for name, preset in presets.items():
        warnings.warn(f"{name} is not to be had here; it is planned by its shape, the preset {preset}", stacklevel=2)
    shapes = {name: checkpoint.preset_config(str(preset)) for name, preset in presets.items()}
    config = shapes.get(str(recipe.model.path)) or checkpoint.preset_config(str(recipe.model.preset))
    target = shapes.get(str(recipe.objective.draft_for))
    generation = checkpoint.default_generation(target or config)
    eos_id = next(iter(generation.eos_ids), 0)  # a causal preset names none
    base = StartingModel(config, None, generation, eos_id, generation.pad_id or 0, target)
    if not base.denoises:
        refuse_of_causal(recipe)
    return base


def without_weights(
    recipe: Recipe, base: StartingModel, kernels: str | Kernels | None = None, dtype: torch.dtype | None = None
) -> Any:
    """The objective over a model that has its adapters and is frozen as the recipe says; no weight has memory yet.

    kernels: replace the recipe's; dtype: of the weights (None: they get it when they are filled).
    """
    model = checkpoint.empty(base.config, kernels=kernels or recipe.model.kernels)
    if base.target_config is not None:
        return _draft_objective(model, recipe, base, dtype)
    corruption = make_corruption(recipe, base)
    if recipe.objective.images != "none":
        model.image_side = checkpoint.empty_image_side(base.config)
        if not takes_images(family_of(base.config).image_tokens(base.config), base.tokenizer):
            raise RecipeError(
                "objective.images: the model takes no images, because its vocabulary has no token for them; leave it "
                "out, or give a model or preset whose image tokens the tokenizer has"
            )
    store(model, quantised_layers(model, recipe.model.quantize))
    if dtype is not None:
        model.to(dtype)
    kind: Any = recipe.given.objective or Objective
    if recipe.rl is not None:
        rl = recipe.rl
        strategy = rollout_strategy(rl.policy, rl.strategy, base.generation, base.denoises)
        policy = policy_of(strategy, base.generation.max_steps, rl.clip, rl.kl, through=rl.signal == "through")
        kind = partial(PolicyObjective, policy=policy)
    objective = kind(
        model,
        recipe.objective.schedule,
        corruption,
        seed=recipe.seed,
        weight=recipe.objective.weight,
        prediction=recipe.objective.prediction,
        positions=recipe.objective.positions,
        stop_gradient=recipe.objective.stop_gradient,
        sweep=recipe.sweeps,
    )
    require_own_names(objective)
    choose_trained(model, recipe, base.tokenizer)
    return objective


def _draft_objective(model: BlockDiffusionModel, recipe: Recipe, base: StartingModel, dtype: torch.dtype | None) -> Any:
    """The objective of a drafter, without weights, as `without_weights` makes it; its target has none either."""
    target = checkpoint.empty(base.target_config, kernels=model.kernels)
    store(target, quantised_layers(target, recipe.model.quantize))
    if dtype is not None:
        model.to(dtype)
        target.to(computed_in(recipe) or dtype)
    try:
        objective = DraftObjective(model, target, recipe.objective.loss, recipe.objective.targets)
    except BlockdiffError as error:
        raise RecipeError(f"objective.draft_for: {error}") from None
    choose_trained(model, recipe, base.tokenizer)
    return objective


def choose_trained(model: BlockDiffusionModel, recipe: Recipe, tokenizer: Any) -> None:
    """Give a model without weights its adapters, and freeze what does not train."""
    if model.image_side is not None:
        model.image_side.requires_grad_(recipe.objective.images == "trained")
    if recipe.lora.trains:
        put_adapters(model, recipe.lora, tokenizer)
    freeze(model, recipe.optim.freeze, trains_routers(recipe))


def put_adapters(model: BlockDiffusionModel, lora: LoraSection, tokenizer: Any) -> None:
    """Give a model without weights the adapters that a recipe asks for; RecipeError names what it lacks."""
    tokens = []
    for token in lora.tokens:
        token_id = token if isinstance(token, int) else tokenizer.get_vocab().get(token)
        if token_id is None:
            raise RecipeError(f"lora.tokens: {token!r} is no token of the tokenizer; name one as it is spelt, or by id")
        tokens.append(int(token_id))
    if len(set(tokens)) < len(tokens):
        raise RecipeError("lora.tokens: names a token twice")
    try:
        adapt(model, targets(model, lora.low_rank()), tokens)
    except CheckpointError as error:
        raise RecipeError(f"lora: {error}") from None


def make_corruption(recipe: Recipe, base: StartingModel) -> Corruption:
    """The corruption of canvases with this tokenizer's tokens, or the one that the recipe was given from Python.

    Raises CheckpointError where the family supports neither it nor the rest of the objective.
    """
    if base.mask_id is not None:
        return BlockMask(base.mask_id)
    corruption: Any = recipe.objective.corruption
    if isinstance(corruption, UniformTokens | MaskToken):
        reserved = (base.eos_id, base.pad_id, getattr(base.tokenizer, "bos_token_id", None))
        corruption = corruption.for_tokenizer(base.tokenizer, base.vocab_size, reserved)
    noise = "mask" if isinstance(corruption, MaskCorruption) else "uniform"
    family = family_of(base.config)
    family.require(predictions=recipe.objective.prediction, corruptions=noise)
    for mesh in recipe.parallel.names:
        family.require(meshes=mesh)
    return corruption


def trains_routers(recipe: Recipe) -> bool:
    """True where the routers train: by default only from scratch, where they have learnt nothing yet.

    Adapters train alone, whatever this says.
    """
    if recipe.objective.router == "auto":
        return recipe.model.path is None
    return recipe.objective.router == "trained"


def computed_in(recipe: Recipe) -> torch.dtype | None:
    """The dtype in which sharded weights are gathered; None for the one in which they are kept."""
    return None if recipe.train.autocast is None else getattr(torch, recipe.train.autocast)
