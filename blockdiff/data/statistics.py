"""Counts of the rows of a source that were read, cut and left out, as numbers and as one printable line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blockdiff.canvas import cut
from blockdiff.data.alterations import WORDS
from blockdiff.errors import DataError
from blockdiff.terminal import counted

MOST = 10  # bad rows whose reasons are kept, and unread keys that are named
MOST_KEYS = 200  # unread keys that are kept
NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass
class Statistics:
    """Counts over the rows of one source, made while they are encoded; tokens are those of the rows that stay.

    `dropped` rows were too long (or had no room for a canvas within max_length), the first of them at `first_dropped`
    (file and line, without its directory). `bad` rows cannot be used, for the reasons in `first_bad`. `truncated` ones
    were cut at a canvas boundary and lost `cut_tokens`. Canvases that are `aligned` begin at multiples of their length,
    and `pinned_tokens` of their places stand before a response. `clean_tokens` are in rows (prompts too),
    `response_tokens` in responses, and `image_tokens` stand for `images`. Of the `conversations` among the rows,
    `unscored_turns` of the assistant are context only. Those from `stripped` on say what became of messages
    (`blockdiff.data.alterations.WORDS`), and how many rows spell control tokens.
    """

    canvas_length: int
    aligned: bool = False
    rows: int = 0
    dropped: int = 0
    first_dropped: str = ""
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    truncated: int = 0
    cut_tokens: int = 0
    responses: int = 0
    canvases: int = 0
    pinned_tokens: int = 0
    response_tokens: int = 0
    clean_tokens: int = 0
    longest: int = 0
    images: int = 0
    image_tokens: int = 0
    conversations: int = 0
    unscored_turns: int = 0
    stripped: int = 0
    glued: int = 0
    moved: int = 0
    thought: int = 0
    untold: int = 0
    unreasoned: int = 0
    bare: int = 0
    endless: int = 0
    misplaced: int = 0
    unanswered: int = 0
    spelt: int = 0
    unread: list[str] = field(default_factory=list)

    def count_row(
        self,
        is_conversation: bool,
        unscored_turns: int,
        changes: Mapping[str, int] = NOTHING,
        unread: Iterable[str] = (),
    ) -> None:
        """Count a row, whether it stays or not, its unread keys, and what was altered by the keys of `WORDS`."""
        self.rows += 1
        self.conversations += is_conversation
        self.unscored_turns += unscored_turns
        self.count_unread(unread)
        for name, count in changes.items():
            setattr(self, name, getattr(self, name) + count)

    def count_unread(self, keys: Iterable[str]) -> None:
        """Keep the names of keys that nothing reads, some hundreds of them at most."""
        new = sorted({*keys} - {*self.unread})[: MOST_KEYS - len(self.unread)]
        self.unread = sorted([*self.unread, *new]) if new else self.unread

    @property
    def unread_keys(self) -> str:
        """The keys that nothing reads, in words; empty where there are none."""
        if not self.unread:
            return ""
        more = len(self.unread) - MOST
        listed = ", ".join([*self.unread[:MOST], *[f"{more:,} more"] * (more > 0)])
        return f"{counted(len(self.unread), 'key')} {'is' if len(self.unread) == 1 else 'are'} not read: {listed}"

    def count_dropped(self, where: str) -> None:
        """Count a row that is left out; `where` is its file and line."""
        self.dropped += 1
        self.first_dropped = self.first_dropped or Path(where).name

    def count_bad(self, error: DataError) -> None:
        """Count a row that cannot be used; the reasons of the first ten are kept."""
        self.bad += 1
        self.first_bad = [*self.first_bad, str(error)][:MOST]

    @property
    def bad_rows(self) -> str:
        """The rows that cannot be used, in words: the first ten, each reason once, and the number of the others."""
        places: dict[tuple[str, str], list[str]] = {}
        for text in self.first_bad:  # "file:17: reason", where "row 17" may stand for "17"
            where, _, reason = text.partition(": ")
            file, _, place = where.rpartition(":")
            places.setdefault((file, reason), []).append(place)
        reasons = [
            f"{file}:{', '.join([its[0], *(place.removeprefix('row ') for place in its[1:])])}: {reason}"
            for (file, reason), its in places.items()
        ]
        more = self.bad - len(self.first_bad)
        listed = " | ".join([*reasons, *[f"{more:,} more"] * (more > 0)])
        return listed if self.bad == 1 else f"{self.bad:,} rows cannot be used: {listed}"

    def count_example(
        self, tokens: list[int], responses: list[tuple[int, int]], images: Sequence[int] = (), *, cut_tokens: int
    ) -> None:
        """Count an example with images of so many tokens, which lost `cut_tokens` to the limit."""
        self.images += len(images)
        self.image_tokens += sum(images)
        self.truncated += cut_tokens > 0
        self.cut_tokens += cut_tokens
        self.responses += len(responses)
        self.clean_tokens += len(tokens)
        self.longest = max(self.longest, len(tokens))
        for start, end in responses:
            self.response_tokens += end - start
            canvases = cut((start, end), self.canvas_length, self.aligned)
            self.canvases += len(canvases)
            self.pinned_tokens += start - canvases[0][0] if canvases else 0

    @property
    def scored_tokens(self) -> int:
        """Canvas positions that are scored when every canvas is: responses and fill."""
        return self.canvases * self.canvas_length - self.pinned_tokens

    @property
    def fill_share(self) -> float:
        """The share of the scored canvas positions that is end-of-sequence fill."""
        return 1 - self.response_tokens / self.scored_tokens if self.canvases else 0.0

    @property
    def examples(self) -> int:
        """The rows that stay."""
        return self.rows - self.dropped

    def __add__(self, other: Statistics) -> Statistics:
        """Both together; the canvas length has to be the same."""
        if self.canvas_length != other.canvas_length:
            raise ValueError(f"canvases of {self.canvas_length} and of {other.canvas_length} do not add up")
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        sums |= {
            "canvas_length": self.canvas_length,
            "aligned": self.aligned,
            "longest": max(self.longest, other.longest),
        }
        firsts = {"first_dropped": self.first_dropped or other.first_dropped, "first_bad": sums["first_bad"][:MOST]}
        firsts["unread"] = sorted({*sums["unread"]})[:MOST_KEYS]
        return Statistics(**sums | firsts)

    def to_record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        derived = {"examples": self.examples, "scored_tokens": self.scored_tokens, "fill_share": self.fill_share}
        return {**asdict(self), **derived}

    @property
    def altered(self) -> str:
        """The changes that were made to messages, in words; empty where they are as they were written."""
        counts = [(words, getattr(self, name)) for name, words in WORDS.items()]
        return ", ".join(words.format(count) for words, count in counts if count)

    def __str__(self) -> str:
        context = f" ({counted(self.unscored_turns, 'assistant turn')} as context only)" if self.unscored_turns else ""
        images = f"{counted(self.images, 'image')} of {counted(self.image_tokens, 'token')}, " if self.images else ""
        canvases = f"{counted(self.canvases, 'canvas')} of {self.canvas_length}, {self.fill_share:.1%} fill, "
        return (
            f"{counted(self.rows, 'row')} ({self.dropped:,} dropped, {self.truncated:,} truncated: "
            f"{counted(self.cut_tokens, 'token')} cut), {counted(self.responses, 'response')}{context}, "
            f"{images}{canvases * (self.canvas_length > 1)}{counted(self.scored_tokens, 'scored token')}, "
            f"longest row {self.longest:,}"
        )
