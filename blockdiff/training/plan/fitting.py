"""The check before a run that its training fits, and the changes of a recipe that make one fit.

If a rank's device cannot hold the training, it is refused in one line before weights are read. Every change is planned,
and only changes that help are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from blockdiff import memory
from blockdiff.canvas import Batch
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.dataset import Dataset
from blockdiff.errors import BlockdiffError, DataError
from blockdiff.parallel.ranks import Ranks
from blockdiff.stored_forms import QUANTIZE
from blockdiff.training.data import Data
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
from blockdiff.training.recipe_checks import refuse
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import StartingModel

WORTH = 0.99  # of the bytes before: a change that leaves more is not named
LENGTHS = ("data.max_length", "data.pack")  # packed rows are as long as the pack


def require_resident(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> None:
    """Refuse an objective, still without memory, whose weights, gradients and optimiser the device cannot hold.

    Raises BlockdiffError with the parts and the changes of the recipe that make it fit.
    """
    total, parts = memory.total_bytes(ranks.device), _kept(objective, recipe, base, ranks)
    if not recipe.parallel.offload and total is not None and sum(parts.values()) > total:
        _require(parts, recipe, base, ranks, None)


def require_step(
    objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks, data: Data, show: Progress
) -> None:
    """Refuse a training whose first optimiser step the device cannot hold. Streams of data are not checked.

    The step is planned, and its batch drawn, only if what a rank keeps and `step_bound` exceed the available memory, so
    small models do not wait. An objective from Python that cannot run on shapes is not planned, and a line says so.
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
    except Exception as error:  # a part from Python may fail in any way if it reads numbers
        show.line(f"note      memory is not planned: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return
    _require(plan.parts, recipe, base, ranks, plan)


def _kept(objective: nn.Module, recipe: Recipe, base: StartingModel, ranks: Ranks) -> dict[str, int]:
    """Return the bytes that a rank keeps between steps, by their name."""
    return kept_bytes(cut_to_rank(objective, recipe), recipe, ranks.row_world, *weight_dtypes(recipe, base))


def _largest(data: Data, recipe: Recipe, ranks: Ranks) -> tuple[Batch | None, float]:
    """Return this rank's largest micro-batch of the first optimiser step, of at most MOST_ROWS rows, and a factor.

    The factor is the number of rows of the run's micro-batch for each of its rows. The batch is None if the data have
    an error; the step reports it when it fetches them.
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
    """Return an upper bound of the bytes that a micro-batch's step adds, without running it.

    Every matrix is assumed to keep 256 bytes per token and per number of its input and output; attention 2 bytes per
    query, key and column of the widest matrix in each layer.
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
    """Raise BlockdiffError, or warn, if the parts do not fit on the device; the line names changes that would fit."""
    total, remedy = memory.total_bytes(ranks.device), {}
    if total is not None and sum(parts.values()) > total:
        device = "cuda" if ranks.device.type == "cuda" else "cpu"
        length = getattr(recipe.data.max_length, "tokens", None) or recipe.data.pack or 2 * base.canvas_length
        tokens, images = (length, None) if plan is None else (plan.tokens, plan.image_tokens)
        fit = what_fits(recipe, total, base, ranks=ranks.world, device=device, tokens=tokens, image_tokens=images)
        remedy = {} if fit is None else {" ".join(f"--set {change}" for change in fit[0]): fit[1].total}
    memory.require(parts, ranks.device, remedy)


@dataclass(frozen=True)
class Change:
    """A change of a recipe: the keys that it sets, and whether it applies to a recipe on `ranks` processes."""

    settings: Mapping[str, str]
    applies: Callable[[Recipe, int], bool]


# The cheapest come first: the same updates in less memory, then other rounding. Later sets change what is learnt.
CHEAP = (
    Change({"objective.sweep": "true"}, lambda r, _: _calls_layers_twice(r)),
    Change({"train.micro_batch_size": "1"}, lambda r, ranks: micro_batch_rows(r, ranks // r.parallel.tensor) > 1),
    Change({"train.activation_checkpointing": "true"}, lambda r, _: not r.train.activation_checkpointing),
    Change({"parallel.shard": "full"}, lambda r, ranks: ranks > 1 and r.parallel.shard == "none"),
    Change({"model.dtype": "bfloat16"}, lambda r, _: r.model.dtype == "float32" and r.lora.trains),
    Change({"train.autocast": "bfloat16"}, lambda r, _: r.parallel.shard == "full" and not _is_narrow(r)),
    Change({"optim.name": "adamw_8bit"}, lambda r, _: r.optim.name == "adamw" and r.parallel.names == ("replicate",)),
)


def _rounded_to(word: str) -> Change:
    """Return the change that stores weights as `word`, which applies unless they already have as few bits."""
    words = list(QUANTIZE)  # from more bits to fewer
    return Change({"model.quantize": word}, lambda r, _: r.model.quantize not in words[words.index(word) :])


ROUNDED = tuple(_rounded_to(word) for word in QUANTIZE)
OFFLOAD = Change({"parallel.shard": "full", "parallel.offload": "true"}, lambda r, _: not r.parallel.offload)
ADAPTERS = Change({"lora": "{rank: 16}"}, lambda r, _: not r.lora.trains and r.model.path is not None)
ONE_CANVAS = Change({"data.canvases": "1"}, lambda r, _: isinstance(r.data.canvases, AllCanvases))


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
    """Return changes of the recipe that make the training fit, and the plan with them; None if none do.

    Ways are tried from the one that costs the user least. Changes without which the training also fits are
    dropped.
    """
    plans = _Plans(recipe, base, ranks=ranks, device=device, tokens=tokens, image_tokens=image_tokens)
    cheap = [*CHEAP, *_split_experts(base, ranks)]
    shorter = [ONE_CANVAS, *_shorter_rows(recipe, plans.of({}), base)]
    smaller = [[change] for change in (*ROUNDED, OFFLOAD)]
    for last in ([], shorter):
        for more in ([], *smaller, *([ADAPTERS, *way] for way in smaller)):
            if (fit := _smallest(plans, [*cheap, *more, *last], limit)) is not None:
                return fit
    return None


def _smallest(plans: _Plans, way: Sequence[Change], limit: int) -> tuple[list[str], TrainingPlan] | None:
    """Add the changes of a way one by one until the training fits, then drop those that are not needed.

    A change that saves less than 1 % of the bytes is left out. Returns the changes as KEY=VALUE and their plan, or None
    if the training does not fit with all of them.
    """
    taken, plan = list[Change](), plans.of({})
    for change in way:
        smaller = plans.of(_joined([*taken, change])) if plans.apply(change, taken) else None
        if smaller is None or plan is None or smaller.total > plan.total * WORTH:
            continue
        taken, plan = [*taken, change], smaller
        if plan.fits(limit):
            for each in taken[-2::-1]:  # all but the last, the costliest first
                fewer = plans.of(_joined([other for other in taken if other is not each]))
                if fewer is not None and fewer.fits(limit):
                    taken, plan = [other for other in taken if other is not each], fewer
            return [f"{key}={value}" for key, value in _joined(taken).items()], plan
    return None


class _Plans:
    """The plans of a recipe with changes, each made once."""

    def __init__(self, recipe: Recipe, base: StartingModel, *, tokens: int | None, **options: Any) -> None:
        self.recipe, self.base, self.tokens, self.asked = recipe, base, tokens, options
        self._made: dict[tuple[tuple[str, str], ...], TrainingPlan | None] = {}

    def apply(self, change: Change, taken: Sequence[Change]) -> bool:
        """Return True if a change applies on top of others."""
        return change.applies(self._changed(_joined(taken)), self.asked["ranks"])

    def of(self, settings: Mapping[str, str]) -> TrainingPlan | None:
        """Return the plan with some keys set; None if the recipe is then refused."""
        key = tuple(sorted(settings.items()))
        if key not in self._made:
            self._made[key] = self._plan(settings)
        return self._made[key]

    def _plan(self, settings: Mapping[str, str]) -> TrainingPlan | None:
        try:
            changed = self._changed(settings)
            refuse(changed, self.asked["ranks"])
            length = next((int(settings[key]) for key in LENGTHS if key in settings), self.tokens)
            return plan_training(changed, base=self.base, tokens=length, **self.asked)
        except BlockdiffError:
            if not settings:
                raise
            return None

    def _changed(self, settings: Mapping[str, str]) -> Recipe:
        return read_recipe(self.recipe, [f"{key}={value}" for key, value in settings.items()], needs_data=False)


def _joined(changes: Sequence[Change]) -> dict[str, str]:
    """Return the keys that several changes set; the last value of a key counts."""
    return {key: value for change in changes for key, value in change.settings.items()}


def _split_experts(base: StartingModel, ranks: int) -> list[Change]:
    """Return the change that splits experts over the largest of 1, 2, 4 and 8 that divides ranks and experts."""
    experts = base.config.experts
    count = max((n for n in (1, 2, 4, 8) if ranks % n == 0 and experts and experts % n == 0), default=1)

    def applies(recipe: Recipe, _: int) -> bool:
        can_split = recipe.parallel.shard == "full" or recipe.model.rounds
        return can_split and recipe.parallel.tensor == 1 and count > recipe.parallel.experts

    return [Change({"parallel.experts": str(count)}, applies)]


def _shorter_rows(recipe: Recipe, plan: TrainingPlan | None, base: StartingModel) -> list[Change]:
    """Return changes that cut rows to a half and to a quarter, if that is longer than a canvas.

    They set data.pack if the recipe packs rows, else data.max_length.
    """
    key = LENGTHS[recipe.data.pack is not None]
    lengths = [] if plan is None else [plan.tokens // parts for parts in (2, 4)]
    return [Change({key: str(length)}, lambda *_: True) for length in lengths if length > base.canvas_length]


def _calls_layers_twice(recipe: Recipe) -> bool:
    """True if unsharded layers that train are called twice a step, because `objective.sweep` is not true."""
    is_whole = recipe.parallel.shard == "none" and not recipe.lora.trains
    return is_whole and getattr(recipe.objective, "sweep", True) is not True


def _is_narrow(recipe: Recipe) -> bool:
    return recipe.train.autocast is not None or recipe.model.dtype == "bfloat16"
