"""What `blockdiff train` shows: a live bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from blockdiff.terminal import console
from blockdiff.training.freeze import Trains


class Progress:
    """Lines and, while `running`, a bar with losses, true tokens/s, memory and the time left."""

    def __init__(self, steps: int, is_shown: bool):
        self.steps, self.is_shown = steps, is_shown
        self.console = console()
        self.bar: Any = None
        self.task: Any = None
        self.first, self.began = 0, time.perf_counter()

    def line(self, text: str) -> None:
        """Print one line, above the bar where there is one."""
        if self.is_shown:
            self.console.print(text)

    def trains(self, rows: Sequence[Trains]) -> None:
        """Print what trains and what stands still, by part of the model (`training.freeze.trains_table`)."""
        if not self.is_shown:
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("part", no_wrap=True)
        for name in ("tensors", "trains", "frozen"):
            table.add_column(name, justify="right", no_wrap=True)
        total = Trains("total", *(sum(counts) for counts in zip(*(row[1:] for row in rows), strict=True)))
        for row in (*rows, total):
            table.add_row(row.part, *(f"{count:,}" if count else "-" for count in row[1:]))
        self.console.print(table)

    @contextmanager
    def running(self, start: int) -> Iterator[None]:
        """Surrounds the loop; `start` optimiser steps are done already."""
        from rich import progress

        self.first, self.began = start, time.perf_counter()
        if not (self.is_shown and self.console.is_terminal):
            yield
            return
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self.console,
        )
        with self.bar:
            self.task = self.bar.add_task("training", total=self.steps, completed=start, speed="")
            yield
        self.bar = None

    def step(self, step: int) -> None:
        """Move the bar to an optimiser step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def record(self, record: Mapping[str, Any]) -> None:
        """Show a metrics record as one line, and its losses, speed and memory beside the bar."""
        step = record["step"]
        words = [f"step {step:>{len(str(self.steps))}}/{self.steps}"]
        if record["kind"] == "heldout":
            words += ["held out:", _heldout(record)]
        if record["kind"] == "skipped":
            ids = ", ".join(map(str, record["not_finite_ids"]))
            words.append(f"skipped: the {record['not_finite']} is not finite (sample ids {ids})")
        if record["kind"] == "sample":
            words += ["sampled:", _sampled(record)]
        if record["kind"] == "train":
            losses, speed = _losses(record), _speed(record)
            words += [losses, f"grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}", speed]
            if record.get("skipped"):
                words.append(f"skipped {record['skipped']}")
            if self.bar is None:
                words.append(f"left {self._left(step)}")
            else:
                self.bar.update(self.task, description=losses, speed=speed)
        self.line("  ".join(words))

    def _left(self, step: int) -> str:
        done = max(1, step - self.first)
        seconds = int((time.perf_counter() - self.began) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _losses(record: Mapping[str, Any]) -> str:
    if not record["ar_loss"]:  # 0 where the recipe gives it no weight: then the canvas loss is all there is
        return f"canvas {record['canvas_loss']:.4f}"
    return f"loss {record['loss']:.4f} (canvas {record['canvas_loss']:.4f}, next token {record['ar_loss']:.4f})"


def _speed(record: Mapping[str, Any]) -> str:
    """Tokens processed (clean and canvas, no padding) and scored, and the most memory so far."""
    speed = f"{record['tokens_per_second']:,.0f} tokens/s"
    if "scored_tokens_per_second" in record:
        speed += f" ({record['scored_tokens_per_second']:,.0f} scored)"
    return speed + (f"  {record['memory_gib']:.1f} GiB" if "memory_gib" in record else "")


def _heldout(record: Mapping[str, Any]) -> str:
    """Loss and accuracy of each part that was measured; "corrupted" are the tokens that noise replaced."""
    words = []
    for word, part in (("canvas", "canvas"), ("corrupted", "corrupted"), ("next token", "ar")):
        if f"heldout_{part}_loss" in record:
            share = record.get(f"heldout_{part}_accuracy")
            right = "" if share is None else f" ({share:.1%} right)"
            words.append(f"{word} {record[f'heldout_{part}_loss']:.4f}{right}")
    return "  ".join(words)


def _sampled(record: Mapping[str, Any]) -> str:
    words = [f"{record['sample_accuracy']:.1%} of {record['sample_count']} right"]
    if record.get("sample_steps_per_canvas") is not None:
        words.append(f"{record['sample_steps_per_canvas']:.1f} steps per canvas")
    if record.get("sample_tokens_per_forward") is not None:
        words.append(f"{record['sample_tokens_per_forward']:.1f} tokens per forward")
    return ", ".join(words)
