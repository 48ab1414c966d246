"""What `blockdiff train` shows: a live bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blockdiff.cli.loading import console


class Progress:
    """Lines and, while `running`, a bar with true tokens/s and the time left."""

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

    def record(self, record: dict[str, Any]) -> None:
        """Show a metrics record: as one line, and its speed and loss beside the bar."""
        step = record["step"]
        words = [f"step {step:>{len(str(self.steps))}}/{self.steps}"]
        if "heldout_canvas_loss" in record or "heldout_ar_loss" in record:
            held = (("canvas", "heldout_canvas_loss"), ("next token", "heldout_ar_loss"))
            words += ["held out:", *(f"{word} {record[key]:.4f}" for word, key in held if key in record)]
        if "canvas_loss" in record:
            words.append(f"canvas {record['canvas_loss']:.4f}")
            if record["ar_loss"]:  # 0 where the recipe gives it no weight
                words.append(f"next token {record['ar_loss']:.4f}")
            words.append(f"grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}")
            words.append(f"{record['tokens_per_second']:,.0f} tokens/s")
            if self.bar is None:
                words.append(f"left {self._left(step)}")
            else:
                speed = f"{record['tokens_per_second']:,.0f} tokens/s"
                self.bar.update(self.task, description=f"canvas {record['canvas_loss']:.3f}", speed=speed)
        self.line("  ".join(words))

    def _left(self, step: int) -> str:
        done = max(1, step - self.first)
        seconds = int((time.perf_counter() - self.began) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
