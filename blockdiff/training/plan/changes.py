"""Changes of a recipe that make its training fit into a memory: each is planned, and only what helps is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from blockdiff.data.collate import AllCanvases
from blockdiff.models.family import family_of
from blockdiff.training.plan.rank import ORDER
from blockdiff.training.plan.training import TrainingPlan, micro_batch_rows, plan_training
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import StartingModel

WORTH = 0.99  # of the bytes before: a change that leaves more is not named


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
    experts = family_of(base.config).outline(base.config).experts
    return max((n for n in (1, 2, 4, 8) if ranks % n == 0 and experts and experts % n == 0), default=1)
