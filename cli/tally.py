"""The report of `blockdiff sample` about a file of prompts, on stderr: its progress, and the numbers at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockdiff.metrics import at_limit
from blockdiff.terminal import console, say

if TYPE_CHECKING:
    from blockdiff.parallel.ranks import Ranks
    from blockdiff.sampling import Result

BETWEEN_LINES = 10.0  # seconds between two lines about the progress, if no bar can be drawn


@dataclass
class Tally:
    """Counts over results (answers, failures, tokens, canvases, ...), the first error, and the last result."""

    counts: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    last: Result | None = None

    def add(self, result: Result) -> None:
        """Count one more result."""
        self.counts["answered" if result.error is None else "failed"] += 1
        self.counts["tokens"] += len(result.tokens)
        self.counts["canvases"] += len(result.steps)
        self.counts["steps"] += sum(result.steps)
        self.counts["forwards"] += result.forwards.total
        self.counts["denoised"] += result.forwards.denoise
        self.counts["rounds"] += result.forwards.verify
        self.first_error, self.last = self.first_error or result.error, result

    def summed_over(self, ranks: Ranks) -> Tally:
        """Return the sum of all ranks' tallies, without a last result. Every rank must call this."""
        errors = ranks.gather(self.first_error)
        counts = sum(map(Counter, ranks.gather(self.counts)), Counter[str]())
        return Tally(counts, next((error for error in errors if error), None))

    def cost(self, max_steps: int) -> str:
        """Return words such as "5.10 steps per canvas, 3.20 tokens per forward".

        "tokens a round" are added if drafts were verified, and a remark if canvases took all `max_steps` on average.
        """
        counts, words = self.counts, []
        if counts["denoised"]:
            per_canvas = counts["steps"] / counts["canvases"]
            words += [f"{per_canvas:.2f} steps per canvas{at_limit(per_canvas, max_steps)}"]
        if counts["rounds"]:
            words += [f"{counts['tokens'] / counts['rounds']:.2f} tokens a round"]
        return ", ".join([*words, f"{counts['tokens'] / max(1, counts['forwards']):.2f} tokens per forward"])

    def say(self, before: int, seconds: float, max_steps: int) -> None:
        """Print the tally. before: the number of answers that were there already. seconds: how long the others took."""
        words = [f"{self.counts['answered']} answered", f"{self.counts['failed']} failed"]
        words += [f"{self.counts['tokens']} tokens"] + [f"{before} were there already"] * bool(before)
        say(f"{', '.join(words)} in {seconds:.1f} s, {self.cost(max_steps)}")
        if self.first_error:
            say(f"first failure: {self.first_error}")


class AnsweredSoFar:
    """The progress through a file's requests: a bar on a terminal, else a line every BETWEEN_LINES seconds."""

    def __init__(self, total: int, is_shown: bool = True):
        self.total, self.done, self.seconds = total, 0, 0.0
        self._start = self._said = time.monotonic()
        self._bar: Any = None
        self._is_shown = is_shown
        if is_shown and sys.stderr.isatty() and total > 0:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Bar(*columns, console=console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def add(self) -> None:
        """Count one more answered request, and show it."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self._is_shown and now - self._said >= BETWEEN_LINES and self.done < self.total:
            self._said = now
            per_second = self.done / (now - self._start)
            say(f"{self.done} of {self.total} answered, {per_second:.1f} a second")

    def close(self) -> None:
        """End the display and leave the terminal as it was. Sets `seconds`, the time since the start."""
        self.seconds = time.monotonic() - self._start
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
