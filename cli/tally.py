"""The report of `blockdiff sample` about a file of prompts, on stderr: how far it is, and the numbers at its end."""

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

BETWEEN_LINES = 10.0  # seconds between two lines about the progress, where no bar can be drawn


@dataclass
class Tally:
    """Counts of what was answered, the reason of the first failure, and the last result."""

    counts: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    last: Result | None = None

    def add(self, result: Result) -> None:
        """Count one result more."""
        self.counts["answered" if result.error is None else "failed"] += 1
        self.counts["tokens"] += len(result.tokens)
        self.counts["canvases"] += len(result.steps)
        self.counts["steps"] += sum(result.steps)
        self.counts["forwards"] += result.forwards.total
        self.counts["denoised"] += result.forwards.denoise
        self.counts["rounds"] += result.forwards.verify
        self.first_error, self.last = self.first_error or result.error, result

    def summed_over(self, ranks: Ranks) -> Tally:
        """This tally and those of all other ranks, added up; every rank calls this."""
        errors = ranks.gather(self.first_error)
        counts = sum(map(Counter, ranks.gather(self.counts)), Counter[str]())
        return Tally(counts, next((error for error in errors if error), None))

    def cost(self, max_steps: int) -> str:
        """The tokens per forward in words, and before them what decides it: steps of canvases, rounds of drafts."""
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
    """The number of answered requests of a file: a bar on a terminal, else a line now and then."""

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
        """One request more is answered."""
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
