"""The thread that runs engines: it runs commands between steps, and passes events to their readers' event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from blockdiff.errors import BlockdiffError, Closed, EngineError, Full, RequestError
from blockdiff.sampling.engine import Engine, Event
from blockdiff.sampling.request import Result
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.trace import Step
from blockdiff.serving.preparing import fulfil

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel

LOG = logging.getLogger("blockdiff.serving")
MOST_FRAMES = 64  # events that wait for a slow reader; beyond it, steps are dropped until it has read some
BASE = ""  # the name of the model without an adapter
T = TypeVar("T")


@dataclass(frozen=True)
class Accepted:
    """The event that an engine has accepted a request, which may still wait for others."""


@dataclass(eq=False)
class Stream:
    """The unread events of one request, and the event loop of its reader."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | Accepted | Exception] = field(default_factory=asyncio.Queue)
    ids: list[str | int] = field(default_factory=list)  # of the request and its draws; empty before the engine has it
    is_left: bool = False  # nobody reads any more

    def put(self, event: Event | Accepted | Exception) -> None:
        """Add an event; call it in the reader's loop. Steps are dropped if MOST_FRAMES events wait."""
        if not (isinstance(event, Step) and self.events.qsize() >= MOST_FRAMES):
            self.events.put_nowait(event)


class EngineThread:
    """One engine for each of several models over the same weights, and the one thread that touches them.

    models: models and their settings by name; warms_up: whether `Engine.warm_up` runs first; options: arguments of
    `Engine`. If an engine raises, all running requests end with EngineError, and new engines answer later ones.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[BlockDiffusionModel, SamplingSettings]],
        warms_up: bool,
        options: Mapping[str, Any],
    ):
        self._models, self._options = models, options
        self._engines = self._made()
        self.seed, self.most_rows = self._engines[BASE].seed, self._engines[BASE].most_rows
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._streams: dict[str | int, Stream] = {}  # by the ids of draws; only the thread uses it
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None
        self._is_warm = threading.Event()
        if not warms_up:
            self._is_warm.set()
        self.is_closed = False

    def start(self) -> None:
        """Start the thread unless it runs. Raises RuntimeError if the system lets no more threads start."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="blockdiff-engine", daemon=True)
            thread.start()
            self._thread = thread

    async def close(self) -> None:
        """End the running requests with Closed, and the thread after its step. Waits for the thread."""
        self.is_closed = True
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def enter(self, stream: Stream, draws: list[Sequence], watch: bool, adapter: str) -> None:
        """Submit the draws of a request to the engine of `adapter`; its events and errors go to `stream`."""
        self._commands.put(partial(self._enter, stream, draws, watch, adapter))

    def leave(self, stream: Stream) -> None:
        """Cancel the request of a stream that nobody reads any more."""
        stream.is_left = True
        self._commands.put(partial(self._leave, stream))

    async def call(self, function: Callable[[Engine], T], adapter: str = BASE) -> T:
        """Call `function` with the engine of `adapter`, in the engine's thread between two steps; return its value.

        Raises Closed or EngineError if there is no engine.
        """
        future: Future[T] = Future()
        if self.is_closed:
            raise Closed("the engine is closed; ask another one")
        self.start()
        self._commands.put(lambda: fulfil(future, lambda: function(self._working(adapter))))
        return await asyncio.wrap_future(future)

    @property
    def is_working(self) -> bool:
        """False if no step can run any more: the engine is closed, could not warm up, or could not be replaced."""
        is_running = self._thread is None or self._thread.is_alive()
        return is_running and bool(self._engines) and not self.is_closed

    @property
    def is_warm(self) -> bool:
        """False while the engine still warms up and requests wait for it."""
        return self._is_warm.is_set()

    def wait_until_warm(self) -> None:
        """Start the engine's thread and block until it has warmed up, or has failed to."""
        self.start()
        self._is_warm.wait()

    @property
    def step_seconds(self) -> float:
        """Seconds since the present step began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        """Run commands and steps in turn until a command is None; then end all requests with Closed."""
        is_open = True
        if not self.is_warm:
            self._warm_up()
        while is_open:
            has_failed = False
            try:
                is_open = self._take_commands()
                if is_open:
                    self._step_began = time.monotonic()
                    self._step()
            except Exception:  # whatever it is, later requests must be answered
                LOG.exception("the engine failed")
                has_failed = True
            self._step_began = None
            if has_failed:
                self._start_anew()
        self._fail_all(Closed("the engine was closed; ask another one"))
        self._engines = {}
        while not self._commands.empty():  # requests that came meanwhile get the error, too
            if (command := self._commands.get()) is not None:
                command()

    def _warm_up(self) -> None:
        """Run `Engine.warm_up` of every engine, so that the first requests need not. If one fails, drop all engines."""

        def say(done: int, calls: int) -> None:
            LOG.info("warming up: %d of %d calls are made", done, calls)
            if self.is_closed:
                raise Closed("the engine was closed while it warmed up")

        try:
            for engine in self._engines.values():
                engine.warm_up(say)
        except BlockdiffError as error:
            LOG.error("the engine could not warm up: %s", error)
            self._engines = {}
        except Exception:
            LOG.exception("the engine could not warm up")
            self._engines = {}
        self._is_warm.set()

    def _step(self) -> None:
        for engine in self._engines.values():
            if engine.unfinished:
                engine.step()
                self._hand_over([(event.id, event) for event in engine.events()])

    def _take_commands(self) -> bool:
        """Run the waiting commands; if no request is unfinished, wait for further ones.

        Returns False if the command to close came, and True if a step is due.
        """
        while True:
            is_idle = not any(engine.unfinished for engine in self._engines.values())
            if not is_idle and self._commands.empty():
                return True
            command = self._commands.get()
            if command is None:
                return False
            command()

    def _enter(self, stream: Stream, draws: list[Sequence], watch: bool, adapter: str) -> None:
        """Submit a request to its engine, and post Accepted, or the error, to its stream."""
        if stream.is_left:
            return
        try:
            if taken := [draw.id for draw in draws if draw.id in self._streams]:
                raise RequestError(f"a request with the id {taken[0]!r} is being answered; give each its own")
            self._working(adapter).submit(draws[0].request, watch, draws)
        except Exception as error:
            if not isinstance(error, RequestError | Full | EngineError):
                LOG.exception("a request could not be taken")
            self._post(stream, error)
            return
        stream.ids = [*{draws[0].request.id, *(draw.id for draw in draws)}]
        self._streams |= dict.fromkeys(stream.ids, stream)
        self._post(stream, Accepted())

    def _leave(self, stream: Stream) -> None:
        """Cancel all draws of a stream in the engines."""
        for id in stream.ids:
            if self._streams.pop(id, None) is not None:
                for engine in self._engines.values():
                    engine.cancel(id)

    def _hand_over(self, events: list[tuple[str | int, Event]]) -> None:
        """Pass the events of a step, with their ids, to their streams, by one call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]] = {}
        for id, event in events:
            stream = self._streams.get(id)
            if stream is None:
                continue
            by_loop.setdefault(stream.loop, []).append((stream, event))
            if isinstance(event, Result):
                for each in stream.ids:
                    del self._streams[each]
        for loop, several in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, so nobody reads
                loop.call_soon_threadsafe(_put_all, several)

    def _post(self, stream: Stream, event: Accepted | Exception) -> None:
        with suppress(RuntimeError):
            stream.loop.call_soon_threadsafe(stream.put, event)

    def _start_anew(self) -> None:
        """End all running requests with an EngineError that reveals nothing of other requests, and make new engines."""
        self._engines = {}
        self._fail_all(EngineError("the engine failed, and its log says why; ask again"))
        try:
            self._engines = self._made()
        except Exception:
            LOG.exception("no new engine could be made; restart the program")

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = {*self._streams.values()}, {}
        for stream in streams:
            self._post(stream, error)

    def _made(self) -> dict[str, Engine]:
        """Make a new engine for each model. All get equal shares of the memory for pages."""
        engines = {
            name: Engine(model, settings=settings, **self._options) for name, (model, settings) in self._models.items()
        }
        if len(engines) > 1:
            for engine in engines.values():
                engine.pages.share = 1 / len(engines)
            # before one takes memory
            tokens = {name or "the model": engine.capacity for name, engine in engines.items()}
            LOG.info("tokens that pages have room for: %s", tokens)
        return engines

    def _working(self, adapter: str) -> Engine:
        if not self._engines:
            raise EngineError("the engine is closed, or failed and could not be made anew; ask another one")
        return self._engines[adapter]


def _put_all(events: list[tuple[Stream, Event]]) -> None:
    for stream, event in events:
        stream.put(event)
