"""Timing side by side, and peak memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Stopwatch = Callable[[], float]  # runs once, returns seconds


@dataclass(frozen=True)
class Times:
    """Seconds of every repeat, in order: repeat i of two candidates ran right after each other."""

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
    """Lower and upper quartile; both the value itself where there is only one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def once(work: Callable[[], object], device: torch.device) -> Stopwatch:
    """A stopwatch for one call of `work`, waiting for the device before and after."""

    def seconds() -> float:
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - begin

    return seconds


def interleaved(candidates: Mapping[str, Stopwatch], repeats: int, warmup: int = 2) -> dict[str, Times]:
    """Time all candidates in turns (A B A B ...), so that a slow spell of the machine meets all of them."""
    for stopwatch in candidates.values():
        for _ in range(warmup):
            stopwatch()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, stopwatch in candidates.items():
            seconds[name].append(stopwatch())
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def probe(variants: Mapping[str, Stopwatch], tries: int = 2) -> dict[str, float]:
    """The best of a few tries of every variant, fastest first.

    A variant that raises (not every device and number format has them all) is named on stderr and left out; when
    none is left, the last error is raised.
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
    """The variants worth timing in full: the fastest, and those within `margin` times its seconds.

    A difference of two noisy times can be negative.
    """
    fastest = min(probed.values())
    limit = max(fastest, margin * fastest)
    return [name for name, seconds in probed.items() if seconds <= limit]


def peak_memory(work: Callable[[], object], device: torch.device, release: Callable[[], object] = lambda: None) -> int:
    """Bytes of tensors that one call of `work` holds at its peak, beyond what was held before.

    release: frees what an earlier call left behind, so that it counts as this call's.
    """
    return peak_memories(work, device, release, 1)[0]


def peak_memories(
    work: Callable[[], object], device: torch.device, release: Callable[[], object], calls: int
) -> list[int]:
    """`peak_memory` of several calls, for work in which other threads or the profiler itself make a difference."""
    work()  # what is allocated once and kept does not count
    found = []
    for _ in range(calls):
        release()
        found.append(peak_of_one_call(work, device))
    return found


def peak_of_one_call(work: Callable[[], object], device: torch.device) -> int:
    """`peak_memory` without a call before it: what is allocated once and kept counts, too."""
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    # A process's resident memory says little: the allocator keeps what was freed. The trace is exact.
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    held = peak = 0
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drop what the profiler's C++ writes to stderr when it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
