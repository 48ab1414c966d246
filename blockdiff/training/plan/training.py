"""`plan_training`: the bytes that a rank holds at the peak of an optimiser step.

The bytes that a rank keeps are computed from the weights (`rank`). The bytes that a step adds are counted by running
one layer of each kind on shapes (`step_bytes`), with Triton's kernels for a GPU and C's for a CPU. `fitting.what_fits`
finds changes that make a training fit.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from blockdiff.canvas import Batch
from blockdiff.checkpoint.files import DTYPES
from blockdiff.errors import BlockdiffError, RecipeError
from blockdiff.kernels import IN_C, Kernels
from blockdiff.memory import size
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import frozen_weights
from blockdiff.terminal import counted
from blockdiff.training.data import image_reader
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.muon import GROUP_NUMBERS
from blockdiff.training.optimiser import matrix_count, trainable
from blockdiff.training.plan.live_bytes import CHUNK
from blockdiff.training.plan.rank import cut_to_rank, kept_bytes, sharding_ranks
from blockdiff.training.plan.step_bytes import GATHERED, LATE, Step, keep_one_of_each
from blockdiff.training.recipe import Recipe
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.starting_model import StartingModel, computed_in

WAITING = "waiting gradients"  # of a layer that runs several times in a micro-batch: they are added once all are there
WORTH_A_LINE = 0.1  # of the bytes that a step adds; fewer count as activations
MOST_ROWS = 64  # of a micro-batch that runs on shapes; activations of more rows are scaled up


@dataclass(frozen=True)
class TrainingPlan:
    """The memory of one rank at the peak of an optimiser step.

    parts: bytes on the device, by their name. host: bytes that are kept on the host instead, by their name. tokens,
    canvases: of a row. image_tokens: of all images of a row. rows: of a micro-batch. numbers: parameters and buffers of
    the whole model; trained: the number of them that train. unit: the name of canvases.
    """

    parts: dict[str, int]
    host: dict[str, int]
    tokens: int
    canvases: int
    image_tokens: int
    rows: int
    numbers: int
    trained: int
    unit: str = "canvas"

    @property
    def total(self) -> int:
        """Bytes on the device in all."""
        return sum(self.parts.values())

    def fits(self, limit: int) -> bool:
        """Return True if a device of `limit` bytes holds it and the `spare` bytes."""
        return self.total <= limit - spare(limit)


def plan_training(
    recipe: Recipe,
    *,
    ranks: int = 1,
    device: str = "cuda",
    tokens: int | None = None,
    image_tokens: int | None = None,
    base: StartingModel | None = None,
    batch: Batch | None = None,
    times: float = 1.0,
) -> TrainingPlan:
    """Return the memory of an optimiser step of one of `ranks` processes on a "cuda" or "cpu" device.

    tokens: the length of the longest row, if the recipe names neither data.pack nor data.max_length. All rows are taken
    to be that long, all response but a prompt of one canvas, and all canvases to get the signal: the largest case.
    image_tokens: of a row's images in all (None: one image of the processor's largest size). batch: a micro-batch of
    the run, planned instead of that; times: how many times as many rows the run's micro-batch has. Raises RecipeError
    if the length of a row is not known.
    """
    if ranks % recipe.parallel.tensor:
        raise RecipeError(f"parallel.tensor: {recipe.parallel.tensor} does not divide the {ranks} processes of --gpus")
    kind = kind_of(recipe)
    base = kind.start(recipe) if base is None else base
    stored, computed = weight_dtypes(recipe, base)
    is_sharded = recipe.parallel.shard == "full"
    objective = kind.without_weights(recipe, base, kernels_for(device), computed)
    matrices = [module.held(weight) for module, weight in frozen_weights(objective).values()]
    tensors = [*objective.parameters(), *objective.buffers()]
    numbers = sum(x.numel() for x in tensors) + sum(
        math.prod(matrix.shape) - sum(x.numel() for x in matrix) for matrix in matrices
    )
    trains = sum(x.numel() for x in tensors if x.requires_grad)
    objective = cut_to_rank(objective, recipe)
    model, ranks = objective.model.train(), ranks // recipe.parallel.tensor
    static = kept_bytes(objective, recipe, ranks, stored, computed)
    share, rows = -(-recipe.train.batch_size // ranks), micro_batch_rows(recipe, ranks)
    if batch is None:
        few, longest = min(rows, MOST_ROWS), _longest(recipe, tokens)
        images = _image_sizes(recipe, base, model, longest, image_tokens)
        batch, times = kind.largest_batch(recipe, base, model, longest, few, images), rows / few
    if ranks > 1 and not is_sharded and share > rows:  # DDP's buckets, besides earlier micro-batches' gradients
        static["buckets"] = static.get("gradients", 0)
    orthogonalised = _orthogonalised(objective, recipe, ranks)
    counts = keep_one_of_each(model)
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    sharing = sharding_ranks(objective, recipe, ranks) if is_sharded else {}
    has_gradients = share > rows or (ranks > 1 and not is_sharded)
    apart = recipe.parallel.experts > 1 and share <= rows
    step = Step(
        objective,
        counts,
        sharing,
        has_gradients,
        is_late=device == "cpu",
        experts_apart=apart,
        stored=stored,
        beside=kind.beside(objective).values(),
    )
    counted = step.run(batch, None if is_sharded else computed_in(recipe))
    gradients = static.get("gradients", 0)
    peak = max(0, counted.peak - gradients)
    others = {name: min(counted.parts[name], peak) for name in (CHUNK, GATHERED, LATE) if counted.parts[name] > 0}
    if (waiting := counted.parts["gradients"] - gradients) > WORTH_A_LINE * peak:
        others[WAITING] = min(waiting, peak)
    moving = {"activations": int(times * max(0, peak - sum(others.values())))} | others
    if orthogonalised > sum(moving.values()):
        moving = {"orthogonalised": orthogonalised}
    between = kind.between_steps(recipe, base, batch.tokens_BS.shape[1], computed)
    moving = between if sum(between.values()) > sum(moving.values()) else moving
    host = static if recipe.parallel.offload else {}
    parts = ({} if recipe.parallel.offload else static) | moving
    of_images = 0 if batch.images is None else int(batch.images.row_N.bincount().max())
    sizes = batch.tokens_BS.shape[1], batch.start_BC.shape[1], of_images, round(times * batch.tokens_BS.shape[0])
    return TrainingPlan(parts, host, *sizes, numbers, trains, kind.unit)


def spare(limit: int) -> int:
    """The bytes of a device that are left to CUDA, libraries and the allocator: 2 GiB, or an eighth if that is less."""
    return min(2 * 2**30, limit // 8)


def micro_batch_rows(recipe: Recipe, ranks: int) -> int:
    """Return the rows of a micro-batch of one rank. ranks: how many share the batch, each with its own rows."""
    share = -(-recipe.train.batch_size // ranks)
    return min(share, recipe.train.micro_batch_size or share)


def breaking(plan: TrainingPlan, limit: int) -> str:
    """Return the first part with which the sum of a plan's parts exceeds the limit; the plan must not fit."""
    totals = zip(plan.parts, accumulate(plan.parts.values()), strict=True)
    return next(name for name, held in totals if held > limit - spare(limit))


def lines(plan: TrainingPlan, limit: int | None = None) -> Iterator[str]:
    """Yield the lines of a plan for a person to read, with a verdict if a `limit` is given."""
    parts = [counted(plan.canvases, plan.unit)] * bool(plan.canvases)
    parts += [f"images of {plan.image_tokens:,} tokens"] * bool(plan.image_tokens)
    each = f" with {' and '.join(parts)} each" if parts else ""
    yield f"a micro-batch of {counted(plan.rows, 'row')} of {plan.tokens:,} tokens{each}"
    width = max(len(name) for name in (*plan.parts, *plan.host))
    for name, count in plan.parts.items():
        yield f"  {name:{width}}  {size(count):>12}"
    yield f"  {'in all':{width}}  {size(plan.total):>12}{'' if limit is None else _verdict(plan, limit)}"
    for name, count in plan.host.items():
        yield f"  {name:{width}}  {size(count):>12} on the host"
    yield f"{plan.trained:,} of {plan.numbers:,} numbers train"


def _verdict(plan: TrainingPlan, limit: int) -> str:
    kept_free = f", as {size(spare(limit))} are left to CUDA and the allocator" * (plan.total <= limit)
    return f" of {size(limit)}: {'fits' if plan.fits(limit) else f'does not fit{kept_free}'}"


def _orthogonalised(objective: Any, recipe: Recipe, ranks: int) -> int:
    """Return the bytes that a step of Muon holds, 0 for other optimisers.

    These are the directions of all matrices, and three times the matrices that are orthogonalised at once.
    """
    if recipe.optim.name != "muon":
        return 0
    sizes = [x.numel() for name, x in trainable(objective).items() if matrix_count(name, x)]
    held = sum(sizes) // (ranks if recipe.parallel.shard == "full" else 1)
    return 4 * (held + 3 * min(sum(sizes), max(GROUP_NUMBERS, *sizes)))


def _longest(recipe: Recipe, tokens: int | None) -> int:
    """Return the number of tokens of the longest row; RecipeError if neither `tokens` nor the recipe limits it."""
    length = tokens or recipe.data.pack or getattr(recipe.data.max_length, "tokens", None)
    if length is None:
        raise RecipeError(kind_of(recipe).length_from)
    return int(length)


def _image_sizes(
    recipe: Recipe, base: StartingModel, model: BlockDiffusionModel, longest: int, tokens: int | None
) -> list[int]:
    """Return the number of tokens of each image in the longest row; [] if the model takes no images.

    They are `tokens` in all, cut into images of the largest size, or one such image if `tokens` is None; never more
    than `longest`.
    """
    if model.image_side is None:
        return []
    try:
        most = image_reader(recipe, base).processor.most_tokens  # type: ignore[union-attr]
    except BlockdiffError:  # the processor's settings may be missing
        most = model.image_side.released_tokens
    most = min(most, longest)
    images, rest = divmod(most if tokens is None else min(tokens, longest), most)
    return [most] * images + [rest] * (rest > 0)


def weight_dtypes(recipe: Recipe, base: StartingModel) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which a rank keeps weights, and the one in which sharded weights are gathered and run."""
    if recipe.model.dtype != "auto":
        stored = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.model.dtype]
    else:  # the dtype of a checkpoint is read from its config
        dtype_by_name = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        stored = dtype_by_name.get(
            str(base.config.stored_dtype), torch.float32 if recipe.model.path is None else torch.bfloat16
        )
    is_narrowed = recipe.parallel.shard == "full" and recipe.train.autocast is not None
    return stored, torch.bfloat16 if is_narrowed else stored


def kernels_for(device: str) -> Kernels:
    """Return the kernels that a plan runs on shapes: Triton's for a GPU if triton is installed, else those of a CPU."""
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return IN_C
    return Kernels("shapes")
