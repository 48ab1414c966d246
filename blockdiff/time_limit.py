"""An end for what somebody else's program, such as a chat template, computes, and a bound for its memory."""

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
TICK = 0.1  # seconds between two looks at the memory


@contextmanager
def time_limit(seconds: float, most: int | None = None) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer, MemoryError if the most memory of the process grows by more bytes.

    Off the main thread they come only once Python runs in it again.
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
        # A timer of somebody else goes on where it would be by now.
        signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - start), 1e-3) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def memory_limit(most: int) -> Iterator[None]:
    """Raises MemoryError at once where the block asks for more bytes, also in one operation.

    It bounds all threads of the process meanwhile, so it is for milliseconds in which no other one needs so much. Off
    the main thread, and elsewhere than on Linux, it bounds nothing.
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
    """The pages of the process's address space; None elsewhere than on Linux."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[0])
    except FileNotFoundError:
        return None


def _peak() -> int:
    """The most memory that the process has had, in bytes; unlike a file it is read without a turn of other threads."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _watch(seconds: float, most: int | None) -> Callable[[], Exception | None]:
    """A function that says which of the limits is passed, counted from now."""
    start, peak = time.monotonic(), _peak()

    def is_over() -> Exception | None:
        if time.monotonic() - start >= seconds:
            return TimeoutError(f"it takes more than {seconds:g} seconds")
        if most is not None and _peak() - peak > most:
            return MemoryError()
        return None

    return is_over


class _TooMuch(BaseException):
    """Raised inside a block that passes a limit; a program that catches every Exception does not catch it."""


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
                _raise_in(thread, None)  # what was not raised yet
    except _TooMuch:
        raise errors[0] from None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error at its next instruction; None takes one back that it has not raised."""
    asked = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), asked)
