"""metrics.jsonl, one object per logged optimiser step, and the clock behind its speeds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
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


def reproducible(records: Iterable[Record]) -> list[Record]:
    """The records without what clocks and machines say: the rest of a resumed run equals an uninterrupted one's."""
    measured = ("seconds", "_per_second", "memory_gib")
    return [{key: value for key, value in record.items() if not key.endswith(measured)} for record in records]


class Clock:
    """Seconds spent on optimiser steps and the tokens they processed; evaluation and saving stand apart."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()
        self._seconds_at_reading = seconds
        # Stays on the device, so that counting never waits for it.
        self._tokens = torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, tokens: Tensor) -> None:
        """Add the tokens of one optimiser step: [processed, scored]."""
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Processed and scored tokens per second since the last reading, `seconds` so far; waits for the device."""
        processed, scored = self._tokens.tolist()
        seconds = self._seconds + time.perf_counter() - self._since
        since = max(seconds - self._seconds_at_reading, 1e-9)
        self._seconds_at_reading = seconds
        self._tokens.zero_()
        return {
            "tokens_per_second": round(processed / since, 1),
            "scored_tokens_per_second": round(scored / since, 1),
            "seconds": round(seconds, 3),
        }

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time spent inside does not count."""
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


def memory_gib(device: torch.device) -> float:
    """The most memory used so far in GiB: by tensors on a CUDA device, elsewhere by the whole process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    import resource  # not on Windows, where nothing else here needs it either

    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
