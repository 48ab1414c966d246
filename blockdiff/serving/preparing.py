"""The threads that prepare requests: tokenise them, read their images and compile their constraints."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from queue import PriorityQueue
from typing import Literal, TypeVar

from blockdiff.errors import Closed, Full
from blockdiff.sampling.constraints.compile_limit import TooSlow, compile_limit
from blockdiff.sampling.request import Request

# The number of threads for each kind of request. heavy: with a constraint or images; slow: the constraint takes longer
# than QUICK_SECONDS; long: the prompt has more than LONG_CHARACTERS characters, and tokenising takes hundreds of times
# their size; plain: all others.
THREADS = {"heavy": 2, "slow": 1, "long": 1, "plain": 2}
LONG_CHARACTERS = 100_000
QUICK_SECONDS = 1.0  # to compile a constraint; if it takes longer, it begins anew in the slow thread
LATER = "too many constraints, images and long prompts are being prepared; ask later"
Kind = Literal["heavy", "slow", "long", "plain"]
T = TypeVar("T")


class Preparing:
    """Threads for each kind of work, so that plain requests never wait for constraints, nor these for slow ones.

    Waiting work of the client with the fewest answers under way comes first. seconds: how long work may wait (except
    plain work), and how long a constraint may then compile.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._pools = {kind: ThreadPoolExecutor(count, f"blockdiff-{kind}") for kind, count in THREADS.items()}
        self._waiting = {kind: PriorityQueue[tuple[int, int, Callable[[], None]]]() for kind in THREADS}
        self._numbers = itertools.count()
        self._is_started = self._is_closed = False

    def start(self) -> None:
        """Start all threads unless they run. Raises RuntimeError if the system lets no more threads start."""
        if self._is_started:
            return
        all_there = threading.Barrier(sum(THREADS.values()))
        try:
            for kind, count in THREADS.items():
                for _ in range(count):
                    self._pools[kind].submit(all_there.wait)
        except RuntimeError:
            all_there.abort()
            raise
        self._is_started = True

    def close(self) -> None:
        """End the threads after their present work. Work that waits ends with Closed."""
        self._is_closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False)

    async def run(self, work: Callable[[], T], kind: Kind, under_way: int, arrived: float) -> T:
        """Call `work` in a thread for its kind, and return its value.

        under_way: answers to the same client that are under way; arrived: the request's arrival by `time.monotonic`.
        If a constraint does not compile within QUICK_SECONDS, `work` begins anew in the slow thread. Raises Full if it
        waits for longer than `seconds` after arrival, TooSlow if a constraint compiles for longer, and Closed.
        """

        def limited(seconds: float) -> T:
            if self._is_closed:
                raise Closed("the engine was closed; ask another one")
            with compile_limit(seconds):
                return work()

        end = None if kind == "plain" else arrived + self.seconds
        try:
            return await self._called(lambda: limited(min(QUICK_SECONDS, self.seconds)), kind, under_way, end)
        except TooSlow:
            if self.seconds <= QUICK_SECONDS:
                raise
            return await self._called(lambda: limited(self.seconds), "slow", under_way, end)

    async def _called(self, work: Callable[[], T], kind: Kind, under_way: int, end: float | None) -> T:
        future: Future[T] = Future()
        self._waiting[kind].put((under_way, next(self._numbers), lambda: fulfil(future, work)))
        self._pools[kind].submit(lambda: self._waiting[kind].get()[-1]())
        value = asyncio.wrap_future(future)
        try:
            if end is not None:
                await asyncio.wait({value}, timeout=max(0.0, end - time.monotonic()))
                if not value.done() and future.cancel():  # False if the work has begun
                    raise Full(LATER)
            return await value
        finally:
            value.cancel()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Set a future to the value or the exception of `work()`. If the future is cancelled, do not call `work`."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def kind_of(request: Request) -> Kind:
    """Return the kind of threads that prepare a request."""
    if characters(request) > LONG_CHARACTERS:
        return "long"
    contents = [each.get("content") for each in request.messages or () if isinstance(each, Mapping)]
    may_have_images = bool(request.images) or any(isinstance(each, list) for each in contents)
    return "heavy" if request.form or request.banned or may_have_images else "plain"


def characters(request: Request) -> int:
    """Return the number of characters of a request's prompt and texts of messages; 0 if its prompt is token ids."""
    contents = [message.get("content") or "" for message in request.messages or () if isinstance(message, Mapping)]
    parts = [part for each in contents if isinstance(each, list) for part in each if isinstance(part, Mapping)]
    texts = [request.prompt, *contents, *(part.get("text") for part in parts)]
    return sum(len(text) for text in texts if isinstance(text, str))
