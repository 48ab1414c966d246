"""metrics.jsonl, one object per logged optimiser step, and the clock behind its speeds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff.errors import RunError

FILE_NAME = "metrics.jsonl"
Record = dict[str, Any]


class MetricsLog:
    """Appends records to a JSONL file; whoever reads it meanwhile sees whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Write one record as one line. Values must be finite: JSON has no NaN."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def cut(self, step: int) -> list[Record]:
        """Forget what was logged after optimiser step `step`, and a last line cut short; returns the rest."""
        if not self.path.exists():
            return []
        records = [record for record in read(self.path) if record["step"] <= step]
        beside = self.path.with_name(self.path.name + ".partial")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        return records


def read(path: Path) -> list[Record]:
    """The records of a metrics file; a last line that a kill cut short is left out.

    Raises RunError naming the line when anything else is not a record.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    # A complete file ends in a newline, so what follows the last one was cut short.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{path}:{number}: not a metrics record; remove the line to go on") from None
        records.append(record)
    return records


class Clock:
    """Seconds spent on optimiser steps and the tokens they processed; evaluation and saving stand apart."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()
        self._seconds_at_reading = seconds
        # Stays on the device, so that counting never waits for it.
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, tokens: Tensor) -> None:
        """Add the tokens of one optimiser step."""
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """`tokens_per_second` since the last reading and `seconds` so far; waits for the device."""
        tokens = int(self._tokens)
        seconds = self._seconds + time.perf_counter() - self._since
        speed = tokens / max(seconds - self._seconds_at_reading, 1e-9)
        self._seconds_at_reading = seconds
        self._tokens.zero_()
        return {"tokens_per_second": round(speed, 1), "seconds": round(seconds, 3)}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time spent inside does not count."""
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()
