"""The display of a run: a live bar in a terminal or notebook, plain lines elsewhere, and nothing on other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

from blockdiff import terminal
from blockdiff.metrics import METRICS, Record, texts, unlisted_keys
from blockdiff.terminal import console, counted, printable, say, shown
from blockdiff.training.freeze import PartCounts

T = TypeVar("T")
BESIDE_BAR = ("tokens_per_second", "memory_gib")
REDRAW_SECONDS = 0.5  # between two updates of the bar in a notebook
LINE_SECONDS = 60.0  # between two lines about rollouts if there is no bar


class Progress:
    """Prints lines and, while `running`, a bar with the loss, tokens per second, memory and the remaining time."""

    def __init__(self, steps: int, is_shown: bool):
        self.steps, self.is_shown = steps, is_shown
        self.console = console()
        self._bar: Any = None
        self._in_notebook: Any = None  # IPython's handle of the bar in the output
        self._drawn = self._began = self._last_line = time.perf_counter()
        self._first = 0

    def line(self, text: str) -> None:
        """Print one line, above the bar in a terminal and below it in a notebook."""
        if self.is_shown and self.console.is_jupyter:
            say(printable(text), sys.stdout)  # rich would make a separate output of every line
        elif self.is_shown:
            self.console.print(shown(text, self.console.file))

    def reading(self, rows: Iterator[T]) -> Iterator[T]:
        """Yield rows unchanged, and print how many were read after 1, 2, 4, ... seconds."""
        began, wait = time.perf_counter(), terminal.FIRST_SECONDS
        for count, row in enumerate(rows):
            if (seconds := time.perf_counter() - began) >= wait:
                wait = 2 * seconds
                self.line(f"data      {counted(count, 'row')} read in {seconds:.0f} s")
            yield row

    def waiting(self, text: str) -> AbstractContextManager[None]:
        """Print `text` and the elapsed seconds after 1, 2, 4, ... seconds of a block."""
        if not self.is_shown:
            return nullcontext()
        return terminal.saying(lambda seconds: f"{text}, {seconds:.0f} s so far", self.line)

    def parts(self, rows: Sequence[PartCounts]) -> None:
        """Print a table of the trained and frozen parameters of each part of the model (`freeze.count_parts`)."""
        if not self.is_shown:
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("part", no_wrap=True)
        for name in ("tensors", "trains", "frozen"):
            table.add_column(name, justify="right", no_wrap=True)
        total = PartCounts("total", *(sum(counts) for counts in zip(*(row[1:] for row in rows), strict=True)))
        for row in (*rows, total):
            table.add_row(row.part, *(f"{count:,}" if count else "-" for count in row[1:]))
        self.console.print(table)

    @contextmanager
    def running(self, start: int) -> Iterator[None]:
        """Show the bar around a block. start: the optimiser steps that are done already."""
        from rich import progress

        self._first, self._began = start, time.perf_counter()
        is_notebook = self.console.is_jupyter
        if not self.is_shown or not (self.console.is_terminal or is_notebook):
            yield
            return
        columns = ("{task.description}", "{task.fields[rates]}", "left {task.fields[left]}")
        loss, rates, remaining = map(progress.TextColumn, columns)
        bar = (progress.BarColumn(24), progress.MofNCompleteColumn())
        self._bar = progress.Progress(loss, *bar, rates, remaining, console=self.console)
        self._bar.add_task("training", total=self.steps, completed=start, rates="", left="-")
        if is_notebook:  # rich would need ipywidgets
            from IPython.display import display

            self._in_notebook = display(self._bar, display_id=True)
        else:
            self._bar.start()
        try:
            yield
        finally:
            self._update(redraw=True)
            self._bar.stop()
            self._bar = self._in_notebook = None

    def step(self, step: int) -> None:
        """Move the bar to an optimiser step."""
        self._update(completed=step, left=self._remaining(step))

    def rollouts(self, done: int, total: int, tokens_per_second: float) -> None:
        """Show how many answers of a round are sampled: next to the bar, or without one in a line once a minute."""
        text = f"rollouts {done}/{total}  {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._update(rates=text)
        elif time.perf_counter() - self._last_line > LINE_SECONDS:
            self._last_line = time.perf_counter()
            self.line(text)

    def record(self, record: Record) -> None:
        """Print a metrics record as one line, and show its loss, speed and memory next to the bar."""
        step = record["step"]
        keys = [*(key for key, metric in METRICS.items() if metric.in_line), *unlisted_keys([record])]
        if sum(key.endswith("_loss") for key in record) < 2:  # the only one is the loss
            keys.remove("loss")
        shown = list(texts(record, keys).values())
        words = [f"step {step:>{len(str(self.steps))}}/{self.steps}", *shown]
        if record["kind"] == "skipped":
            ids = ", ".join(map(str, record["not_finite_ids"]))
            words.append(f"the {record['not_finite']} is not finite (sample ids {ids})")
        if record["kind"] == "train":
            self._update(description=shown[0] if shown else "", rates="  ".join(texts(record, BESIDE_BAR).values()))
            if self._bar is None:
                words.append(f"left {self._remaining(step)}")
        self.line("  ".join(words))

    def _remaining(self, step: int) -> timedelta:
        seconds = (time.perf_counter() - self._began) / max(1, step - self._first) * (self.steps - step)
        return timedelta(seconds=int(seconds))

    def _update(self, redraw: bool = False, **fields: Any) -> None:
        if self._bar is None:
            return
        self._bar.update(self._bar.task_ids[0], **fields)
        if self._in_notebook is not None and (redraw or time.perf_counter() - self._drawn > REDRAW_SECONDS):
            self._in_notebook.update(self._bar)
            self._drawn = time.perf_counter()
