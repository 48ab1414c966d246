"""Examples read while training goes on, for data that nobody wants to tokenise or download first."""

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

FIRST_ROWS = 100  # of each source, by which a stream knows whether it has conversations


class StreamedExamples:
    """The examples of endless passes over the sources, mixed by weight: `stream[place]`, places from 0 in rising order.

    Each source goes through epochs of its own, in which every row comes once. An epoch forms windows of
    `shuffle_buffer` examples, the last one of what is left, each in a random order of its own (address: source, epoch,
    window); so what stands at a place depends on nothing but the data, the options and the seed. `sample_id` is the
    place, so a second pass over the data has fresh noise. Places before those that are kept, two windows of each source
    at least, are reached by reading from the start again. The examples up to the end of the first window of a source
    that is asked for, which a run waits for, pass through `watch`.
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
            if not any(each.has_jumped for each in self._passes):  # the rows before were enough for the run so far
                check_conversations(self.encoder, self.statistics[-1][1].conversations > 0)
        return replace(example, sample_id=place, tokens=list(example.tokens))

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

    @property
    def has_conversations(self) -> bool:
        """True where the first rows of a source teach the model the format of the chat template."""
        return self.form != "raw"

    @cached_property
    def form(self) -> Literal["raw", "chat"] | None:
        """The form of the prompts of the first rows of every source: raw text, conversations, or None for both."""
        if self.encoder.chat:
            return "chat"
        return prompt_form(self.first_rows.conversations, self.first_rows.rows)

    @property
    def unread_keys(self) -> str:
        """The keys of the first rows that nothing reads, in words; empty without any."""
        return self.first_rows.unread_keys

    @cached_property
    def first_rows(self) -> Statistics:
        """The counts of conversations and of unread keys among the first rows of every source."""
        found, bad = Statistics(1), Statistics(1) if self.encoder.skips_bad_rows else None
        for row in chain.from_iterable(islice(each.opened.rows(counts=bad), FIRST_ROWS) for each in self._passes):
            found.count_row(row.messages is not None, unscored_turns=0, unread=row.unread)
        return found

    @property
    def statistics(self) -> list[tuple[str, Statistics]]:
        """The statistics of the rows read so far (repeated passes count again), as in `Dataset`."""
        return with_total(self._titles, [each.statistics for each in self._passes])


class _Pass:
    """One source, read again and again in windows; `address` begins that of its draws: the seed and its number."""

    def __init__(self, source: Source, encoder: Encoder, size: int, address: tuple[int, int], watch: Watch) -> None:
        self.source, self.encoder = source.with_defaults(TRAIN, {}), encoder
        self.size, self.address, self._watch = size, address, watch
        self.opened = open_source(source, streaming=True)
        self.statistics = Statistics(encoder.canvas_length, encoder.aligned)
        self.has_jumped = False
        self._length = 0  # examples of an epoch, once one has been read to its end
        self._restart()

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

    def example(self, number: int) -> Example:
        """The example of this number, counted from 0 through all epochs."""
        if number < self._first:
            self._restart()
        if number >= self._next:
            self._reach(number)
            self._watch = _unwatched
        first, examples = next(window for window in reversed(self._windows) if window[0] <= number)
        return examples[number - first]

    @property
    def _first(self) -> int:
        """The number of the first example that is kept, or that comes next."""
        return self._windows[0][0] if self._windows else self._next

    def _restart(self) -> None:
        """Begin again with the first row."""
        self._examples: Iterator[Example] | None = None
        self._windows: list[tuple[int, list[Example]]] = []  # the number of the first, and the examples of each
        self._epoch = 0
        self._epoch_begin = self._next = 0  # the numbers with which the epoch and the next window begin

    def _reach(self, number: int) -> None:
        """Read on until there is an example of this number; epochs and windows before it are passed over."""
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
        """Go to the window of an example without looking at rows, each of which is sure to become an example."""
        epoch, at = 0, number // self.size * self.size
        skip = Skip(at)
        rows = self.opened.rows(skip)
        first = next(rows, None)
        if first is None:  # a whole epoch was passed over, and so can be all the others
            self._length = at - skip.remaining
            epoch, inside = divmod(number, self._length)
            at = inside // self.size * self.size
            rows = self.opened.rows(Skip(at))
            first = next(rows)
        self.has_jumped = True
        self._begin(epoch, epoch * self._length)
        self._next += at
        self._examples = self.encoder.examples(chain([first], rows), self.statistics)

    def _begin(self, epoch: int, number: int) -> None:
        """Go to the beginning of an epoch whose first example has this number."""
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
        # Held as machine integers: a window is many examples, and Python integers are eight times as large.
        held = [replace(each, tokens=array("i", each.tokens)) for each in taken]
        self._windows.append((self._next, [held[number] for number in order]))
        self._next += len(taken)
        while len(self._windows) > 2 and self._next - self._windows[1][0] >= 2 * self.size:
            del self._windows[0]  # a global batch may reach over the edge of one, and of many small ones


def _unwatched(examples: Iterator[Any]) -> Iterator[Any]:
    return examples
