"""Limits on the time and memory of other people's programs, such as chat templates."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TEMPLATE_SECONDS = 10.0  # for one conversation, which takes milliseconds
TEMPLATE_BYTES = 1 << 30
TICK = 0.1  # seconds between two checks


@contextmanager
def time_limit(seconds: float, most: int | None = None) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer, MemoryError if the process's peak memory grows by more than `most`.

    Off the main thread, an error is raised only when Python code runs there again.
    """
    is_over = _watch(seconds, most)
    if threading.current_thread() is not threading.main_thread():
        with _limit_of_thread(seconds, is_over):
            yield
        return

    def look(number: int, frame: FrameType | None) -> None:
        if (error := is_over()) is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise error

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, look)
    before, _ = signal.setitimer(signal.ITIMER_REAL, min(seconds, TICK), TICK)
    try:
        yield
    finally:
        # An earlier timer continues with the time that it has left.
        signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-3) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def memory_limit(most: int) -> Iterator[None]:
    """Raise MemoryError at once if the block requests more than `most` bytes, even in one operation.

    Meanwhile it limits all threads of the process, so use it for milliseconds in which no other thread needs as much.
    Off the main thread, and on systems other than Linux, there is no limit.
    """
    is_main = threading.current_thread() is threading.main_thread()
    pages = _pages() if is_main else None
    if pages is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(bound, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _pages() -> int | None:
    """Return the number of pages of the process's address space; None on systems other than Linux."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[0])
    except FileNotFoundError:
        return None


def _peak() -> int:
    """Return the peak memory of the process in bytes. Unlike reading a file, this does not let other threads run."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _watch(seconds: float, most: int | None) -> Callable[[], Exception | None]:
    """Return a function that returns the error of a limit that is exceeded since now, or None."""
    start, peak = time.monotonic(), _peak()

    def is_over() -> Exception | None:
        if time.monotonic() - start >= seconds:
            return TimeoutError(f"it takes more than {seconds:g} seconds")
        if most is not None and _peak() - peak > most:
            return MemoryError()
        return None

    return is_over


class _TooMuch(BaseException):
    """Raised inside a block that exceeds a limit. It is no Exception, so that a program cannot catch it by accident."""


@contextmanager
def _limit_of_thread(seconds: float, is_over: Callable[[], Exception | None]) -> Iterator[None]:
    thread, lock, done, errors = threading.get_ident(), threading.Lock(), threading.Event(), list[Exception]()

    def look() -> None:
        wait = min(seconds, TICK)
        while not done.wait(wait):
            wait = TICK
            with lock:
                if not done.is_set() and (error := is_over()) is not None:
                    errors.append(error)
                    _raise_in(thread, _TooMuch)
                    return

    threading.Thread(target=look, daemon=True).start()
    try:
        try:
            yield
        finally:
            with lock:
                done.set()
                _raise_in(thread, None)  # cancel an error that is not raised yet
    except _TooMuch:
        raise errors[0] from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an error at its next instruction; None cancels an error that is not raised yet."""
    exception = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
