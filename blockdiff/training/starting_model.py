"""The model that a run starts from, before its weights are read: config, tokenizer, and a model without memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from blockdiff import checkpoint
from blockdiff.checkpoint.adapter_names import adapts_images
from blockdiff.checkpoint.adapters import Adapter
from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.opening import model_files
from blockdiff.checkpoint.stored import chosen_layers, form_below, stored_as
from blockdiff.checkpoint.tokenizer import load_tokenizer, mismatch, rows_needed
from blockdiff.data.template import give_template, turn_ends
from blockdiff.data.tokenise import takes_images
from blockdiff.errors import CheckpointError, RecipeError
from blockdiff.kernels import Kernels
from blockdiff.layers.lora import LowRank
from blockdiff.layers.weights import FORMS, Form
from blockdiff.models.adapters import adapt, targets
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import quantised_layers, store
from blockdiff.sampling import Generation
from blockdiff.training.freeze import freeze
from blockdiff.training.kinds import kinds
from blockdiff.training.recipe import Recipe, keys, kinds_with
from blockdiff.training.recipe_errors import one_line


@dataclass(frozen=True)
class StartingModel:
    """The model that a run starts from, without weights."""

    config: Family
    tokenizer: Any
    generation: Generation  # the generation_config.json of the trained model
    eos_id: int
    pad_id: int
    target_config: Family | None = None  # the config of a drafter's target

    @property
    def canvas_length(self) -> int:
        """The canvas length L of the model."""
        return self.config.canvas_length

    @property
    def aligned(self) -> bool:
        """Whether canvases begin at multiples of their length, like the blocks of the prefix."""
        return self.config.block is not None

    @property
    def denoises(self) -> bool:
        """Whether the model denoises canvases; otherwise it is causal only."""
        return self.config.denoises

    @property
    def mask_id(self) -> int | None:
        """The id of the config's mask token, for a drafter's blocks or a denoiser's canvases; None if it has none."""
        return self.config.mask

    @property
    def vocab_size(self) -> int:
        """The vocabulary size V of the model."""
        return self.config.vocab_size


def decided(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with the kind of run and keys of `objective` that follow from its model, and a line about them.

    A recipe without `objective.kind` has the kind of the model's config. A recipe without a key of `inherited` has the
    value with which `model.path` was trained, or, if that is unknown, the value of its family, like a preset. The line
    names such values that are no defaults, and values of the recipe that differ from the model's; it may be empty. A
    model that cannot be read decides nothing. Raises RecipeError for a key that the kind does not have.
    """
    recipe = _with_kind(recipe)
    base, objective = dict(_trained_with(recipe)), recipe.objective
    values = objective.model_dump(mode="json", include=set(objective.inherited))
    was_set = {key: getattr(objective, key) for key in objective.model_fields_set}
    inherited = dict[str, Any]()
    for key in base.keys() & values.keys():
        with suppress(ValidationError):  # of a part that Python passed
            section = type(objective).model_validate({**was_set, key: base[key]})
            base |= section.model_dump(mode="json", include={key})
            if key not in objective.model_fields_set:
                inherited[key] = getattr(section, key)
    unlike = [key for key in values if key in base and values[key] != base[key]]
    as_base = [f"{key} {base[key]} (default {values[key]})" for key in unlike if key in inherited]
    otherwise = [f"{key} {values[key]} (there {base[key]})" for key in unlike if key not in inherited]
    name = "model.path" if recipe.model.path is not None else recipe.model.preset
    lines = [f"as {name} was trained: {', '.join(as_base)}"] * bool(as_base)
    lines += [f"not as {name} was trained: {', '.join(otherwise)}"] * bool(otherwise)
    return recipe.model_copy(update={"objective": objective.model_copy(update=inherited)}), "; ".join(lines)


def _trained_with(recipe: Recipe) -> Mapping[str, Any]:
    """The keys of `objective` with which the model, or else its family, was trained; empty if they are unknown."""
    try:
        config = starting_config(recipe)
    except CheckpointError:  # `read_starting_model` reports it
        shape = shape_of(recipe)
        return {} if shape is None else shape.trained_with
    if recipe.model.path is None:
        return dict(config.trained_with)
    return DiffusionSettings.from_pretrained(find(recipe.model.path, with_weights=False), config).objective


def strategy_of(recipe: Recipe) -> str | None:
    """The sampling strategy that `model.path` names and the trained model keeps; None if it names none."""
    path = recipe.model.path
    return None if path is None else DiffusionSettings.from_pretrained(find(path, with_weights=False)).strategy


def shape_of(recipe: Recipe) -> Family | None:
    """The config of the preset of the released model at `model.path`; None if it has no preset."""
    preset = None if recipe.model.path is None else checkpoint.released_preset(recipe.model.path)
    return None if preset is None else checkpoint.preset_config(preset)


def _with_kind(recipe: Recipe) -> Recipe:
    """The recipe with `objective.kind`, which is the model's default if the recipe has none."""
    objective, m = recipe.objective, recipe.model
    if "kind" in objective.model_fields_set or type(objective) not in kinds().values():
        return recipe
    try:
        config = starting_config(recipe)
    except CheckpointError:
        return recipe
    name = next((name for name, kind in kinds().items() if kind.suits(config)), objective.kind)
    was_set = {key: getattr(objective, key) for key in objective.model_fields_set}
    try:
        section = kinds()[name].model_validate({"kind": name, **was_set})
    except ValidationError as error:
        what = f"{m.path or m.preset}, for which objective.kind is {name}"
        raise RecipeError(one_line(error, keys(), kinds_with(), {}, what, ("objective",))) from None
    return recipe.model_copy(update={"objective": section})


def starting_config(recipe: Recipe) -> Any:
    """The config of the model that a recipe starts from."""
    m = recipe.model
    return checkpoint.preset_config(str(m.preset)) if m.path is None else checkpoint.read_config(m.path)


def read_starting_model(recipe: Recipe, config: Family, settings_from: str | None = None) -> StartingModel:
    """Read the tokenizer and the settings of a model, but no weights.

    config: the model's. settings_from: the model to read tokenizer and settings from (None: the recipe's model).
    """
    m, generation = recipe.model, None
    if settings_from is not None:
        files = model_files(settings_from, with_weights=False)
        tokenizer = files.tokenizer() if m.tokenizer is None else load_tokenizer(m.tokenizer)
        return _with_tokens(recipe, config, files.generation(), tokenizer, checkpoint.read_config(files.weights))
    if m.path is not None:
        tokenizer = load_tokenizer(m.tokenizer or find(m.path, with_weights=False))
        generation = Generation.from_pretrained(m.path, config)
    elif m.tokenizer is not None:
        tokenizer = load_tokenizer(m.tokenizer)
        config = checkpoint.fitted(config, tokenizer)
    else:
        raise RecipeError(f"model.tokenizer: missing; the preset {m.preset} has no tokenizer, so set model.tokenizer")
    return _with_tokens(recipe, config, generation, tokenizer)


def _with_tokens(
    recipe: Recipe, config: Family, generation: Generation | None, tokenizer: Any, target: Family | None = None
) -> StartingModel:
    """The starting model, with special tokens and settings from its tokenizer, generation and config."""
    give_template(tokenizer, recipe.data.template)
    special = checkpoint.special_tokens(target or config, generation, tokenizer)
    if not special.eos_ids:
        raise RecipeError("model: neither generation_config.json nor the tokenizer has an eos token; add one there")
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
            "use the tokenizer that the weights were trained with"
        )
    if (doubt := mismatch(tokenizer, base.vocab_size)) is not None:
        warnings.warn(f"model.tokenizer: {doubt}", stacklevel=2)
    return base


def released_shape(recipe: Recipe, settings_from: str | None = None) -> StartingModel | None:
    """The starting model of a plan, from the presets of released models that are not available here.

    It has no tokenizer. A warning names the presets. Returns None if a model has no preset.
    """
    named = [name for name in (recipe.model.path, settings_from) if name is not None]
    presets = {name: checkpoint.released_preset(name) for name in named}
    if None in presets.values():
        return None
    for name, preset in presets.items():
        warnings.warn(f"{name} is not available here; the plan uses the preset {preset} of its shape", stacklevel=2)
    shapes = {name: checkpoint.preset_config(str(preset)) for name, preset in presets.items()}
    config = shapes.get(str(recipe.model.path)) or checkpoint.preset_config(str(recipe.model.preset))
    target = shapes.get(str(settings_from))
    generation = checkpoint.default_generation(target or config)
    eos_id = next(iter(generation.eos_ids), 0)  # a causal preset names none
    return StartingModel(config, None, generation, eos_id, generation.pad_id or 0, target)


def empty_model(
    recipe: Recipe, base: StartingModel, kernels: str | Kernels | None = None, dtype: torch.dtype | None = None
) -> BlockDiffusionModel:
    """The model that trains, without memory.

    It has an image side if the recipe has images, and weights in fewer bits below adapters if the recipe or the
    checkpoint has. kernels: replace the recipe's. dtype: of the weights (None: decided when they are filled).
    """
    for mesh in recipe.parallel.names:
        base.config.require(meshes=mesh)
    model = checkpoint.empty(base.config, kernels=kernels or recipe.model.kernels)
    if recipe.model.images != "none":
        model.image_side = checkpoint.empty_image_side(base.config)
        if not takes_images(base.config.image_tokens(), base.tokenizer):
            raise RecipeError(
                "model.images: the model takes no images, because it or its tokenizer has no image tokens; leave "
                "model.images out, or choose a model or preset that has them"
            )
    if not getattr(recipe.objective, "trains_whole", False):
        forms = stored_below(model, recipe.model.path, recipe)
        if forms and not recipe.lora.trains:
            words = [word for word, form in FORMS.items() if form in forms.values()]
            raise RecipeError(
                f"model.path: {recipe.model.path} stores weights in {' and '.join(words)}, which cannot train; train "
                "adapters over them (lora: {rank: 16}), or convert them to ordinary weights (model.quantize: none)"
            )
        store(model, forms)
    return model if dtype is None else model.to(dtype)


def stored_below(model: BlockDiffusionModel, path_or_hub_id: str | None, recipe: Recipe) -> dict[str, Form]:
    """Return the form of each layer of a frozen model stored in fewer bits, by the recipe or else the checkpoint.

    Presets, and models that are not available here, have no checkpoint. Raises RecipeError if FSDP would have to split
    such layers, or the model cannot be stored in the recipe's form.
    """
    directory = None
    if path_or_hub_id is not None:
        with suppress(CheckpointError):  # a plan by the preset of its shape
            directory = model_files(path_or_hub_id, with_weights=False).weights
    try:
        if directory is None:
            forms = quantised_layers(model, recipe.model.quantize)
        else:
            forms = chosen_layers(model, directory, recipe.model.quantize)
    except CheckpointError as error:
        raise RecipeError(f"model.quantize: {error}") from None
    if forms:
        refuse_sharding(recipe)
    return forms


def refuse_sharding(recipe: Recipe) -> None:
    """Raise RecipeError if FSDP would have to split weights in fewer bits."""
    if recipe.parallel.shard == "full":
        raise RecipeError(
            "model.quantize: parallel.shard: full splits parameters, but weights in fewer bits are buffers; use "
            "parallel.tensor or parallel.experts instead"
        )


def choose_trained(model: BlockDiffusionModel, recipe: Recipe, tokenizer: Any) -> None:
    """Add the recipe's adapters to a model without weights, and freeze the parameters that do not train."""
    if model.image_side is not None:
        model.image_side.requires_grad_(recipe.model.images == "trained")
    if recipe.lora.trains:
        put_adapters(model, recipe, tokenizer)
    freeze(model, recipe.optim.freeze, trains_routers(recipe))


def adapter_to_train(recipe: Recipe, model: BlockDiffusionModel) -> Adapter | None:
    """Read the adapter of `lora.path`, before the model is split; None if the recipe has new adapters.

    Raises RecipeError for an adapter that does not fit the model.
    """
    if recipe.lora.path is None:
        return None
    try:
        directory = find(recipe.lora.path)
        if adapts_images(directory, model) and model.image_side is None:
            raise CheckpointError(f"{directory}: adapts the image side; set model.images: frozen, which loads it")
        form = form_below(directory)
        if form is not None and form != (stored_as(model) or "none"):
            raise CheckpointError(f"{directory}: was trained over weights in the form {form!r}; set model.quantize")
        return checkpoint.read_adapter(directory, model)
    except CheckpointError as error:
        raise RecipeError(f"lora.path: {error}") from None


def put_adapters(model: BlockDiffusionModel, recipe: Recipe, tokenizer: Any) -> None:
    """Add the recipe's adapters to a model without weights. Raises RecipeError for parts or tokens that it lacks."""
    lora = recipe.lora
    if (adapter := adapter_to_train(recipe, model)) is not None:
        modules = {name: replace(low_rank, dropout=lora.dropout) for name, low_rank in adapter.modules.items()}
        _adapt(model, modules, adapter.tokens)
        return
    tokens = []
    for token in lora.tokens:
        token_id = token if isinstance(token, int) else tokenizer.get_vocab().get(token)
        if token_id is None:
            raise RecipeError(f"lora.tokens: the tokenizer has no token {token!r}; write it as it is spelt, or its id")
        tokens.append(int(token_id))
    if len(set(tokens)) < len(tokens):
        raise RecipeError("lora.tokens: names a token twice")
    try:
        modules = targets(model, lora.low_rank())
    except CheckpointError as error:
        raise RecipeError(f"lora: {error}") from None
    _adapt(model, modules, tokens)


def _adapt(model: BlockDiffusionModel, modules: Mapping[str, LowRank], tokens: Sequence[int]) -> None:
    try:
        adapt(model, modules, tokens)
    except CheckpointError as error:
        raise RecipeError(f"lora: {error}") from None


def trains_routers(recipe: Recipe) -> bool:
    """Return True if routers train: by default only from scratch. Adapters, if any, train alone nevertheless."""
    if recipe.model.router == "auto":
        return recipe.model.path is None
    return recipe.model.router == "trained"


def computed_in(recipe: Recipe) -> torch.dtype | None:
    """The dtype in which sharded weights are gathered; None for the one in which they are stored."""
    return None if recipe.train.autocast is None else getattr(torch, recipe.train.autocast)
