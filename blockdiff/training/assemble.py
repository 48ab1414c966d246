"""From a recipe to the things it names: tokenizer, config, model, objective and optimiser; data is `assemble_data`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockdiff import checkpoint
from blockdiff.checkpoint.files import find
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.diffusion.corruption import Corruption
from blockdiff.errors import RecipeError
from blockdiff.objective import Objective
from blockdiff.training import optimiser as optim
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.freeze import freeze
from blockdiff.training.recipe import Recipe
from blockdiff.training.sections import MaskToken, UniformTokens

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel


@dataclass(frozen=True)
class Basis:
    """What is known without the weights: the tokenizer, the model's config, and the end and pad tokens."""

    tokenizer: Any
    config: Any
    eos_id: int
    pad_id: int

    @property
    def canvas_length(self) -> int:
        """L of the model."""
        return int(self.config.canvas_length or 256)


def basis(recipe: Recipe) -> Basis:
    """Tokenizer and config of the model a recipe starts from; reads no weights."""
    path, preset, named = recipe.model.path, recipe.model.preset, recipe.model.tokenizer
    if path is not None:
        config = checkpoint.read_config(path)
        tokenizer = load_tokenizer(named or find(path, with_weights=False))
        settings = checkpoint.Generation.from_pretrained(path)
    else:
        if named is None:
            raise RecipeError(
                f"model.tokenizer: missing; the preset {preset} has random weights and no tokenizer, name one"
            )
        tokenizer = load_tokenizer(named)
        config = checkpoint.fitted(checkpoint.preset_config(str(preset)), tokenizer)
        settings = None
    if len(tokenizer) > config.text_config.vocab_size:
        raise RecipeError(
            f"model.tokenizer: {len(tokenizer)} tokens, but the model has {config.text_config.vocab_size}; "
            "use the tokenizer the weights were trained with"
        )
    special = checkpoint.special_tokens(config, settings, tokenizer)
    if not special.eos_ids:
        raise RecipeError(
            "model: neither generation_config.json nor the tokenizer names an eos token; set one"
        )
    return Basis(tokenizer, config, special.eos_ids[0], special.pad_id)


def model(recipe: Recipe, base: Basis, device: torch.device | str) -> BlockDiffusionModel:
    """The model that a recipe starts from, on a device."""
    dtype, kernels = recipe.model.dtype, recipe.model.kernels
    if recipe.model.path is not None:
        return checkpoint.load(recipe.model.path, dtype=dtype, device=device, kernels=kernels)
    dtype = "float32" if dtype == "auto" else dtype
    return checkpoint.init(base.config, seed=recipe.seed, dtype=dtype, device=device, kernels=kernels)


def generation(recipe: Recipe, base: Basis) -> Generation:
    """What the trained model's generation_config.json will say: the recipe's settings over those it starts from."""
    if recipe.model.path is not None:
        start = Generation.from_pretrained(recipe.model.path)
    else:
        start = checkpoint.default_generation(base.config)
    given = {key: value for key, value in recipe.generation.model_dump().items() if value is not None}
    try:
        return replace(start, **given)
    except ValueError as error:
        raise RecipeError(f"generation: {error}") from None


def trains_router(recipe: Recipe) -> bool:
    """Whether the routers train: by default only from scratch, where they have learnt nothing yet."""
    if recipe.objective.router == "auto":
        return recipe.model.path is None
    return recipe.objective.router == "trained"


def corruption(recipe: Recipe, base: Basis) -> Corruption:
    """What a corrupted token becomes. Raises RecipeError where a mask token is asked for and there is none."""
    chosen = recipe.objective.corruption
    if isinstance(chosen, UniformTokens | MaskToken):
        taken = (base.eos_id, base.pad_id, base.tokenizer.bos_token_id)
        return chosen.of(base.tokenizer, base.config.text_config.vocab_size, taken)
    return chosen


def objective(recipe: Recipe, base: Basis, loaded: BlockDiffusionModel) -> Objective:
    """The objective that trains `loaded`: what is frozen does not train, layers are compiled or recomputed as said.

    Raises RecipeError for choices that do not go together and for `optim.freeze` patterns that match nothing.
    """
    o = recipe.objective
    made = Objective(
        loaded,
        o.schedule,
        corruption(recipe, base),
        seed=recipe.seed,
        weight=o.weight,
        prediction=o.prediction,
        positions=o.positions,
        stop_gradient=o.stop_gradient,
    )
    if not trains_router(recipe):
        for parameter in loaded.router_parameters():
            parameter.requires_grad_(False)
    freeze(loaded, recipe.optim.freeze)
    if recipe.train.activation_checkpointing:
        checkpoint_activations(loaded)
    if recipe.model.compile:
        for layer in loaded.layers:
            layer.compile()
    return made


def optimiser(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """The optimiser over what trains in `module`."""
    o = recipe.optim
    return optim.build(
        module,
        name=o.name,
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        layer_decay=o.layer_decay,
    )
