"""Orders of examples: an order is a function of the optimiser step, so resuming needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from blockdiff.seeding import Stream, permutation

BLOCK = 10_000  # places of a mixture in which every source has exactly its share
EPOCHS = 2  # of each source whose orders are kept, for a global batch may reach over the edge of one

# `order(step)` gives (epoch, index of the example) for every slot of the global batch of `step`, counted from 1.
AnyOrder = Callable[[int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Order:
    """Epoch after epoch of one source, each in its own order, or a mixture of several; no step is cut short.

    `examples` says how many there are, of several sources one after the other how many of each; those are mixed in
    proportion to `weights`, each in epochs of its own. The places of the run form blocks of 10,000; in each a source
    has its exact share (to 1 in 10,000, at least one place), and an order of the block's own says where. So the n-th
    place of a source is known without looking back, and a source that is small or heavy starts its next epoch earlier
    than the others.
    """

    examples: int | Sequence[int]
    batch_size: int
    seed: int
    weights: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        if len(self._sizes) != len(self.weights):
            raise ValueError(f"{len(self._sizes)} sources of examples, but {len(self.weights)} weights")

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """(epoch, index of the example) for every slot of the global batch of `step`, counted from 1."""
        counts = mixture_counts(self.weights)
        starts = np.cumsum([0, *self._sizes])
        slots = []
        for place in range((step - 1) * self.batch_size, step * self.batch_size):
            block, inside = divmod(place, BLOCK)
            source, rank = mixture_block(self.seed, block, counts)[inside].tolist()
            epoch, at = divmod(block * counts[source] + rank, self._sizes[source])
            slots.append((epoch, int(starts[source] + self._orders[source](epoch)[at])))
        return slots

    @property
    def _sizes(self) -> Sequence[int]:
        return (self.examples,) if isinstance(self.examples, int) else self.examples

    @cached_property
    def _orders(self) -> list[Callable[[int], NDArray[np.int64]]]:
        """For each source which example stands at each place of an epoch [examples]."""
        return [lru_cache(EPOCHS)(partial(self._order, source)) for source in range(len(self._sizes))]

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        return permutation(self.seed, Stream.ORDER, (epoch, source), self._sizes[source]).numpy()


@dataclass(frozen=True)
class StreamOrder:
    """The examples in the order a stream gives them; the stream shuffles, and its end is the end of no epoch."""

    batch_size: int

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """(0, place in the stream) for every slot of the global batch of `step`, counted from 1."""
        return [(0, place) for place in range((step - 1) * self.batch_size, step * self.batch_size)]


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
