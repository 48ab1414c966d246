"""Examples read while training goes on, for data that nobody wants to tokenise or download first."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice

import numpy as np

from blockdiff.data.chat import Encoder, Example
from blockdiff.data.dataset import Watch, check_conversations, with_total
from blockdiff.data.formats import Skip
from blockdiff.data.order import BLOCK, mixture_block, mixture_counts
from blockdiff.data.sources import TRAIN, Files, Source, open_source, titles
from blockdiff.data.statistics import Statistics
from blockdiff.files import piecewise_digest, seal
from blockdiff.seeding import Stream, permutation

WINDOWS = 2  # kept, for a global batch may reach over the edge of one
FIRST_ROWS = 100  # of each source, by which a stream knows whether it has conversations


class StreamedExamples:
    """The examples of endless passes over the sources, mixed by weight: `stream[place]`, places from 0 in rising order.

    Places form windows of `shuffle_buffer` examples, each in a random order of its own (address: the window), so what
    stands at a place depends on nothing but the data, the options and the seed. `sample_id` is the running number of
    an example, so a second pass over the data has fresh noise. Places in a window before the last two are
    reached by reading from the start again. The examples up to the end of the first window that is asked for, which a
    run waits for, pass through `watch`.
    """

    summary = "read while training goes on"

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        shuffle_buffer: int,
        seed: int,
        watch: Watch = lambda examples: examples,
    ) -> None:
        self.encoder, self.shuffle_buffer, self.seed, self._watch = encoder, shuffle_buffer, seed, watch
        self._titles = titles(sources)
        self._passes = [_Pass(source, encoder) for source in sources]
        self._counts = mixture_counts([source.weight for source in sources])
        self._windows: dict[int, list[Example]] = {}
        self._next = 0  # the running number of the example that is read next

    def __getitem__(self, place: int) -> Example:
        window, inside = divmod(place, self.shuffle_buffer)
        if window not in self._windows:
            self._read(window)
        example = self._windows[window][inside]
        return replace(example, tokens=list(example.tokens))

    @cached_property
    def fingerprint(self) -> str:
        """The options that examples are made with, by which a run to resume is known.

        Of the sources: weights, columns, subsets, splits, and the ids of those on the hub. Neither where files lie
        nor what is in them (`content`): a row that ended a run may be corrected before it goes on.
        """
        text = "\n".join([self.encoder.fingerprint, *(each.options for each in self._passes)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def content(self) -> list[str]:
        """A digest of the rows of each source: of the bytes of its files, or of its rows in memory.

        Of a data set on the hub it is that of the name and the revision.
        """
        return [each.content() for each in self._passes]

    @cached_property
    def has_conversations(self) -> bool:
        """True where the first rows of a source teach the model the format of the chat template."""
        counts = Statistics(1) if self.encoder.skips_bad_rows else None
        rows = chain.from_iterable(islice(each.opened.rows(counts=counts), FIRST_ROWS) for each in self._passes)
        return self.encoder.chat or any(row.messages is not None for row in rows)

    @property
    def statistics(self) -> list[tuple[str, Statistics]]:
        """The statistics of the rows read so far (repeated passes count again), as in `Dataset`."""
        return with_total(self._titles, [each.statistics for each in self._passes])

    def _read(self, window: int) -> None:
        first = window * self.shuffle_buffer
        if first < self._next:
            self._next = 0
            for each in self._passes:
                each.restart()
        watch = (lambda examples: examples) if self._windows else self._watch
        for source, each in enumerate(self._passes):
            each.skip(self._given(source, first) - self._given(source, self._next), watch)
        self._next = first
        taken = list(watch(self._take() for _ in range(self.shuffle_buffer)))
        order = permutation(self.seed, Stream.WINDOW, (window,), self.shuffle_buffer).tolist()
        self._windows[window] = [taken[number] for number in order]
        for old in list(self._windows)[:-WINDOWS]:  # the ones that were read first
            del self._windows[old]
        if not window:  # a restart further on has not seen the rows before, which were enough for the run so far
            check_conversations(self.encoder, self.statistics[-1][1].conversations > 0)

    def _given(self, source: int, number: int) -> int:
        """The number of examples before `number` that come from a source."""
        blocks, rest = divmod(number, BLOCK)
        inside = mixture_block(self.seed, blocks, self._counts)[:rest, 0] == source
        return blocks * self._counts[source] + int(np.count_nonzero(inside))

    def _take(self) -> Example:
        block, inside = divmod(self._next, BLOCK)
        source = int(mixture_block(self.seed, block, self._counts)[inside, 0])
        example = next(self._passes[source])
        # Held as machine integers: a window is many examples, and Python integers are eight times as large.
        compact = replace(example, sample_id=self._next, tokens=array("i", example.tokens))  # type: ignore[arg-type]
        self._next += 1
        return compact


class _Pass:
    """One source, read again and again."""

    def __init__(self, source: Source, encoder: Encoder) -> None:
        self.source, self.encoder = source.with_defaults(TRAIN, {}), encoder
        self.opened = open_source(source, streaming=True)
        self.statistics = Statistics(encoder.canvas_length)
        self.restart()

    @property
    def options(self) -> str:
        """The options by which its rows are chosen and read, the same wherever files lie."""
        source = self.source
        name = None if isinstance(self.opened, Files) else source.path
        return repr((name, source.subset, source.split, sorted((source.columns or {}).items()), source.weight))

    def content(self) -> str:
        """A digest of its rows, wherever they lie."""
        if isinstance(self.opened, Files):
            return seal([piecewise_digest(path) for path in self.opened.paths])
        return self.opened.fingerprint()

    def restart(self) -> None:
        """Begin again with the first row."""
        self._examples: Iterator[Example] | None = None

    def __next__(self) -> Example:
        while True:
            is_whole_pass = self._examples is None
            if self._examples is None:
                self._examples = self.encoder.examples(self.opened.rows(counts=self._counts), self.statistics)
            example = next(self._examples, None)
            if example is not None:
                return example
            if is_whole_pass:
                raise self.encoder.nothing_left(self.statistics.rows, self.opened.files[0])
            self._examples = None

    @property
    def _counts(self) -> Statistics | None:
        """Where bad rows are counted; None: the first one is an error."""
        return self.statistics if self.encoder.skips_bad_rows else None

    def skip(self, count: int, watch: Watch) -> None:
        """Pass over `count` examples: without looking at the rows where each is sure to become an example."""
        if self._examples is None and self.encoder.max_length is None and not self.encoder.skips_bad_rows:
            skip = Skip(count)
            while self._examples is None:
                before, rows = skip.left, self.opened.rows(skip)
                first = next(rows, None)
                if first is not None:
                    self._examples = self.encoder.examples(chain([first], rows), self.statistics)
                else:  # a whole pass was skipped, and so can be all the others
                    skip.left %= before - skip.left
            return
        for _ in watch(islice(iter(self.__next__, None), count)):
            pass
