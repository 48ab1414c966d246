"""Limits of compiling: the time that all constraints of a request take together; refusals beyond it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from blockdiff.errors import RequestError

COMPILE_SECONDS = 10.0  # for the constraints of one request
ADVICE = "shorten its counted repetitions, or name fewer characters in them"


class TooSlow(RequestError):
    """A constraint takes longer to compile than its limit."""


class TooLarge(RequestError):
    """A constraint needs more states than there may be."""


_limit: ContextVar[tuple[float, float] | None] = ContextVar("compile_limit", default=None)  # seconds, and their end


@contextlib.contextmanager
def compile_limit(seconds: float = COMPILE_SECONDS) -> Iterator[None]:
    """Raises TooSlow if compiling inside this block takes longer altogether; in any thread.

    Inside another limit the outer one holds, so a caller may shorten or lengthen what a request has.
    """
    token = _limit.set(_limit.get() or (seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def seconds_left() -> float:
    """The seconds that compiling may go on for; TooSlow if none is left."""
    limit = _limit.get()
    left = COMPILE_SECONDS if limit is None else limit[1] - time.monotonic()
    if left <= 0:
        raise too_slow()
    return left


def too_large(states: int) -> TooLarge:
    """The refusal of an automaton of too many states."""
    return TooLarge(f"the constraint has {states:,} states or more; {ADVICE} ({{1,200}} makes 200 states)")


def too_slow() -> TooSlow:
    """The refusal of a constraint whose time is over."""
    seconds = (_limit.get() or (COMPILE_SECONDS,))[0]
    return TooSlow(f"the constraint takes more than {seconds:g} seconds to compile; {ADVICE}")
