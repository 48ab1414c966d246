"""`Statistics`: counts of a source's rows that were read, cut and left out, and the line that reports them."""

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

MAX_NAMED = 10  # bad rows whose reasons are stored, and unread keys that a line names
MAX_KEYS = 200  # unread keys that are stored
NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass
class Statistics:
    """Counts of the rows of one source while they are encoded. Tokens are those of rows that are used.

    dropped: rows that are too long, or without room for a canvas within max_length; first_dropped: the file name and
        line of the first.
    bad: rows that cannot be used; first_bad: the reasons of the first ones.
    truncated: rows that were cut at a canvas boundary; cut_tokens: the tokens that they lost.
    aligned: canvases begin at multiples of their length; pinned_tokens: tokens of canvases before a response.
    clean_tokens: tokens of rows, with prompts; response_tokens: tokens of responses; image_tokens: placeholders.
    conversations: rows that are conversations; unscored_turns: assistant turns that are only context.
    stripped to spelt: messages that the chat template changed, rows that spell control tokens (`alterations.WORDS`).
    unread: keys that nothing reads.
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
        """Count a row, used or not, with its unread keys and its changes by the keys of `WORDS`."""
        self.rows += 1
        self.conversations += is_conversation
        self.unscored_turns += unscored_turns
        self.count_unread(unread)
        for name, count in changes.items():
            setattr(self, name, getattr(self, name) + count)

    def count_unread(self, keys: Iterable[str]) -> None:
        """Store the names of keys that nothing reads, at most MAX_KEYS."""
        new = sorted({*keys} - {*self.unread})[: MAX_KEYS - len(self.unread)]
        self.unread = sorted([*self.unread, *new]) if new else self.unread

    @property
    def unread_keys(self) -> str:
        """A line about the keys that nothing reads; empty if there are none."""
        if not self.unread:
            return ""
        more = len(self.unread) - MAX_NAMED
        listed = ", ".join([*self.unread[:MAX_NAMED], *[f"{more:,} more"] * (more > 0)])
        return f"{counted(len(self.unread), 'key')} {'is' if len(self.unread) == 1 else 'are'} not read: {listed}"

    def count_dropped(self, where: str) -> None:
        """Count a row that is left out. where: its file and line."""
        self.dropped += 1
        self.first_dropped = self.first_dropped or Path(where).name

    def count_bad(self, error: DataError) -> None:
        """Count a row that cannot be used, and store its reason if it is among the first."""
        self.bad += 1
        self.first_bad = [*self.first_bad, str(error)][:MAX_NAMED]

    @property
    def bad_rows(self) -> str:
        """A line about the rows that cannot be used: the first ones, each reason once, and the number of the others."""
        lines_by_reason: dict[tuple[str, str], list[str]] = {}
        for text in self.first_bad:  # "file:17: reason" or "file:row 17: reason"
            where, _, reason = text.partition(": ")
            file, _, line = where.rpartition(":")
            lines_by_reason.setdefault((file, reason), []).append(line)
        reasons = [
            f"{file}:{', '.join([lines[0], *(line.removeprefix('row ') for line in lines[1:])])}: {reason}"
            for (file, reason), lines in lines_by_reason.items()
        ]
        more = self.bad - len(self.first_bad)
        listed = " | ".join([*reasons, *[f"{more:,} more"] * (more > 0)])
        return listed if self.bad == 1 else f"{self.bad:,} rows cannot be used: {listed}"

    def count_example(
        self, tokens: list[int], responses: list[tuple[int, int]], images: Sequence[int] = (), *, cut_tokens: int
    ) -> None:
        """Count an example. images: the tokens of each image. cut_tokens: the tokens that it lost to the limit."""
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
        """The canvas positions that are scored if all canvases are: responses and fill."""
        return self.canvases * self.canvas_length - self.pinned_tokens

    @property
    def fill_share(self) -> float:
        """The share of the scored canvas positions that is end-of-sequence fill."""
        return 1 - self.response_tokens / self.scored_tokens if self.canvases else 0.0

    @property
    def examples(self) -> int:
        """The number of rows that were not dropped."""
        return self.rows - self.dropped

    def __add__(self, other: Statistics) -> Statistics:
        """Add the counts of two sources with the same canvas length."""
        if self.canvas_length != other.canvas_length:
            raise ValueError(f"canvas lengths {self.canvas_length} and {other.canvas_length} differ")
        sums = {name: value + getattr(other, name) for name, value in asdict(self).items()}
        sums |= {
            "canvas_length": self.canvas_length,
            "aligned": self.aligned,
            "longest": max(self.longest, other.longest),
        }
        firsts = {
            "first_dropped": self.first_dropped or other.first_dropped,
            "first_bad": sums["first_bad"][:MAX_NAMED],
        }
        firsts["unread"] = sorted({*sums["unread"]})[:MAX_KEYS]
        return Statistics(**sums | firsts)

    def to_record(self) -> dict[str, Any]:
        """All counts, as JSON values."""
        derived = {"examples": self.examples, "scored_tokens": self.scored_tokens, "fill_share": self.fill_share}
        return {**asdict(self), **derived}

    @property
    def altered(self) -> str:
        """A line about the changes that were made to messages; empty if there are none."""
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
