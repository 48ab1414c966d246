"""Which examples each optimiser step takes. Every plan is a function of the step, so resuming needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockdiff.seeding import Stream, permutation

BLOCK = 10_000  # places of a mixture in which every source has exactly its share
EPOCHS = 2  # of each source whose orders are kept, for a global batch may reach over the edge of one


class AnyPlan(Protocol):
    """What `plan` returns: `plan(step)` gives (epoch, index of the example) for every slot of the global batch."""

    @property
    def batch_size(self) -> int:
        """Slots of a global batch."""
        ...

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """The slots of optimiser step `step`, counted from 1."""
        ...


class Orders:
    """The orders of a plan's examples in the epochs that were asked for last, of every source."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, NDArray[np.int64]]] = {}

    def of(self, seed: int, epoch: int, source: int, examples: int) -> NDArray[np.int64]:
        """Which example stands at each place of an epoch [examples]."""
        kept = self._kept.setdefault(source, {})
        if epoch not in kept:
            kept[epoch] = permutation(seed, Stream.ORDER, (epoch, source), examples).numpy()
            for old in list(kept)[:-EPOCHS]:  # the ones that were made first
                del kept[old]
        return kept[epoch]


@dataclass(frozen=True)
class Plan:
    """One source, epoch after epoch, each in its own order, no step cut short."""

    examples: int
    batch_size: int
    seed: int
    orders: Orders = field(default_factory=Orders, init=False, repr=False, compare=False)

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """(epoch, index of the example) for every slot of the global batch of `step`, counted from 1."""
        first = (step - 1) * self.batch_size
        places = (divmod(place, self.examples) for place in range(first, first + self.batch_size))
        return [(epoch, int(self.orders.of(self.seed, epoch, 0, self.examples)[place])) for epoch, place in places]


@dataclass(frozen=True)
class MixturePlan:
    """Several sources in proportion to `weights`, each in epochs of its own, all laid one after the other.

    The places of the run form blocks of 10,000; in each a source has its exact share (to 1 in 10,000, at least
    one place), and an order of the block's own says where. So the n-th place of a source is known without
    looking back, and a source that is small or heavy starts its next epoch earlier than the others.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    batch_size: int
    seed: int
    orders: Orders = field(default_factory=Orders, init=False, repr=False, compare=False)

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """(epoch of its source, index of the example) for every slot of the global batch of `step`, from 1."""
        first = (step - 1) * self.batch_size
        counts = mixture_counts(self.weights)
        starts = np.cumsum((0, *self.sizes))
        slots = []
        for place in range(first, first + self.batch_size):
            block, inside = divmod(place, BLOCK)
            source, rank = mixture_block(self.seed, block, counts)[inside].tolist()
            epoch, at = divmod(block * counts[source] + rank, self.sizes[source])
            order = self.orders.of(self.seed, epoch, source, self.sizes[source])
            slots.append((epoch, int(starts[source] + order[at])))
        return slots


@dataclass(frozen=True)
class SequentialPlan:
    """The examples in the order a stream gives them; the stream shuffles, and its end is the end of no epoch."""

    batch_size: int

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """(0, place in the stream) for every slot of the global batch of `step`, counted from 1."""
        first = (step - 1) * self.batch_size
        return [(0, place) for place in range(first, first + self.batch_size)]


def mixture_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """The places of each source in a block: in proportion to positive weights by largest remainder, at least one."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for turn in range(BLOCK - sum(counts)):
        counts[by_remainder[turn % len(counts)]] += 1
    while sum(counts) > BLOCK:  # sources whose share is less than one place took it from the largest
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@lru_cache(maxsize=4)
def mixture_block(seed: int, block: int, counts: tuple[int, ...]) -> NDArray[np.int64]:
    """For every place of a block its source and its rank among that source's places there: [places, 2]."""
    order = permutation(seed, Stream.MIXTURE, (block,), sum(counts)).numpy()
    sources = np.repeat(np.arange(len(counts)), counts)[order]
    ranks = np.empty_like(sources)
    for source, count in enumerate(counts):
        ranks[sources == source] = np.arange(count)
    return np.stack((sources, ranks), 1)
