"""The examples of a run's sources: rows are read, checked and encoded once, then mapped from disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from blockdiff.data.cache import cache_key, cached, temporary
from blockdiff.data.chat import Encoder
from blockdiff.data.examples import Examples, write_examples
from blockdiff.data.sources import OpenedSource, Source, open_source, titles
from blockdiff.data.statistics import Statistics
from blockdiff.errors import DataError

TOTAL = "total"
QUANTILES = (0.5, 0.9, 0.99, 1.0)
Watch = Callable[[Iterator[Any]], Iterator[Any]]  # yields rows unchanged, and may show how many there were


def prompt_form(conversations: int, rows: int) -> Literal["raw", "chat"] | None:
    """Return the form of prompts if `conversations` of `rows` rows are conversations; None if there are both forms."""
    if not 0 < conversations < rows:
        return "chat" if conversations else "raw"
    return None


@dataclass(frozen=True)
class Dataset:
    """The examples of one or more sources, one source after the other.

    statistics: an entry for each source and, if there are several, the total.
    fingerprint: a hash of the rows and of the options that encode them, independent of the paths of files.
    sizes, weights: the number of examples of each source, and its share of the mixture.
    """

    examples: Examples
    statistics: list[tuple[str, Statistics]]
    fingerprint: str
    sizes: list[int]
    weights: list[float]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per example [N]."""
        return self.examples.lengths

    @property
    def total(self) -> Statistics:
        """The sum of the statistics of all sources."""
        return self.statistics[-1][1]

    @property
    def has_conversations(self) -> bool:
        """True if at least one row teaches the model the format of the chat template."""
        return self.total.conversations > 0

    @property
    def form(self) -> Literal["raw", "chat"] | None:
        """The form of the prompts: raw text, conversations, or None if there are both."""
        return prompt_form(self.total.conversations, self.total.rows)

    def to_record(self) -> dict[str, Any]:
        """Return numbers about the data for JSON: counts, shares and length quantiles of each source, and totals."""
        ends = np.cumsum([0, *self.sizes])
        sources = []
        for index, (name, statistics) in enumerate(self.statistics[: len(self.sizes)]):
            tokens = self.lengths[ends[index] : ends[index + 1]]
            lengths = {f"p{100 * q:g}": int(np.quantile(tokens, q, method="inverted_cdf")) for q in QUANTILES}
            share = self.weights[index] / sum(self.weights)
            sources.append({"name": name, "share": share, **statistics.to_record(), "lengths": lengths})
        return {"fingerprint": self.fingerprint, "sources": sources, TOTAL: self.total.to_record()}


def load_dataset(
    sources: Sequence[Source],
    encoder: Encoder,
    *,
    cache: Path | None,
    first: AbstractContextManager[object] | None = None,
    watch: Watch | None = None,
) -> Dataset:
    """Read, check and encode the rows of every source, or take them from the directory `cache`.

    Without `cache` they are written to a temporary file. first: a context that one process enters before the others, so
    that only one fills the cache. watch: an iterator that newly encoded rows pass through. Raises DataError with file
    and line for a row that cannot be used, for a source without usable rows, and for options that need conversations if
    there are none.
    """
    parts: list[tuple[pa.Table, Statistics]] = []
    files, first_ids, hashes = [], [0], []
    with first if first is not None and cache is not None else nullcontext():
        for source in sources:
            opened = open_source(source)
            write = partial(_write, source=opened, encoder=encoder, watch=watch)
            key = cache_key(opened, encoder)
            parts.append(temporary(write) if cache is None else cached(cache, key, write))
            files.append(opened.files)
            first_ids.append(first_ids[-1] + parts[-1][1].rows)
            hashes.append(f"{key} {source.weight!r}")
    tables = [table for table, _ in parts]
    statistics = with_total(titles(sources), [counts for _, counts in parts])
    check_conversations(encoder, statistics[-1][1].conversations > 0)
    return Dataset(
        examples=Examples(tables, files, first_ids[:-1]),
        statistics=statistics,
        fingerprint=hashlib.blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest(),
        sizes=[len(table) for table in tables],
        weights=[source.weight for source in sources],
    )


def _write(file: IO[bytes], source: OpenedSource, encoder: Encoder, watch: Watch | None) -> Statistics:
    statistics = Statistics(encoder.canvas_length, encoder.aligned)
    rows = source.rows(counts=statistics)
    rows = rows if watch is None else watch(rows)
    count = write_examples(file, encoder.examples(rows, statistics, counts_bad=True), source.files)
    if statistics.bad and not (encoder.skips_bad_rows and count):
        is_choice = statistics.bad > 1 and not encoder.skips_bad_rows
        remedy = "; correct them, or set data.on_bad_row: skip" * is_choice
        raise DataError(statistics.bad_rows + ("; no other row is left to learn" if encoder.skips_bad_rows else remedy))
    if not count:
        raise encoder.nothing_left(statistics.rows, source.files[0])
    return statistics


def with_total(names: Sequence[str], found: Sequence[Statistics]) -> list[tuple[str, Statistics]]:
    """Return the statistics of each source by name and, if there are several sources, their sum."""
    total = [(TOTAL, reduce(add, found))] if len(found) > 1 else []
    return [*zip(names, found, strict=True), *total]


def check_conversations(encoder: Encoder, has_conversations: bool) -> None:
    """Raise DataError if no row is a conversation but an option is set that only affects conversations."""
    for key, is_set in (("system", encoder.system is not None), ("thinking", encoder.enable_thinking)):
        if is_set and not has_conversations:
            raise DataError(
                f"data.{key}: is set, but no row is a conversation; write messages rows, or leave data.{key} out"
            )
