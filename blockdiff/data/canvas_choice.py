"""The choice of the canvases of each example that an optimiser step scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from blockdiff.seeding import Stream, uniform

Numbers = Sequence[int]  # one per example


class CanvasChoice(Protocol):
    """The rule that chooses the canvases of examples."""

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """Return the indices of the canvases to score in each example, ascending.

        counts: the number of canvases of each example. seed, epochs, samples: they key the random draws of each
        example, so that a choice does not depend on the batch.
        """

    def most(self, count: int) -> int:
        """Return how many of `count` canvases are chosen."""


class _FixedChoice:
    """A choice that is the same in every epoch."""

    def chosen(self, count: int) -> range:
        """Return the indices of the chosen canvases, of `count` in all."""
        return range(count)

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """Return the indices of the canvases to score in each example: `chosen` of its count."""
        return [list(self.chosen(count)) for count in counts]

    def most(self, count: int) -> int:
        """Return how many of `count` canvases are chosen."""
        return len(self.chosen(count))


@dataclass(frozen=True)
class AllCanvases(_FixedChoice):
    """All canvases of an example."""


@dataclass(frozen=True)
class NoCanvases(_FixedChoice):
    """No canvases, for causal models, which only learn next tokens."""

    def chosen(self, count: int) -> range:
        """An empty range."""
        return range(0)


@dataclass(frozen=True)
class FirstCanvases(_FixedChoice):
    """The first `count` canvases of an example, or all if it has fewer."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of canvases should be at least 1 (got {self.count})")

    def chosen(self, count: int) -> range:
        """Return the first indices below `count`."""
        return range(min(self.count, count))


@dataclass(frozen=True)
class LastCanvases(FirstCanvases):
    """The last `count` canvases of an example, or all if it has fewer."""

    def chosen(self, count: int) -> range:
        """Return the last indices below `count`."""
        return range(max(0, count - self.count), count)


@dataclass(frozen=True)
class RandomCanvases(FirstCanvases):
    """`count` random canvases of an example, or all if it has fewer, drawn again in every epoch."""

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """Choose the canvases with the smallest random keys. Nothing is drawn if no example has more than `count`."""
        if max(counts) <= self.count:
            return super().choose(counts, seed, epochs, samples)
        address = (torch.tensor(epochs), torch.tensor(samples))
        keys = uniform(seed, Stream.CANVAS_CHOICE, address, max(counts)).tolist()
        return [
            sorted(sorted(range(count), key=of_example.__getitem__)[: self.count])
            for count, of_example in zip(counts, keys, strict=True)
        ]
