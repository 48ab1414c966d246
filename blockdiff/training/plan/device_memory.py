"""The check before a training: what a rank's device cannot hold is refused in one line, before weights are read."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from blockdiff import memory
from blockdiff.canvas import Batch
from blockdiff.data.dataset import Dataset
from blockdiff.errors import BlockdiffError, DataError
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.data import Data
from blockdiff.training.plan.changes import what_fits
from blockdiff.training.plan.rank import cut_to_rank, kept_bytes
from blockdiff.training.plan.training import (
    MOST_ROWS,
    TrainingPlan,
    micro_batch_rows,
    plan_training,
    weight_dtypes,
)
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.starting_model import StartingModel


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
