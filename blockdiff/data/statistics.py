"""What became of the rows of a file, in numbers and in one printable line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """Counts over the rows of one file; tokens are those of the rows that stay.

    `dropped` rows had no room for a canvas within max_length, `truncated` ones were cut at a canvas boundary
    and lost `cut_tokens`. `clean_tokens` are in rows (prompts too), `response_tokens` in responses.
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

    @property
    def scored_tokens(self) -> int:
        """Canvas positions that are scored when every canvas is: responses and fill."""
        return self.canvases * self.canvas_length

    @property
    def fill_share(self) -> float:
        """The share of the scored canvas positions that is end-of-sequence fill."""
        return 1 - self.response_tokens / self.scored_tokens if self.canvases else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows ({self.dropped:,} dropped, {self.truncated:,} truncated: "
            f"{self.cut_tokens:,} tokens cut), {self.responses:,} responses, "
            f"{self.canvases:,} canvases of {self.canvas_length}, {self.fill_share:.1%} fill, "
            f"{self.scored_tokens:,} scored tokens, longest row {self.longest:,}"
        )
