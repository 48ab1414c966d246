"""What became of the rows of a source, in numbers and in one printable line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

Span = tuple[int, int]


@dataclass(frozen=True)
class Statistics:
    """Counts over the rows of one source; tokens are those of the rows that stay.

    `dropped` rows were too long (or had no room for a canvas within max_length), `truncated` ones were cut at a
    canvas boundary and lost `cut_tokens`. `clean_tokens` are in rows (prompts too), `response_tokens` in responses.
    Of the `conversations` among the rows, `unscored_turns` of the assistant are context only.
    """

    rows: int
    dropped: int
    truncated: int
    cut_tokens: int
    responses: int
    canvases: int
    response_tokens: int
    clean_tokens: int
    longest: int
    canvas_length: int
    conversations: int = 0
    unscored_turns: int = 0

    @property
    def scored_tokens(self) -> int:
        """Canvas positions that are scored when every canvas is: responses and fill."""
        return self.canvases * self.canvas_length

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
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        sums |= {"longest": max(self.longest, other.longest), "canvas_length": self.canvas_length}
        return Statistics(**sums)

    def counts(self) -> dict[str, int]:
        """What `Statistics(**counts)` is made of again."""
        return asdict(self)

    def to_record(self) -> dict[str, int | float]:
        """All numbers, for JSON."""
        derived = {"examples": self.examples, "scored_tokens": self.scored_tokens, "fill_share": self.fill_share}
        return {**self.counts(), **derived}

    def __str__(self) -> str:
        talk = ""
        if self.unscored_turns:
            talk = f" ({self.unscored_turns:,} assistant turns as context only)"
        return (
            f"{self.rows:,} rows ({self.dropped:,} dropped, {self.truncated:,} truncated: "
            f"{self.cut_tokens:,} tokens cut), {self.responses:,} responses{talk}, "
            f"{self.canvases:,} canvases of {self.canvas_length}, {self.fill_share:.1%} fill, "
            f"{self.scored_tokens:,} scored tokens, longest row {self.longest:,}"
        )


class Tally:
    """Counts rows while they are encoded, and says at the end what became of them."""

    def __init__(self, canvas_length: int) -> None:
        self.canvas_length = canvas_length
        self.rows = self.conversations = self.unscored_turns = 0
        self.dropped = self.truncated = self.cut_tokens = 0
        self.responses = self.canvases = self.response_tokens = self.clean_tokens = self.longest = 0

    def row(self, *, is_conversation: bool, unscored_turns: int) -> None:
        """Count a row, whether it stays or not."""
        self.rows += 1
        self.conversations += is_conversation
        self.unscored_turns += unscored_turns

    def example(self, tokens: Sequence[int], responses: Sequence[Span], *, cut_tokens: int) -> None:
        """Count an example, which lost `cut_tokens` to the limit."""
        self.truncated += cut_tokens > 0
        self.cut_tokens += cut_tokens
        self.responses += len(responses)
        self.clean_tokens += len(tokens)
        self.longest = max(self.longest, len(tokens))
        for start, end in responses:
            self.response_tokens += end - start
            self.canvases += -(-(end - start) // self.canvas_length)

    def statistics(self) -> Statistics:
        """What has been counted so far."""
        return Statistics(**vars(self))
