"""Examples read while training goes on, for data that nobody wants to tokenise or hold first."""

from __future__ import annotations

from collections.abc import Sequence

from blockdiff.data.chat import Encoder, Example
from blockdiff.data.plan import SequentialPlan
from blockdiff.data.sources import SourceSpec, rows_of

__all__ = ["SequentialPlan", "Stream"]


class Stream:
    """The examples of endless passes over the sources: `stream[place]`, places in rising order."""

    def __init__(self, sources: Sequence[SourceSpec], encoder: Encoder, shuffle_buffer: int, seed: int) -> None:
        self._examples, self.statistics = encoder.encode([row for source in sources for row in rows_of(source)])

    def __getitem__(self, place: int) -> Example:
        return self._examples[place % len(self._examples)]
