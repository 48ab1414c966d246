"""The batches of optimiser steps and of the held-out examples, divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from blockdiff.canvas import PADDING_ROW, Batch, joined
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import AnyOrder
from blockdiff.data.packing import best_fit, deal
from blockdiff.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HELDOUT_STEP = -1  # the epoch and optimiser step in the addresses of held-out draws, so that they never change


def rank_slots(rank: int, world: int, total: int) -> range:
    """The slots of one of `world` ranks in a global batch of `total` rows, divided as evenly as possible."""
    return range(rank * total // world, (rank + 1) * total // world)


def micro_batches(
    examples: Sequence[Example],
    order: AnyOrder,
    collator: Collator,
    step: int,
    *,
    micro_batch_size: int | None = None,
    rank: int = 0,
    world: int = 1,
    pack: int | None = None,
) -> list[Batch]:
    """Return one rank's micro-batches of an optimiser step, counted from 1, on the CPU.

    examples: if they have `lengths`, the tokens of each, a rank reads only its own examples to pack them.
    order: `order(step)` returns (epoch, index of the example) for every slot.
    micro_batch_size: rows of a micro-batch (None: all). Rows of similar size share a micro-batch.
    pack: the largest number of tokens in rows that examples share (`best_fit`). Rows are divided among ranks by their
        work. The step has the same examples and draws, so losses and gradients are the same as without packing. A rank
        without a packed row gets a batch of padding.

    Raises DataError if there are fewer examples than ranks.
    """
    order_of_slots, groups, example_of = _share(examples, order, collator, step, rank, world, pack)
    slots = sorted(slot for row in groups for slot in row)
    rows = collator.rows(
        [example_of(slot) for slot in slots],
        epoch=[order_of_slots[slot][0] for slot in slots],
        step=step,
        slots=slots,
        total_slots=len(order_of_slots),
    )
    row_of = dict(zip(slots, rows, strict=True))
    laid_out = [row_of[row[0]] if len(row) == 1 else joined([row_of[slot] for slot in row]) for row in groups]
    laid_out = laid_out or [PADDING_ROW]
    size = micro_batch_size or len(laid_out)
    if len(laid_out) > size:  # less padding; the largest first, so that memory peaks early
        laid_out.sort(key=lambda row: -len(row.tokens) - len(row.canvases) * collator.canvas_length)
    return [collator.lay_out(laid_out[first : first + size]) for first in range(0, len(laid_out), size)]


def begin_images(
    examples: Sequence[Example], order: AnyOrder, collator: Collator, step: int, rank: int, world: int, pack: int | None
) -> None:
    """Begin to read the images that `micro_batches` needs for an optimiser step, while an earlier step runs."""
    if collator.reader is not None:
        with suppress(DataError):  # which `micro_batches` raises again
            _, groups, example_of = _share(examples, order, collator, step, rank, world, pack)
            collator.begin([example_of(slot) for slot in sorted(slot for row in groups for slot in row)])


def _share(
    examples: Sequence[Example], order: AnyOrder, collator: Collator, step: int, rank: int, world: int, pack: int | None
) -> tuple[list[tuple[int, int]], list[list[int]], Callable[[int], Example]]:
    """Divide an optimiser step among ranks.

    Returns the (epoch, index) of every slot, the slots of each row of this rank, and a function from slot to example.
    """
    order_of_slots = order(step)
    total = len(order_of_slots)
    lengths: Sequence[int] | NDArray[np.int64] | None = getattr(examples, "lengths", None)
    if total < world:
        raise DataError(f"train.batch_size: {total} is less than {world} processes; raise it")

    @cache  # each is read once, in the order of the slots, because a stream cannot go back
    def example_of(slot: int) -> Example:
        return examples[order_of_slots[slot][1]]

    def length_of(slot: int) -> int:
        return len(example_of(slot).tokens) if lengths is None else int(lengths[order_of_slots[slot][1]])

    if pack is None:
        groups = [[slot] for slot in rank_slots(rank, world, total)]
    else:
        tokens = [length_of(slot) for slot in range(total)]
        packed = best_fit(tokens, pack)
        work = [sum(tokens[slot] + collator.canvas_tokens(tokens[slot]) for slot in row) for row in packed]
        groups = [packed[row] for row in deal(work, world)[rank]]
    return order_of_slots, groups, example_of


def heldout_batches(
    examples: Sequence[Example], collator: Collator, batch_size: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """Yield one rank's batches of the held-out examples. Canvases, noise levels and coins are always the same."""
    slots = rank_slots(rank, world, len(examples))
    parts = [slots[start : start + batch_size] for start in range(0, len(slots), batch_size)]
    for number, part in enumerate(parts):
        rows = collator.rows(
            [examples[slot] for slot in part],
            epoch=HELDOUT_STEP,
            step=HELDOUT_STEP,
            slots=part,
            total_slots=len(examples),
        )
        if collator.reader is not None:
            collator.begin([examples[slot] for slot in chain.from_iterable(parts[number + 1 : number + 2])])
        yield collator.lay_out(rows)
