"""Calls of outlines-core, each in a process of its own with an end and a bound on its memory.

An expression of thirty characters can need a billion states, and a thread that compiles one can be neither stopped nor
bounded. `compile_limit` says how long all constraints of a request may take together.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints import compile_child

COMPILE_SECONDS = 10.0  # for the constraints of one request
COMPILE_BYTES = 1 << 29  # of memory, for one call of outlines-core


class TooSlow(RequestError):
    """A constraint takes longer to compile than its limit."""


class TooLarge(RequestError):
    """A constraint needs more states than there may be."""


_ADVICE = "shorten its counted repetitions, or name fewer characters in them"
_limit: ContextVar[tuple[float, float] | None] = ContextVar("compile_limit", default=None)  # seconds, and their end


@contextlib.contextmanager
def compile_limit(seconds: float = COMPILE_SECONDS) -> Iterator[None]:
    """Raises TooSlow where compiling inside this block takes longer altogether; in any thread.

    Inside another limit the outer one holds, so a caller may shorten or lengthen what a request has.
    """
    token = _limit.set(_limit.get() or (seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(token)


def seconds_left() -> float:
    """The seconds that compiling may go on for; TooSlow where none is left."""
    limit = _limit.get()
    left = COMPILE_SECONDS if limit is None else limit[1] - time.monotonic()
    if left <= 0:
        raise _too_slow()
    return left


def too_large(states: int) -> TooLarge:
    """The refusal of an automaton of too many states."""
    return TooLarge(f"the constraint has {states:,} states or more; {_ADVICE} ({{1,200}} makes 200 states)")


def call_outlines(**request: Any) -> tuple[dict[str, Any], bytes]:
    """The answer of `compile_child` and what follows it; RequestError where there is no outlines-core, or no end."""
    line = json.dumps(request | {"bytes": COMPILE_BYTES}).encode() + b"\n"
    command = [sys.executable, "-P", compile_child.__file__]
    try:
        done = subprocess.run(command, input=line, capture_output=True, timeout=seconds_left())
    except subprocess.TimeoutExpired:
        raise _too_slow() from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if done.returncode > 0 and "MemoryError" not in last:
            raise RequestError(f"the constraint cannot be compiled: outlines-core ended with {last:.160}")
        raise RequestError(f"the constraint takes more than {COMPILE_BYTES >> 20} MiB to compile; {_ADVICE}")
    head, _, body = done.stdout.partition(b"\n")
    answer = json.loads(head)
    if "missing" in answer:
        raise RequestError("a constraint needs the package outlines-core; pip install outlines-core")
    return answer, body


def _too_slow() -> TooSlow:
    seconds = (_limit.get() or (COMPILE_SECONDS,))[0]
    return TooSlow(f"the constraint takes more than {seconds:g} seconds to compile; {_ADVICE}")
