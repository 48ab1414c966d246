"""The places rows come from, local files so far, and the order they are read in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from blockdiff.data.rows import Row, read_rows


@dataclass(frozen=True)
class SourceSpec:
    """One source of rows: a file, a directory, a pattern or a hub id.

    `weight` is its part of a mixture, `name` what statistics call it, `subset` and `split` choose within a hub
    data set, `columns` maps prompt, response, messages, system or id to the column that holds it.
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What to call it."""
        return self.name or Path(self.path).name


def rows_of(source: SourceSpec) -> Iterator[Row]:
    """The rows of a source in order; raises DataError "file:line: reason; what to do" at the first bad one."""
    yield from read_rows(source.path)
