"""Whether a training fits on a rank's device: what cannot fit is refused in one line before weights are read."""

from __future__ import annotations

import math

from torch import nn

from blockdiff import memory
from blockdiff.canvas import Batch
from blockdiff.data.dataset import Dataset
from blockdiff.errors import BlockdiffError, DataError
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.data import Data
from blockdiff.training.plan.changes import what_fits
from blockdiff.training.plan.spread import Spread
from blockdiff.training.plan.tensor_parallel import one_rank
from blockdiff.training.plan.training import dtypes_of, plan_training
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.starting_model import StartingModel


def require_kept(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> None:
    """Refuse an objective without memory whose weights, gradients and optimiser alone cannot fit on the device.

    Raises BlockdiffError with the parts, and the changes of the recipe that make it fit.
    """
    if not recipe.parallel.offload:
        _require(_kept(objective, recipe, base, ranks), recipe, base, ranks, None)


def require_step(
    objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks, data: Data, show: Progress
) -> None:
    """Refuse a training whose first optimiser step cannot fit on the device; that of a stream is not known yet.

    Only what could come near the memory that is there is planned, so that small models wait for nothing. An objective
    from Python that cannot run on tensors without memory is not planned, and a line says so.
    """
    available, batch = memory.available_bytes(ranks.device), _largest(data, ranks)
    if available is None or batch is None:
        return
    kept = _kept(objective, recipe, base, ranks)
    if sum(kept.values()) + plenty(objective, batch) <= available:
        return
    try:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        parts = plan_training(recipe, ranks=ranks.world, device=device, base=base, batch=batch).parts
    except BlockdiffError:
        raise
    except Exception as error:  # whatever a part from Python does that reads numbers
        show.line(f"note      memory is not planned: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    _require(parts, recipe, base, ranks, batch)


def _kept(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> dict[str, int]:
    """Bytes that a rank keeps all the time, by what they hold."""
    mine = one_rank(objective, recipe)
    return Spread(recipe, mine.model, ranks.row_world).parts(mine, *dtypes_of(recipe, base))


def _largest(data: Data, ranks: Ranks) -> Batch | None:
    """The largest micro-batch of this rank in the first optimiser step; None of data that would have to be read."""
    if not isinstance(data.train, Dataset):
        return None
    try:
        batches = data.batches(1, ranks.row_rank, ranks.row_world, data.recipe.train.micro_batch_size)
    except DataError:  # said when the step is fetched, by all ranks together
        return None
    return max(batches, key=lambda batch: batch.tokens_BS.numel(), default=None)


def plenty(objective: nn.Module, batch: Batch) -> int:
    """More bytes than a step of a micro-batch takes beside what is kept, without running it.

    Every matrix is taken to keep 256 bytes of each input and output a token, attention 2 bytes of each key and number.
    """
    B, S = batch.tokens_BS.shape
    tokens = B * (S + 2 * math.prod(batch.canvas_BCL.shape[1:]))
    keys = S + math.prod(batch.canvas_BCL.shape[1:])
    numbers = widest = 0
    for parameter in objective.parameters():
        if parameter.dim() > 1:
            numbers += parameter.shape[-1] + parameter.shape[-2]
            widest = max(widest, parameter.shape[-1])
    layers = len(objective.model.layers)  # type: ignore[union-attr, arg-type]
    return tokens * (256 * numbers + 2 * layers * widest * keys)


def _require(parts: dict[str, int], recipe: Recipe, base: StartingModel, ranks: Ranks, batch: Batch | None) -> None:
    """Raise BlockdiffError in one line where the parts do not fit on the device."""
    available = memory.available_bytes(ranks.device)
    if available is None or sum(parts.values()) <= available:
        return
    device = "cuda" if ranks.device.type == "cuda" else "cpu"
    length = getattr(recipe.data.max_length, "tokens", None) or recipe.data.pack or 2 * base.canvas_length
    tokens = length if batch is None else batch.tokens_BS.shape[1]
    found = what_fits(recipe, available, base, ranks=ranks.world, device=device, tokens=tokens)
    remedy = {} if found is None else {" ".join(f"--set {change}" for change in found[0]): found[1].total}
    memory.require(parts, ranks.device, remedy)
