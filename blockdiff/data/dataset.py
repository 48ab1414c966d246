"""From sources to the examples of a run, in memory-mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockdiff.data.chat import Encoder, Example
from blockdiff.data.plan import AnyPlan, MixturePlan, Plan
from blockdiff.data.sources import SourceSpec, rows_of
from blockdiff.data.statistics import Statistics


@dataclass(frozen=True)
class Dataset:
    """The examples of one or more sources, one source after the other.

    `lengths` [N] are tokens per example; `statistics` has a line for each source and, of several, the total;
    `fingerprint` says what the examples were made from and how, wherever the files lie.
    """

    examples: Sequence[Example]
    lengths: NDArray[np.int64]
    statistics: list[tuple[str, Statistics]]
    fingerprint: str
    sizes: list[int]
    weights: list[float]

    def __len__(self) -> int:
        return len(self.examples)


def load_dataset(
    sources: Sequence[SourceSpec],
    encoder: Encoder,
    *,
    cache: Path | None,
    first: AbstractContextManager[object] | None = None,
) -> Dataset:
    """Read, check and encode the rows of every source, or take them from the cache.

    `first` is a context that one process enters before the others, so that only one does the work. Raises
    DataError with file and line for a row that cannot be used.
    """
    with first or nullcontext():
        rows = [row for source in sources for row in rows_of(source)]
        examples, statistics = encoder.encode(rows)
    lengths = np.array([len(example.tokens) for example in examples])
    return Dataset(examples, lengths, [("total", statistics)], "", [len(examples)], [1.0])


def plan(dataset: Dataset, batch_size: int, seed: int) -> AnyPlan:
    """Which examples each optimiser step takes: all in epochs, or a mixture of several sources by weight."""
    if len(dataset.sizes) == 1:
        return Plan(dataset.sizes[0], batch_size, seed)
    return MixturePlan(tuple(dataset.sizes), tuple(dataset.weights), batch_size, seed)
