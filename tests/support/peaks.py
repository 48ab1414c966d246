"""The peak of the bytes that tensors of a call take."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile


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
    gc.collect()  # tensors in cycles from before, which would be freed within the call and lower its peak
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
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
