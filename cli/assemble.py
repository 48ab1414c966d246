"""From a recipe to the things it names: tokenizer, config, examples, collator, model and objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockdiff import checkpoint
from blockdiff.checkpoint.create import fitted, preset_config
from blockdiff.checkpoint.files import CONFIG, GENERATION, config_from, find, read_json
from blockdiff.cli.loading import load_tokenizer
from blockdiff.data.chat import Encoder, Example
from blockdiff.data.collate import Collator
from blockdiff.data.plan import Plan
from blockdiff.data.rows import read_rows
from blockdiff.data.statistics import Statistics
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Cosine, Linear, Schedule, StratifiedTime, TimeDraw, UniformTime
from blockdiff.errors import RecipeError
from blockdiff.recipe import Recipe
from blockdiff.sampling.generation import Generation
from blockdiff.training.objective import Objective

if TYPE_CHECKING:
    from blockdiff.models.diffusion_gemma import DiffusionGemma

SCHEDULES: dict[str, Callable[[], Schedule]] = {"linear": Linear, "cosine": Cosine}
TIMES: dict[str, Callable[[float], TimeDraw]] = {"stratified": StratifiedTime, "uniform": UniformTime}


@dataclass(frozen=True)
class Data:
    """What a recipe trains on: examples with their statistics, and how they become batches."""

    train: list[Example]
    statistics: Statistics
    heldout: list[Example]
    heldout_statistics: Statistics | None
    collator: Collator
    plan: Plan


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
        directory = find(path, with_weights=False)
        config = config_from(read_json(directory / CONFIG), directory / CONFIG)
        tokenizer = load_tokenizer(named or directory)
        file = directory / GENERATION
        configured = read_json(file).get("eos_token_id") if file.is_file() else None
        if configured is None:
            configured = config.text_config.eos_token_id
    else:
        if named is None:
            raise RecipeError(
                f"model.tokenizer: missing; the preset {preset} has random weights and no tokenizer, name one"
            )
        tokenizer = load_tokenizer(named)
        config = fitted(preset_config(str(preset)), tokenizer)
        configured = tokenizer.eos_token_id
    if len(tokenizer) > config.text_config.vocab_size:
        raise RecipeError(
            f"model.tokenizer: {len(tokenizer)} tokens, but the model has {config.text_config.vocab_size}; "
            "use the tokenizer the weights were trained with"
        )
    eos_id = configured[0] if isinstance(configured, list | tuple) and configured else configured
    if not isinstance(eos_id, int):
        raise RecipeError(
            "model: neither generation_config.json nor the tokenizer names an eos token; set one"
        )
    pad_id = config.text_config.pad_token_id
    return Basis(tokenizer, config, eos_id, 0 if pad_id is None else int(pad_id))


def data(recipe: Recipe, base: Basis) -> Data:
    """Read and encode the rows of a recipe. Raises DataError with file and line for what cannot be used."""
    encoder = Encoder(base.tokenizer, base.eos_id, base.canvas_length, recipe.data.max_length)
    rows = read_rows(recipe.data.train)
    train, statistics = encoder.encode(rows)
    heldout: list[Example] = []
    heldout_statistics = None
    if recipe.data.heldout is not None:
        heldout, heldout_statistics = encoder.encode(read_rows(recipe.data.heldout))
    if any(row.messages for row in rows):  # the model learns this format: the tokenizer saved beside it writes it
        base.tokenizer.chat_template = encoder.template
    objective = recipe.objective
    collator = Collator(
        canvas_length=base.canvas_length,
        pad_id=base.pad_id,
        eos_id=base.eos_id,
        seed=recipe.seed,
        time=TIMES[objective.time](objective.eps),
        canvases=recipe.data.canvases,
        coin_probability=objective.coin,
        scores_ar=objective.ar_weight > 0,
    )
    plan = Plan(len(train), recipe.train.batch_size, recipe.seed)
    return Data(train, statistics, heldout, heldout_statistics, collator, plan)


def model(recipe: Recipe, base: Basis, device: torch.device | str) -> DiffusionGemma:
    """The model that a recipe starts from, on a device."""
    dtype, kernels = recipe.model.dtype, recipe.model.kernels
    if recipe.model.path is not None:
        return checkpoint.load(recipe.model.path, dtype=dtype, device=device, kernels=kernels)
    dtype = "float32" if dtype == "auto" else dtype
    return checkpoint.init(base.config, seed=recipe.seed, dtype=dtype, device=device, kernels=kernels)


def generation(recipe: Recipe, base: Basis) -> Generation:
    """What the trained model's generation_config.json will say: the recipe's settings over those it starts from."""
    if recipe.model.path is not None:
        start = Generation.from_pretrained(find(recipe.model.path))
    else:
        start = Generation.from_dict(checkpoint.default_generation(base.config))
        start = replace(start, eos_ids=(base.eos_id,))
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


def objective(recipe: Recipe, loaded: DiffusionGemma) -> Objective:
    """The objective that trains `loaded`; compiles the layers where the recipe says so."""
    if recipe.model.compile:
        for layer in loaded.layers:
            layer.compile()
    return Objective(
        loaded,
        SCHEDULES[recipe.objective.schedule](),
        UniformCorruption(loaded.vocab_size),
        seed=recipe.seed,
        train_router=trains_router(recipe),
    )


def what_trains(module: nn.Module) -> str:
    """One line: how many parameters train, and which kinds stand still."""
    total = sum(p.numel() for p in module.parameters())
    frozen: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            kind = "router" if ".router." in name else name.rpartition(".")[0] or name
            frozen[kind] = frozen.get(kind, 0) + parameter.numel()
    trained = total - sum(frozen.values())
    still = "".join(f"; frozen: {kind} ({count:,})" for kind, count in frozen.items())
    return f"trains {trained:,} of {total:,} parameters{still}"


def facts(recipe: Recipe, data: Data) -> dict[str, Any]:
    """What must be the same for a run to be resumed as the same run (paths may move, logging may change)."""
    free = {"output", "steps", "log_every", "eval_every", "save_every", "keep", "micro_batch_size"}
    free |= {"path", "tokenizer", "train", "heldout", "kernels", "compile"}
    known: dict[str, Any] = {"examples": len(data.train), "seed": recipe.seed}
    for section, keys in json.loads(recipe.model_dump_json()).items():
        if isinstance(keys, dict):
            known |= {f"{section}.{key}": value for key, value in keys.items() if key not in free}
    return known
