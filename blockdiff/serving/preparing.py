"""The threads in which requests are prepared: tokenised, their images read and their constraints compiled."""

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

# The threads of each kind: of requests with a constraint or images, of those whose constraint takes long, of those with
# a prompt of more characters than LONG_CHARACTERS, whose tokenising takes hundreds of times their size, and of others.
THREADS = {"heavy": 2, "slow": 1, "long": 1, "plain": 2}
LONG_CHARACTERS = 100_000
QUICK_SECONDS = 1.0  # to compile a constraint, before it begins anew in the thread of the slow ones
LATER = "too many constraints, images and long prompts are being prepared; ask later"
Kind = Literal["heavy", "slow", "long", "plain"]
T = TypeVar("T")


class Preparing:
    """Threads for each kind of work, so that plain requests never wait for constraints, nor these for slow ones.

    Of what waits the work of whoever has the fewest answers under way comes first. seconds: for which work may wait
    (all but plain), and for which a constraint may then compile.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._pools = {kind: ThreadPoolExecutor(count, f"blockdiff-{kind}") for kind, count in THREADS.items()}
        self._waiting = {kind: PriorityQueue[tuple[int, int, Callable[[], None]]]() for kind in THREADS}
        self._numbers = itertools.count()
        self._is_started = self._is_closed = False

    def start(self) -> None:
        """Start all threads if they do not run yet; RuntimeError where the system lets no more start."""
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
        """End the threads after what they do; what waits ends with Closed."""
        self._is_closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False)

    async def run(self, work: Callable[[], T], kind: Kind, under_way: int, arrived: float) -> T:
        """The value of a function, which is called in a thread; Full where it waits too long.

        under_way: how many answers to whoever asks are; arrived: when the request came, by `time.monotonic`.
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
                if not value.done() and future.cancel():  # it has not begun
                    raise Full(LATER)
            return await value
        finally:
            value.cancel()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Call a function for a future, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def kind_of(request: Request) -> Kind:
    """The kind of work that it is to prepare a request."""
    if characters(request) > LONG_CHARACTERS:
        return "long"
    contents = [each.get("content") for each in request.messages or () if isinstance(each, Mapping)]
    may_have_images = bool(request.images) or any(isinstance(each, list) for each in contents)
    return "heavy" if request.form or request.banned or may_have_images else "plain"


def characters(request: Request) -> int:
    """The characters of a prompt in words."""
    contents = [message.get("content") or "" for message in request.messages or () if isinstance(message, Mapping)]
    parts = [part for each in contents if isinstance(each, list) for part in each if isinstance(part, Mapping)]
    texts = [request.prompt, *contents, *(part.get("text") for part in parts)]
    return sum(len(text) for text in texts if isinstance(text, str))
