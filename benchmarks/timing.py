"""Timing of candidates in turns."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Stopwatch = Callable[[], float]  # runs once, returns seconds


@dataclass(frozen=True)
class Times:
    """Seconds of every repeat, in order: repeat i of two candidates ran one right after the other."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median repeat."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The spread: lower and upper quartile."""
        return quartiles(self.seconds)


def quartiles(values: tuple[float, ...]) -> tuple[float, float]:
    """Return the lower and upper quartile; of a single value, the value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def once(work: Callable[[], object], device: torch.device) -> Stopwatch:
    """Return a stopwatch for one call of `work`; it waits for the device before and after."""

    def seconds() -> float:
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - begin

    return seconds


def interleaved(candidates: Mapping[str, Stopwatch], repeats: int, warmup: int = 2) -> dict[str, Times]:
    """Time all candidates in turns (A B A B ...), so that a slow phase of the machine affects all of them."""
    for stopwatch in candidates.values():
        for _ in range(warmup):
            stopwatch()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, stopwatch in candidates.items():
            seconds[name].append(stopwatch())
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def probe(variants: Mapping[str, Stopwatch], tries: int = 2) -> dict[str, float]:
    """Return the best of `tries` tries of every variant, fastest first.

    A variant that raises (not every device and number format has all of them) is named on stderr and left out. If none
    is left, the last error is raised.
    """
    best = {}
    for name, stopwatch in variants.items():
        try:
            stopwatch()
            best[name] = min(stopwatch() for _ in range(tries))
        except Exception as error:
            if not best and name == list(variants)[-1]:
                raise
            print(f"{name}: left out, {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return dict(sorted(best.items(), key=lambda item: item[1]))


def contenders(probed: Mapping[str, float], margin: float = 1.05) -> list[str]:
    """Return the variants worth timing in full: the fastest, and those within `margin` times its seconds.

    A difference of two noisy times can be negative.
    """
    fastest = min(probed.values())
    limit = max(fastest, margin * fastest)
    return [name for name, seconds in probed.items() if seconds <= limit]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
