"""An end for what somebody else's program, such as a chat template, computes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TEMPLATE_SECONDS = 10.0  # for one conversation, which takes milliseconds


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside the block when it takes longer; only the main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds")

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # A timer of somebody else goes on where it would be by now.
        signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-3) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)
