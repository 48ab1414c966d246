"""The clock behind a run's speeds, and the most memory it used."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from blockdiff import memory


class Clock:
    """Seconds spent on optimiser steps and the tokens they processed; evaluation and saving stand apart.

    since_reading: the seconds between the last two readings.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()
        self._seconds_at_reading = seconds
        self.since_reading = 0.0
        # Stays on the device, so that counting never waits for it.
        self._tokens = torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, tokens: Tensor) -> None:
        """Add the tokens of one optimiser step: [processed, scored]."""
        self._tokens += tokens

    def read(self) -> dict[str, float]:
        """Processed and scored tokens per second since the last reading, `seconds` so far; waits for the device."""
        processed, scored = self._tokens.tolist()
        seconds = self._seconds + time.perf_counter() - self._since
        self.since_reading = since = max(seconds - self._seconds_at_reading, 1e-9)
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
        return round(memory.most_allocated(device) / 2**30, 3)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
