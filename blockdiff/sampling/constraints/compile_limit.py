"""Limits of compilation: the time that all constraints of a request may take together, and the errors beyond it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from blockdiff.errors import RequestError

COMPILE_SECONDS = 10.0  # for the constraints of one request
ADVICE = "shorten its counted repetitions, or name fewer characters in them"


class TooSlow(RequestError):
    """Compiling a constraint takes longer than its limit."""


class TooLarge(RequestError):
    """A constraint needs more states than allowed."""


_limit: ContextVar[tuple[float, float] | None] = ContextVar("compile_limit", default=None)  # seconds, and their end


@contextlib.contextmanager
def compile_limit(seconds: float = COMPILE_SECONDS) -> Iterator[None]:
    """Limit the total time of compilation inside this block, in any thread; beyond it TooSlow is raised.

    Inside another limit the outer one applies, so a caller can shorten or extend a request's limit.
    """
    token = _limit.set(_limit.get() or (seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def seconds_left() -> float:
    """Return the seconds left for compilation; TooSlow if there are none."""
    limit = _limit.get()
    seconds = COMPILE_SECONDS if limit is None else limit[1] - time.monotonic()
    if seconds <= 0:
        raise too_slow()
    return seconds


def too_large(states: int) -> TooLarge:
    """Return the error for an automaton with too many states."""
    return TooLarge(f"the constraint has {states:,} states or more; {ADVICE} ({{1,200}} makes 200 states)")


def too_slow() -> TooSlow:
    """Return the error for a constraint whose time has run out."""
    seconds = (_limit.get() or (COMPILE_SECONDS,))[0]
    return TooSlow(f"the constraint takes more than {seconds:g} seconds to compile; {ADVICE}")
