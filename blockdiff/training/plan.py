"""`plan`: how much memory a training or a sampling needs, without loading anything, and what to change to make it fit.

The training step of the recipe is run on tensors without memory (`live_bytes`), so what is counted is what the code
holds at its peak: with Triton's kernels for a GPU, with the native ones for a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdiff import checkpoint
from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint.files import DTYPES
from blockdiff.data.collate import AllCanvases
from blockdiff.errors import RecipeError
from blockdiff.kernels import OPS, Kernels, triton_op
from blockdiff.memory import size
from blockdiff.models.adapters import is_adapter
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.build import Base, read_base, without_weights
from blockdiff.training.live_bytes import planned_for
from blockdiff.training.recipe import Recipe, read_recipe

# What may be changed, in this order, to make a training fit: the key, its value, and when that changes anything.
CHANGES = (
    ("train.activation_checkpointing", "true", lambda r: not r.train.activation_checkpointing),
    ("train.micro_batch_size", "1", lambda r: r.train.micro_batch_size != 1),
    ("model.dtype", "bfloat16", lambda r: r.model.dtype == "float32" and r.model.path is not None),
    ("optim.name", "adamw_8bit", lambda r: r.optim.name == "adamw"),
    ("lora", "{rank: 16}", lambda r: not r.lora.trains and r.model.path is not None),
    ("data.canvases", "1", lambda r: isinstance(r.data.canvases, AllCanvases)),
    ("data.max_length", "half of it", lambda r: r.data.pack is not None or r.data.max_length is not None),
)


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank holds at the peak of an optimiser step, in bytes by what they hold.

    tokens, canvases: of a row; rows: of a micro-batch; flops: of the matrix products of an optimiser step of one rank;
    numbers, trained: parameters and buffers, and those that train.
    """

    parts: dict[str, int]
    tokens: int
    canvases: int
    rows: int
    flops: float
    numbers: int
    trained: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def plan_training(
    recipe: Recipe, *, ranks: int = 1, device: str = "cuda", tokens: int | None = None, base: Base | None = None
) -> TrainingPlan:
    """The memory and the work of an optimiser step of one of `ranks` processes on a "cuda" or "cpu" device.

    tokens: of the longest row, where the recipe names neither data.pack nor data.max_length. Every row is taken to be
    that long, all of it response but a prompt of one canvas, and every canvas to get the signal: the most there can be.
    Raises RecipeError where the length of a row is not known.
    """
    base = read_base(recipe) if base is None else base
    length = tokens or recipe.data.pack or getattr(recipe.data.max_length, "tokens", None)
    if length is None:
        raise RecipeError("data.max_length: missing, and so the longest row is not known; set it, or say --tokens")
    dtype = _dtype(recipe, base)
    objective = without_weights(recipe, base, _kernels(device), dtype)
    model = objective.model.train()
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    share = -(-recipe.train.batch_size // ranks)
    rows = min(share, recipe.train.micro_batch_size or share)
    batch = _batch(recipe, model, length, rows)
    weights = [*objective.parameters(), *objective.buffers()]
    trained = [parameter for parameter in weights if parameter.requires_grad]
    with planned_for(device, weights) as counted:
        for _ in range(min(2, -(-share // rows))):  # a second micro-batch adds to the gradients of the first
            losses = objective(batch)
            (losses.canvas_sum + losses.ar_sum).backward()
    gradients = sum(parameter.nbytes for parameter in trained)
    moments = sum(x.numel() * (2 if recipe.optim.name == "adamw_8bit" else 2 * x.element_size()) for x in trained)
    adapters = sum(x.nbytes for name, x in model.named_parameters() if is_adapter(name))
    parts = {"weights": sum(x.nbytes for x in weights) - adapters}
    parts |= {"adapters": adapters} if adapters else {}
    parts |= {"gradients": gradients, "optimiser": moments}
    parts |= {"average": 4 * sum(x.numel() for x in trained)} if recipe.optim.ema is not None else {}
    parts |= {"activations": max(0, counted.peak - gradients)}
    flops = _flops(recipe, base, dtype, batch) * share / rows
    return TrainingPlan(
        parts, length, int(batch.start_BC.shape[1]), rows, flops, sum(x.numel() for x in weights),
        sum(x.numel() for x in trained),
    )  # fmt: skip


def what_fits(
    recipe: Recipe, limit: int, base: Base, *, ranks: int, device: str, tokens: int | None
) -> tuple[list[str], TrainingPlan] | None:
    """The fewest changes of the recipe, in the order of CHANGES, that make the training fit; None where none do."""
    changes: list[str] = []
    for key, value, applies in CHANGES:
        if not applies(recipe):
            continue
        if key == "data.max_length":
            key = key if recipe.data.pack is None else "data.pack"  # rows are as long as what is packed
            tokens = (tokens or recipe.data.pack or recipe.data.max_length.tokens) // 2  # type: ignore[union-attr]
            value = str(tokens)
        changes.append(f"{key}={value}")
        recipe = read_recipe(recipe, [changes[-1]])
        plan = plan_training(recipe, ranks=ranks, device=device, tokens=tokens, base=base)
        if plan.total <= limit:
            return changes, plan
        if plan.parts["weights"] > limit and recipe.model.dtype != "float32":
            return None  # whatever else changes
    return None


@dataclass(frozen=True)
class SamplingPlan:
    """What sampling holds, in bytes: `weights`, the `cache` of 1,000 tokens of a row, and a denoising `step`.

    step: of the first row and of each further one, beside a prefix of 1,000 tokens.
    """

    weights: int
    cache: int
    step: tuple[int, int]

    def rows(self, limit: int, tokens: int) -> int:
        """How many rows of a prefix of so many tokens fit together."""
        first, further = self.step
        left = limit - self.weights - first
        each = further + self.cache * tokens // 1000
        return max(0, left // each + 1 if left >= self.cache * tokens // 1000 else 0)


def plan_sampling(config: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> SamplingPlan:
    """The memory of sampling with a model of this config."""
    model = checkpoint.empty(config, _kernels(device)).to(dtype).eval()
    cached = family_of(config).outline(config).cached_per_token
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    one, two = (_step(model, device, rows) for rows in (1, 2))
    return SamplingPlan(weights, 1000 * cached * dtype.itemsize, (one, two - one))


def _step(model: BlockDiffusionModel, device: str, rows: int) -> int:
    """The peak of one denoising step with a signal and the statistics of all its tokens."""
    with torch.no_grad(), planned_for(device, [*model.parameters(), *model.buffers()]) as counted:
        canvas = torch.zeros(rows, model.canvas_length, dtype=torch.int64)
        prefix = model.encode(torch.zeros(rows, 1000, dtype=torch.int64))
        counted.start_again()
        soft = torch.empty(rows, model.canvas_length, model.vocabulary.table.shape[1], dtype=model.dtype, device="meta")
        hidden = model.denoise(canvas, prefix, soft)
        model.vocabulary.stats(hidden, 1.0, torch.zeros(rows, model.canvas_length))
    return counted.peak


def lines(plan: TrainingPlan, limit: int | None = None) -> Iterator[str]:
    """A plan for a person to read."""
    yield f"a micro-batch of {plan.rows} rows of {plan.tokens:,} tokens with {plan.canvases} canvases each"
    width = max(len(name) for name in plan.parts)
    for name, count in plan.parts.items():
        yield f"  {name:{width}}  {size(count):>12}"
    end = "" if limit is None else f" of {size(limit)}: {'fits' if plan.total <= limit else 'does not fit'}"
    yield f"  {'in all':{width}}  {size(plan.total):>12}{end}"
    yield f"{plan.trained:,} of {plan.numbers:,} numbers train; {plan.flops:.3g} operations of products a step"


def _dtype(recipe: Recipe, base: Base) -> torch.dtype:
    """The dtype of the weights; what a checkpoint is stored in is read from its config."""
    if recipe.model.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.model.dtype]
    said = str(getattr(base.config, "dtype", None)).removeprefix("torch.")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    return known.get(said, torch.float32 if recipe.model.path is None else torch.bfloat16)


def _kernels(device: str) -> str | Kernels:
    """Triton's kernels for a GPU, wherever the plan is made; native ones for a CPU, or where there is no triton."""
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return "torch"
    return Kernels(**{name: triton_op(name) for name in OPS})


def _batch(recipe: Recipe, model: BlockDiffusionModel, tokens: int, rows: int) -> Batch:
    """Rows of so many tokens: a prompt of one canvas, then canvases, of which the recipe's choice is there."""
    L = model.canvas_length
    count = max(1, (tokens - 1) // L)
    chosen: Sequence[int] = recipe.data.canvases.choose([count], 0, [0], [0])[0]
    start = max(1, tokens - count * L)
    canvases = [Canvas([0] * L, start + place * L, t=0.5, coin=True, address=(0, 0, place)) for place in chosen]
    row = CleanRow([0] * tokens, canvases)
    return lay_out([row] * rows, L, pad_id=0)


def _flops(recipe: Recipe, base: Base, dtype: torch.dtype, batch: Batch) -> float:
    """Operations of the matrix products of a micro-batch, counted on the native path."""
    objective = without_weights(recipe, base, "torch", dtype)
    objective.model.train()
    if recipe.train.activation_checkpointing:
        checkpoint_activations(objective.model)
    with planned_for("cpu") as counted:
        losses = objective(batch)
        total: Tensor = losses.canvas_sum + losses.ar_sum
        total.backward()
    return counted.flops
