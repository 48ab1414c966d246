"""The check before a run that its training fits, and the changes of a recipe that make one fit.

What a rank's device cannot hold is refused in one line before weights are read. Every change is planned, and only what
helps is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from blockdiff import memory
from blockdiff.canvas import Batch
from blockdiff.data.collate import AllCanvases
from blockdiff.data.dataset import Dataset
from blockdiff.errors import BlockdiffError, DataError
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.data import Data
from blockdiff.training.plan.rank import ORDER, cut_to_rank, kept_bytes
from blockdiff.training.plan.training import (
    MOST_ROWS,
    TrainingPlan,
    micro_batch_rows,
    plan_training,
    weight_dtypes,
)
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import StartingModel

WORTH = 0.99  # of the bytes before: a change that leaves more is not named


def require_kept(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> None:
    """Refuse an objective without memory whose weights, gradients and optimiser alone the device cannot hold.

    Raises BlockdiffError with the parts, and the changes of the recipe that make it fit.
    """
    total, parts = memory.total_bytes(ranks.device), _kept(objective, recipe, base, ranks)
    if not recipe.parallel.offload and total is not None and sum(parts.values()) > total:
        _require(parts, recipe, base, ranks, None)


def require_step(
    objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks, data: Data, show: Progress
) -> None:
    """Refuse a training whose first optimiser step the device cannot hold; that of a stream is not known yet.

    Only what could come near the memory that is there is planned, and batches are drawn for it alone, so that small
    models wait for nothing. An objective from Python that cannot run on shapes is not planned, and a line says so.
    """
    available, train = memory.available_bytes(ranks.device), data.train
    if available is None or not isinstance(train, Dataset) or not len(train):
        return
    rows, length = micro_batch_rows(recipe, ranks.row_world), recipe.data.pack or int(max(train.lengths))
    if sum(_kept(objective, recipe, base, ranks).values()) + step_bound(objective, rows, length) <= available:
        return
    batch, times = _largest(data, recipe, ranks)
    if batch is None:
        return
    try:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        plan = plan_training(recipe, ranks=ranks.world, device=device, base=base, batch=batch, times=times)
    except BlockdiffError:
        raise
    except Exception as error:  # whatever a part from Python does that reads numbers
        show.line(f"note      memory is not planned: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    _require(plan.parts, recipe, base, ranks, plan)


def _kept(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> dict[str, int]:
    """Bytes that a rank keeps all the time, by what they hold."""
    return kept_bytes(cut_to_rank(objective, recipe), recipe, ranks.row_world, *weight_dtypes(recipe, base))


def _largest(data: Data, recipe: Recipe, ranks: Ranks) -> tuple[Batch | None, float]:
    """The largest micro-batch of this rank in the first optimiser step, of so many rows as a plan runs at most.

    Beside it how many times as many there are. None where the data has an error, which is said when it is fetched.
    """
    most, rows = MOST_ROWS * ranks.row_world, recipe.train.micro_batch_size

    def order(step: int) -> list[tuple[int, int]]:
        return data.order(step)[:most]

    few = replace(data, order=order)
    try:
        batches = few.batches(1, ranks.row_rank, ranks.row_world, None if rows is None else min(rows, MOST_ROWS))
    except DataError:
        return None, 1.0
    batch = max(batches, key=lambda batch: batch.tokens_BS.numel())
    return batch, max(1.0, micro_batch_rows(recipe, ranks.row_world) / MOST_ROWS)


def step_bound(objective: nn.Module, rows: int, length: int) -> int:
    """An upper bound of the bytes of a micro-batch's step beside what is kept, without running it.

    Every matrix is taken to keep 256 bytes of each input and output a token, attention 2 bytes of each key and number.
    """
    L = objective.model.canvas_length  # type: ignore[union-attr]
    of_canvases = -(-length // L) * L  # type: ignore[operator]
    tokens, keys = rows * (length + 2 * of_canvases), length + of_canvases
    numbers = widest = 0
    for parameter in objective.parameters():
        if parameter.dim() > 1:
            numbers += parameter.shape[-1] + parameter.shape[-2]
            widest = max(widest, parameter.shape[-1])
    layers = len(objective.model.layers)  # type: ignore[union-attr, arg-type]
    return int(tokens * (256 * numbers + 2 * layers * widest * keys))


def _require(
    parts: dict[str, int], recipe: Recipe, base: StartingModel, ranks: Ranks, plan: TrainingPlan | None
) -> None:
    """Say in one line where the parts do not fit on the device: BlockdiffError, or a warning."""
    total, remedy = memory.total_bytes(ranks.device), {}
    if total is not None and sum(parts.values()) > total:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        length = getattr(recipe.data.max_length, "tokens", None) or recipe.data.pack or 2 * base.canvas_length
        tokens, images = (length, None) if plan is None else (plan.tokens, plan.image_tokens)
        found = what_fits(recipe, total, base, ranks=ranks.world, device=device, tokens=tokens, image_tokens=images)
        remedy = {} if found is None else {" ".join(f"--set {change}" for change in found[0]): found[1].total}
    memory.require(parts, ranks.device, remedy)


@dataclass(frozen=True)
class Change:
    """A change of a recipe: key and value, whether a rank then keeps less or a step needs less, and when it applies."""

    key: str
    value: str
    keeps_less: bool
    applies: Callable[[Recipe, int], bool]


# In the order in which they are tried: what costs little first.
CHANGES = (
    Change("train.activation_checkpointing", "true", False, lambda r, _: not r.train.activation_checkpointing),
    Change("train.micro_batch_size", "1", False, lambda r, ranks: micro_batch_rows(r, ranks // r.parallel.tensor) > 1),
    Change("parallel.shard", "full", True, lambda r, ranks: ranks > 1 and _can_be_sharded(r)),
    Change("model.dtype", "bfloat16", True, lambda r, _: r.model.dtype == "float32" and r.lora.trains),
    Change("train.autocast", "bfloat16", False, lambda r, _: r.parallel.shard == "full" and not _is_narrow(r)),
    Change("optim.name", "adamw_8bit", True, lambda r, _: r.optim.name == "adamw" and _is_replicated(r)),
    Change("parallel.offload", "true", True, lambda r, _: r.parallel.shard == "full" and not r.parallel.offload),
    Change("lora", "{rank: 16}", True, lambda r, _: not r.lora.trains and r.model.path is not None),
    Change("data.canvases", "1", False, lambda r, _: isinstance(r.data.canvases, AllCanvases)),
)


def what_fits(
    recipe: Recipe,
    limit: int,
    base: StartingModel,
    *,
    ranks: int,
    device: str,
    tokens: int | None,
    image_tokens: int | None = None,
) -> tuple[list[str], TrainingPlan] | None:
    """Changes of the recipe that make the training fit, and the plan with them; None where none do.

    They are tried one on top of the other; those that leave as much as there was are dropped again.
    """
    changes: list[str] = []
    asked: Any = {"ranks": ranks, "device": device, "image_tokens": image_tokens, "base": base}
    plan = plan_training(recipe, tokens=tokens, **asked)
    for key, value, length in _candidates(recipe, plan, limit, ranks, base):
        change = f"{key}={value}"
        tried = read_recipe(recipe, [change], needs_data=False)
        smaller = plan_training(tried, tokens=length or tokens, **asked)
        if smaller.total <= plan.total * WORTH:
            recipe, plan, tokens = tried, smaller, length or tokens
            changes.append(change)
            if plan.total <= limit:
                return changes, plan
    return None


def _candidates(
    recipe: Recipe, plan: TrainingPlan, limit: int, ranks: int, base: StartingModel
) -> Iterator[tuple[str, str, int | None]]:
    """Changes to try, as key, value and the longest row that follows from it (None: as before)."""
    kept = sum(plan.parts.get(name, 0) for name in ORDER)
    first = [each for each in CHANGES if each.keeps_less == (kept > limit)]
    made = recipe
    for change in (*first, *(each for each in CHANGES if each not in first)):
        if change.applies(made, ranks):
            made = read_recipe(made, [f"{change.key}={change.value}"], needs_data=False)
            yield change.key, change.value, None
    can_split = (made.parallel.shard == "full" or made.model.quantize is not None) and made.parallel.tensor == 1
    if can_split and (experts := _expert_ranks(base, ranks)) > made.parallel.experts:
        yield "parallel.experts", str(experts), None
    key = "data.max_length" if recipe.data.pack is None else "data.pack"  # rows are as long as what is packed
    for parts in (2, 4):
        if plan.tokens // parts > base.canvas_length:
            yield key, str(plan.tokens // parts), plan.tokens // parts


def _can_be_sharded(recipe: Recipe) -> bool:
    return recipe.parallel.shard == "none" and recipe.model.quantize is None


def _is_replicated(recipe: Recipe) -> bool:
    return recipe.parallel.names == ("replicate",)


def _is_narrow(recipe: Recipe) -> bool:
    return recipe.train.autocast is not None or recipe.model.dtype == "bfloat16"


def _expert_ranks(base: StartingModel, ranks: int) -> int:
    """The most ranks of a node of eight that can split the experts of a layer."""
    experts = base.config.experts
    return max((n for n in (1, 2, 4, 8) if ranks % n == 0 and experts and experts % n == 0), default=1)
