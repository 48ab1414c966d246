"""Examples that are read during training, for data too large to tokenise or download before."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

from blockdiff.data.chat import Encoder
from blockdiff.data.dataset import Watch, check_conversations, prompt_form, with_total
from blockdiff.data.example import Example
from blockdiff.data.formats import Skip
from blockdiff.data.order import BLOCK, mixture_block, mixture_counts
from blockdiff.data.sources import TRAIN, Files, Source, open_source, titles
from blockdiff.data.statistics import Statistics
from blockdiff.files import piecewise_digest, seal
from blockdiff.seeding import Stream, permutation

FIRST_ROWS = 100  # of each source, which show whether it has conversations


class StreamedExamples:
    """The examples of endless passes over the sources, mixed by weight: `stream[place]`, for rising places from 0.

    Each source has its own epochs, in which every row comes once. An epoch is cut into windows of `shuffle_buffer`
    examples (the last one may be shorter), each in a random order keyed by seed, source, epoch and window. So the
    example at a place depends only on the data, the options and the seed. `sample_id` is the place, so a second pass
    over the data has fresh noise.
    At least two windows of each source are kept; for earlier places the source is read from the start again. The run
    waits for the first window that it needs of a source, so examples up to the window's end pass through `watch`.
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
        self.encoder, self.seed = encoder, seed
        self._titles = titles(sources)
        self._passes = [
            _Pass(source, encoder, shuffle_buffer, (seed, number), watch) for number, source in enumerate(sources)
        ]
        self._counts = mixture_counts([source.weight for source in sources])
        self._is_checked = False

    def __getitem__(self, place: int) -> Example:
        block, inside = divmod(place, BLOCK)
        source, rank = mixture_block(self.seed, block, self._counts)[inside].tolist()
        example = self._passes[source].example(block * self._counts[source] + rank)
        if not self._is_checked and all(each.statistics.rows for each in self._passes):
            self._is_checked = True
            if not any(each.has_jumped for each in self._passes):  # a resumed run has checked the rows before
                check_conversations(self.encoder, self.statistics[-1][1].conversations > 0)
        return replace(example, sample_id=place, tokens=list(example.tokens))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the options that decide the examples. A run can only be resumed with the same.

        For the sources these are weights, columns, subsets, splits, and ids on the Hub. Paths and contents of files are
        left out (see `content`), so that a row that ended a run may be corrected before it is resumed.
        """
        text = "\n".join([self.encoder.fingerprint, *(each.options for each in self._passes)])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def content(self) -> list[str]:
        """Return a digest of the rows of each source: of the bytes of its files, or of its rows in memory.

        For a data set on the Hub it is a digest of its name and revision.
        """
        return [each.content() for each in self._passes]

    @property
    def has_conversations(self) -> bool:
        """True if the first rows of a source teach the model the format of the chat template."""
        return self.form != "raw"

    @cached_property
    def form(self) -> Literal["raw", "chat"] | None:
        """The form of the prompts in the first rows of every source: raw text, conversations, or None for both."""
        if self.encoder.chat:
            return "chat"
        return prompt_form(self.first_rows.conversations, self.first_rows.rows)

    @property
    def unread_keys(self) -> str:
        """A line about keys of the first rows that nothing reads; empty if there are none."""
        return self.first_rows.unread_keys

    @cached_property
    def first_rows(self) -> Statistics:
        """Counts of conversations and of unread keys among the first rows of every source."""
        statistics, bad = Statistics(1), Statistics(1) if self.encoder.skips_bad_rows else None
        for row in chain.from_iterable(islice(each.opened.rows(counts=bad), FIRST_ROWS) for each in self._passes):
            statistics.count_row(row.messages is not None, unscored_turns=0, unread=row.unread)
        return statistics

    @property
    def statistics(self) -> list[tuple[str, Statistics]]:
        """The statistics of the rows read so far, as in `Dataset`. Rows of repeated passes count again."""
        return with_total(self._titles, [each.statistics for each in self._passes])


class _Pass:
    """One source, read again and again in windows. address: the seed and the source's number, which key its draws."""

    def __init__(self, source: Source, encoder: Encoder, size: int, address: tuple[int, int], watch: Watch) -> None:
        self.source, self.encoder = source.with_defaults(TRAIN, {}), encoder
        self.size, self.address, self._watch = size, address, watch
        self.opened = open_source(source, streaming=True)
        self.statistics = Statistics(encoder.canvas_length, encoder.aligned)
        self.has_jumped = False
        self._length = 0  # examples of an epoch; 0 until one has been read to its end
        self._restart()

    @property
    def options(self) -> str:
        """The options that decide how its rows are chosen and read, independent of the paths of files."""
        source = self.source
        name = None if isinstance(self.opened, Files) else source.path
        return repr((name, source.subset, source.split, sorted((source.columns or {}).items()), source.weight))

    def content(self) -> str:
        """Return a digest of its rows, independent of the paths of files."""
        if isinstance(self.opened, Files):
            return seal([piecewise_digest(path) for path in self.opened.paths])
        return self.opened.fingerprint()

    def example(self, number: int) -> Example:
        """Return the example with this number, counted from 0 through all epochs."""
        if number < self._first:
            self._restart()
        if number >= self._next:
            self._reach(number)
            self._watch = _unwatched
        first, examples = next(window for window in reversed(self._windows) if window[0] <= number)
        return examples[number - first]

    @property
    def _first(self) -> int:
        """The number of the first example in memory, or else of the next one."""
        return self._windows[0][0] if self._windows else self._next

    def _restart(self) -> None:
        """Drop all windows and go back to the first row."""
        self._examples: Iterator[Example] | None = None
        self._windows: list[tuple[int, list[Example]]] = []  # the number of the first, and the examples of each
        self._epoch = 0
        self._epoch_begin = self._next = 0  # the numbers with which the epoch and the next window begin

    def _reach(self, number: int) -> None:
        """Read until the example with this number is in memory, skipping earlier epochs and windows."""
        is_each_row = self.encoder.max_length is None and not self.encoder.skips_bad_rows
        if not self._next and number >= self.size and is_each_row and self._examples is None:
            self._jump(number)
        while number >= self._next:
            if self._examples is None:
                whole = (number - self._next) // self._length if self._length else 0
                self._begin(self._epoch + whole, self._next + whole * self._length)
                rows = self.opened.rows(counts=self.statistics if self.encoder.skips_bad_rows else None)
                self._examples = self.encoder.examples(rows, self.statistics)
            self._read_window()

    def _jump(self, number: int) -> None:
        """Go to the window of an example without reading earlier rows. Every row must become one example."""
        epoch, start = 0, number // self.size * self.size
        skip = Skip(start)
        rows = self.opened.rows(skip)
        first = next(rows, None)
        if first is None:  # the epoch is over, so its length is known: skip whole epochs
            self._length = start - skip.remaining
            epoch, inside = divmod(number, self._length)
            start = inside // self.size * self.size
            rows = self.opened.rows(Skip(start))
            first = next(rows)
        self.has_jumped = True
        self._begin(epoch, epoch * self._length)
        self._next += start
        self._examples = self.encoder.examples(chain([first], rows), self.statistics)

    def _begin(self, epoch: int, number: int) -> None:
        """Go to the beginning of an epoch, whose first example has this number."""
        if number != self._next:
            self._windows = []
        self._epoch, self._epoch_begin, self._next = epoch, number, number

    def _read_window(self) -> None:
        assert self._examples is not None
        taken = list(self._watch(islice(self._examples, self.size)))
        if not taken:
            if self._next == self._epoch_begin:
                raise self.encoder.nothing_left(self.statistics.rows, self.opened.files[0])
            self._examples, self._length = None, self._next - self._epoch_begin
            self._epoch += 1
            self._epoch_begin = self._next
            return
        seed, source = self.address
        window = (self._next - self._epoch_begin) // self.size
        order = permutation(seed, Stream.WINDOW, (source, self._epoch, window), len(taken)).tolist()
        # Arrays of machine integers: a window is many examples, and Python's integers need eight times the memory.
        held = [replace(each, tokens=array("i", each.tokens)) for each in taken]
        self._windows.append((self._next, [held[number] for number in order]))
        self._next += len(taken)
        while len(self._windows) > 2 and self._next - self._windows[1][0] >= 2 * self.size:
            del self._windows[0]  # a global batch may need the window before, or many small ones


def _unwatched(examples: Iterator[Any]) -> Iterator[Any]:
    return examples
