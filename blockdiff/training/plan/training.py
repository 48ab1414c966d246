"""`plan_training`: what a rank holds at the peak of an optimiser step, and at least how long the step takes.

The training step of the recipe is run on tensors without memory (`live_bytes`), so what is counted is what the code
holds at its peak: with Triton's kernels for a GPU, with the native ones for a CPU. What sharded weights take is counted
where they would be gathered (`gathering`). `changes` finds what makes a training fit.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint.files import DTYPES
from blockdiff.errors import RecipeError
from blockdiff.kernels import Kernels
from blockdiff.memory import size
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.plan.gathering import Gathering
from blockdiff.training.plan.live_bytes import planned_for
from blockdiff.training.plan.spread import Spread
from blockdiff.training.plan.tensor_parallel import one_rank
from blockdiff.training.plan.work import Rates, Work
from blockdiff.training.recipe import Recipe
from blockdiff.training.starting_model import StartingModel, computed_in, read_starting_model, without_weights


@dataclass(frozen=True)
class TrainingPlan:
    """What one rank holds at the peak of an optimiser step, and what it does in one.

    parts: bytes on the device by what they hold; host: the same of what is kept on the host instead. tokens, canvases:
    of a row; rows: of a micro-batch. flops, moved, exchanged: operations of matrix products, bytes that operations read
    and write, and bytes received from other ranks, in an optimiser step; computing: seconds of it without the exchange.
    numbers, trained: parameters and buffers of the whole model, and those that train.
    """

    parts: dict[str, int]
    host: dict[str, int]
    tokens: int
    canvases: int
    rows: int
    numbers: int
    trained: int
    flops: float
    moved: float
    exchanged: float
    computing: float

    @property
    def total(self) -> int:
        """Bytes on the device in all."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most of the device."""
        return max(self.parts, key=lambda name: self.parts[name])

    def seconds(self, rates: Rates) -> float:
        """At least how long an optimiser step takes, if what is exchanged is exchanged meanwhile."""
        return max(self.computing, self.exchanged / rates.network)


def plan_training(
    recipe: Recipe,
    *,
    ranks: int = 1,
    device: str = "cuda",
    tokens: int | None = None,
    base: StartingModel | None = None,
    batch: Batch | None = None,
    rates: Rates | None = None,
) -> TrainingPlan:
    """The memory and the work of an optimiser step of one of `ranks` processes on a "cuda" or "cpu" device.

    tokens: of the longest row, where the recipe names neither data.pack nor data.max_length. Every row is taken to be
    that long, all of it response but a prompt of one canvas, and every canvas to get the signal: the most there can be.
    batch: a micro-batch of the run, to be planned instead. Raises RecipeError where the length of a row is not known.
    """
    if ranks % recipe.parallel.tensor:
        raise RecipeError(f"parallel.tensor: {recipe.parallel.tensor} does not divide the {ranks} processes")
    base = read_starting_model(recipe) if base is None else base
    stored, computed = dtypes_of(recipe, base)
    objective = without_weights(recipe, base, kernels_for(device), computed)
    model = objective.model.train()
    weights = [*objective.parameters(), *objective.buffers()]
    numbers, trains = (sum(x.numel() for x in some) for some in (weights, [x for x in weights if x.requires_grad]))
    work = Work()
    objective = one_rank(objective, recipe, work)
    model, ranks = objective.model, ranks // recipe.parallel.tensor
    spread = Spread(recipe, model, ranks)
    static = spread.parts(objective, stored, computed)
    spread.split_experts(work)
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    share = -(-recipe.train.batch_size // ranks)
    rows = min(share, recipe.train.micro_batch_size or share)
    if batch is None:
        batch = worst_batch(recipe, model, _longest(recipe, tokens), rows)
    weights = [*objective.parameters(), *objective.buffers()]  # without the experts of other ranks
    trained = [parameter for parameter in weights if parameter.requires_grad]
    precision = None if recipe.parallel.shard == "full" else computed_in(recipe)
    with planned_for(device, weights, model.vocabulary.table.shape[0], precision) as counted:
        counted.work = work
        gathering = Gathering(spread.units(), counted, share > rows) if recipe.parallel.shard == "full" else None
        if gathering is None:  # gradients of the micro-batch before, or the buckets that ranks exchange
            for parameter in trained if share > rows else spread.replicated(trained):
                parameter.grad = torch.empty_like(parameter)
        model.register_forward_hook(lambda *call: counted.call(_keys(call[-1]), "cache"))
        with nullcontext() if precision is None else torch.autocast(device, dtype=precision):
            losses = objective(batch)
        (losses.canvas_sum + losses.ar_sum).backward()
        if gathering is not None:
            gathering.finish()
    gradients = static.get("gradients", 0)
    others = {name: counted.parts[name] for name in ("vocabulary chunk", "gathered layer", "cache")}
    peak = max(0, counted.peak - gradients)
    left = peak - sum(others.values())
    host = static if recipe.parallel.offload else {}
    parts = {} if recipe.parallel.offload else static
    parts = parts | {"activations": max(0, left)} | {name: min(n, peak) for name, n in others.items() if n}
    times = share / rows
    exchanged = work.exchanged * math.ceil(times)
    if gathering is None and ranks > 1:
        exchanged = 2 * gradients * (ranks - 1) / ranks
    return TrainingPlan(
        parts, host, batch.tokens_BS.shape[1], batch.start_BC.shape[1], batch.tokens_BS.shape[0],
        numbers, trains, work.flops * times, work.moved * times, exchanged, work.seconds(rates or Rates()) * times,
    )  # fmt: skip


def breaking(plan: TrainingPlan, limit: int) -> str:
    """The part with which the parts before it, in the order of the plan, no longer fit."""
    held = 0
    for name, count in plan.parts.items():
        held += count
        if held > limit:
            return name
    return plan.largest


def lines(plan: TrainingPlan, limit: int | None = None) -> Iterator[str]:
    """A plan for a person to read."""
    yield f"a micro-batch of {plan.rows} rows of {plan.tokens:,} tokens with {plan.canvases} canvases each"
    width = max(len(name) for name in (*plan.parts, *plan.host))
    for name, count in plan.parts.items():
        yield f"  {name:{width}}  {size(count):>12}"
    end = "" if limit is None else f" of {size(limit)}: {'fits' if plan.total <= limit else 'does not fit'}"
    yield f"  {'in all':{width}}  {size(plan.total):>12}{end}"
    for name, count in plan.host.items():
        yield f"  {name:{width}}  {size(count):>12} on the host"
    yield f"{plan.trained:,} of {plan.numbers:,} numbers train"


def time_line(plan: TrainingPlan, rates: Rates) -> str:
    """How long an optimiser step takes at least, and what it is made of."""
    exchanged = f", {size(plan.exchanged)} from other ranks" if plan.exchanged else ""
    reached = f"{rates.flops / 1e12:g} TFLOP/s, {rates.memory / 1e12:g} TB/s"
    reached += f" and {rates.network / 1e9:g} GB/s" if plan.exchanged else ""
    return (
        f"about {plan.seconds(rates):.3g} s an optimiser step, an estimate: {plan.flops / 1e12:,.3g} TFLOP of "
        f"products, {size(plan.moved)} read and written{exchanged}, at {reached}"
    )


def _longest(recipe: Recipe, tokens: int | None) -> int:
    """Tokens of the longest row; RecipeError where nothing says it."""
    length = tokens or recipe.data.pack or getattr(recipe.data.max_length, "tokens", None)
    if length is None:
        raise RecipeError("data.max_length: missing, and so the longest row is not known; set it, or say --tokens")
    return int(length)


def dtypes_of(recipe: Recipe, base: StartingModel) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the weights as a rank keeps them, and the one in which sharded ones are gathered and run."""
    if recipe.model.dtype != "auto":
        stored = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.model.dtype]
    else:  # what a checkpoint is stored in is read from its config
        said = str(getattr(base.config, "dtype", None)).removeprefix("torch.")
        known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        stored = known.get(said, torch.float32 if recipe.model.path is None else torch.bfloat16)
    is_narrowed = recipe.parallel.shard == "full" and recipe.train.autocast is not None
    return stored, torch.bfloat16 if is_narrowed else stored


def kernels_for(device: str) -> str | Kernels:
    """Triton's kernels for a GPU, wherever the plan is made; native ones for a CPU, or where there is no triton."""
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return "torch"
    return Kernels("shapes")


def worst_batch(recipe: Recipe, model: BlockDiffusionModel, tokens: int, rows: int) -> Batch:
    """Rows of so many tokens: a prompt of one canvas, then canvases, of which the recipe's choice is there."""
    L = model.canvas_length
    if not model.denoises:
        return lay_out([CleanRow([0] * tokens, [])] * rows, L, pad_id=0)
    count = max(1, (tokens - 1) // L)
    chosen: Sequence[int] = recipe.data.canvases.choose([count], 0, [0], [0])[0]
    start = max(1, tokens - count * L)
    canvases = [Canvas([0] * L, start + place * L, t=0.5, coin=True, address=(0, 0, place)) for place in chosen]
    row = CleanRow([0] * tokens, canvases)
    return lay_out([row] * rows, L, pad_id=0)


def _keys(returned: Any) -> Iterable[Tensor]:
    """The keys and values of clean tokens that a call of the model returned."""
    return [x for layer in returned[1] for x in layer]
