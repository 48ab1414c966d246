"""An end for what somebody else's program, such as a chat template, computes."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TEMPLATE_SECONDS = 10.0  # for one conversation, which takes milliseconds


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError where the block takes longer; off the main thread only once Python runs in it again."""
    if threading.current_thread() is not threading.main_thread():
        with _limit_of_thread(seconds):
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


class _OutOfTime(BaseException):
    """Raised inside a block that takes too long; a program that catches every Exception does not catch it."""


@contextmanager
def _limit_of_thread(seconds: float) -> Iterator[None]:
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not is_over:
                _raise_in(thread, _OutOfTime)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                is_over = True
                _raise_in(thread, None)  # what was not raised yet
            timer.cancel()
    except _OutOfTime:
        raise TimeoutError(f"it takes more than {seconds:g} seconds") from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error at its next instruction; None takes one back that it has not raised."""
    asked = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), asked)
