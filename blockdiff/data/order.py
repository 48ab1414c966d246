"""Orders of examples, as functions of the optimiser step, so that a resumed run needs no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from blockdiff.seeding import Stream, permutation

BLOCK = 10_000  # positions of a mixture in which every source has exactly its share
EPOCHS = 2  # of each source whose orders are cached, because a global batch may contain parts of two

# `order(step)` returns (epoch, index of the example) for every slot of the global batch of `step`, counted from 1.
AnyOrder = Callable[[int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Order:
    """Epochs of one source, each in a random order, or a mixture of several sources. Every step has a whole batch.

    examples: the number of examples, of each source if there are several.
    weights: the shares of the sources in the mixture.

    The positions of a run form blocks of 10,000. In each block a source has its exact share (to 1 in 10,000, at least
    one position), in a random order of the block. The n-th position of a source is therefore known without state. Each
    source has its own epochs: a small or heavy one starts the next epoch earlier.
    """

    examples: int | Sequence[int]
    batch_size: int
    seed: int
    weights: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        if len(self._sizes) != len(self.weights):
            raise ValueError(f"{len(self._sizes)} sources of examples, but {len(self.weights)} weights")

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """Return (epoch, index of the example) for every slot of the global batch of `step`, counted from 1."""
        counts = mixture_counts(self.weights)
        starts = np.cumsum([0, *self._sizes])
        slots = []
        for position in range((step - 1) * self.batch_size, step * self.batch_size):
            block, inside = divmod(position, BLOCK)
            source, rank = mixture_block(self.seed, block, counts)[inside].tolist()
            epoch, turn = divmod(block * counts[source] + rank, self._sizes[source])
            slots.append((epoch, int(starts[source] + self._orders[source](epoch)[turn])))
        return slots

    @property
    def _sizes(self) -> Sequence[int]:
        return (self.examples,) if isinstance(self.examples, int) else self.examples

    @cached_property
    def _orders(self) -> list[Callable[[int], NDArray[np.int64]]]:
        """For each source, a function from epoch to the order of its examples [examples]."""
        return [lru_cache(EPOCHS)(partial(self._order, source)) for source in range(len(self._sizes))]

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        return permutation(self.seed, Stream.ORDER, (epoch, source), self._sizes[source]).numpy()


@dataclass(frozen=True)
class StreamOrder:
    """The order of a stream, which shuffles and repeats its examples itself."""

    batch_size: int

    def __call__(self, step: int) -> list[tuple[int, int]]:
        """Return (0, position in the stream) for every slot of the global batch of `step`, counted from 1."""
        return [(0, position) for position in range((step - 1) * self.batch_size, step * self.batch_size)]


def mixture_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """The number of positions of each source in a block: proportional by largest remainder, at least one."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for turn in range(BLOCK - sum(counts)):
        counts[by_remainder[turn % len(counts)]] += 1
    while sum(counts) > BLOCK:  # sources with a share of less than one position take it from the largest
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@lru_cache(maxsize=4)
def mixture_block(seed: int, block: int, counts: tuple[int, ...]) -> NDArray[np.int64]:
    """For every position of a block, its source and its rank among the source's positions there: [positions, 2]."""
    order = permutation(seed, Stream.MIXTURE, (block,), sum(counts)).numpy()
    sources = np.repeat(np.arange(len(counts)), counts)[order]
    ranks = np.empty_like(sources)
    for source, count in enumerate(counts):
        ranks[sources == source] = np.arange(count)
    return np.stack((sources, ranks), 1)
