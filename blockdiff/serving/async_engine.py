"""An engine for asynchronous programs: one thread runs it, and every request is a stream of events.

HTTP has no part in it; `blockdiff.serving.app` is one of its users.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from blockdiff.errors import BlockdiffError, Closed, EngineError, Full, RequestError, TimedOut
from blockdiff.sampling.constraints.outlines import COMPILE_SECONDS
from blockdiff.sampling.engine import Engine, Event
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.read import Choices, Read, RunningRead
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.settings import SamplingSettings, sampling_settings
from blockdiff.sampling.trace import Step
from blockdiff.serving.preparing import Kind, Preparing, characters, fulfil, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

LOG = logging.getLogger("blockdiff.serving")
MOST_FRAMES = 64  # steps that wait for a slow reader; later ones are left out until it has read some
BASE = ""  # the name of the model without an adapter
DRAIN_LOOKS = 0.05  # seconds between two looks at whether all is answered
T = TypeVar("T")


@dataclass(frozen=True)
class Accepted:
    """The engine has taken a request, which may wait for others."""


@dataclass(frozen=True)
class Terms:
    """The terms of a request beside its words.

    arrived: when it came, by `time.monotonic`; owner: who asks, if others are to get their turns beside it; seconds:
    after which it ends with TimedOut; adapter: the name of the adapter that answers.
    """

    arrived: float = field(default_factory=time.monotonic)
    owner: str = ""
    seconds: float | None = None
    adapter: str = BASE

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raises TimedOut where the time of the request is over before the block is."""
        left = None if self.seconds is None else self.arrived + self.seconds - time.monotonic()
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            raise TimedOut(f"the answer took more than {self.seconds:g} s; ask for less, or later") from None


@dataclass(eq=False)
class _Stream:
    """The events of one request on their way to its reader: those that wait, and the loop in which it reads."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | Accepted | Exception] = field(default_factory=asyncio.Queue)
    ids: list[str | int] = field(default_factory=list)  # of its draws; none while it has not entered the engine
    is_left: bool = False  # nobody reads any more

    def put(self, event: Event | Accepted | Exception) -> None:
        """Add an event, in the reader's loop. Committed canvases are few; steps are left out where many wait."""
        if not (isinstance(event, Step) and self.events.qsize() >= MOST_FRAMES):
            self.events.put_nowait(event)


class AsyncEngine:
    """Answers requests in one thread, which alone touches the engine: `async for event in engine.generate(request)`.

    model: a model, with its tokenizer, or a `Sampler`, whose settings are taken; adapters: by their names samplers over
    the same weights, each with an engine of its own, whose steps take turns in the one thread; max_waiting: the
    requests that may be unanswered beside those that run; max_of_owner: answers to one owner that may be unanswered
    (None: as many as all); max_prompt_tokens: of a request (None: as many as the model sees); prepare_seconds: for
    which a constraint may wait, and for which it may then compile; warms_up: whether the calls of `Engine.warm_up` are
    made before the first request. options: those of `Engine`, such as max_rows and seed. Use it with `async with`, or
    call `start` and `close`.

    An exception of the engine fails the requests that run with EngineError, and a new engine answers later ones.
    """

    def __init__(
        self,
        model: BlockDiffusionModel | Sampler,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        settings: SamplingSettings | None = None,
        adapters: Mapping[str, Sampler] | None = None,
        max_waiting: int = 1000,
        max_of_owner: int | None = None,
        max_prompt_tokens: int | None = None,
        prepare_seconds: float = COMPILE_SECONDS,
        warms_up: bool = False,
        **options: Any,
    ):
        if isinstance(model, Sampler):
            settings = settings or model.settings
            model = model.model
        self.settings = settings or sampling_settings(model, tokenizer)
        self.models = {BASE: (model, self.settings)}
        self.models |= {name: (each.model, each.settings) for name, each in (adapters or {}).items()}
        self._options = dict(max_waiting=sys.maxsize, **options)
        self._engines = self._made()
        engine = self._engines[BASE]
        self.max_of_owner = max_of_owner
        self.max_prompt_tokens = max_prompt_tokens
        self.seed, self.max_unanswered = engine.seed, engine.most_rows + max_waiting
        self._commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._preparing = Preparing(prepare_seconds)
        self._streams: dict[str | int, _Stream] = {}  # by the ids of draws; only the engine's thread looks at it
        self._thread: threading.Thread | None = None
        self._step_began: float | None = None
        self._unanswered = 0
        self._of_owner = Counter[str]()  # answers that are unanswered
        self._is_warm = threading.Event()
        if not warms_up:
            self._is_warm.set()
        self.is_draining = False  # what runs may end, and nothing new is taken
        self._is_closed = False

    def start(self) -> AsyncEngine:
        """Start the engine's thread, and those that prepare requests, if they do not run yet.

        Raises EngineError where the system lets no more threads start.
        """
        if self._is_closed:
            raise EngineError("the engine is closed; make another one")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="blockdiff-engine", daemon=True)
            try:
                self._preparing.start()
                thread.start()
            except RuntimeError as error:
                raise EngineError(f"{error}; let this user have more processes (ulimit -u)") from None
            self._thread = thread
        return self

    async def close(self) -> None:
        """End the requests that run with Closed, and the thread after its step."""
        self.is_draining = self._is_closed = True
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._preparing.close()

    async def drain(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Take no more requests, let those that are unanswered end for so long, or until it is urgent, and close."""
        self.is_draining, end = True, time.monotonic() + seconds
        while self._unanswered and time.monotonic() < end and not is_urgent():
            await asyncio.sleep(DRAIN_LOOKS)
        await self.close()

    async def __aenter__(self) -> AsyncEngine:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- requests ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: Request,
        watch: bool = False,
        says_accepted: bool = False,
        terms: Terms | None = None,
    ) -> AsyncGenerator[Event | Accepted, None]:
        """The events of a request as they come: committed canvases, with `watch` also steps, and last its Result.

        says_accepted: Accepted comes before them.

        Raises RequestError for a request that cannot be answered, Full where too many wait, and EngineError where the
        engine fails. Closing the generator ends the request within one step.
        """
        terms = terms or Terms()
        model, settings = self.models[terms.adapter]
        prepare = partial(prepare_sequences, request, settings, self.seed, model.device)
        async with aclosing(self._events(request, prepare, terms, watch)) as events:
            async for event in events:
                if says_accepted or not isinstance(event, Accepted):
                    yield event

    async def read(
        self,
        request: Request,
        template: str,
        choices: Choices | None = None,
        steps: int = 1,
        draws: int = 4,
        terms: Terms | None = None,
    ) -> Read:
        """The distributions of a template's holes for a prompt, as in `Sampler.read`; the rest as in `generate`."""
        terms, readings = terms or Terms(), list[RunningRead]()
        given = request, template, choices, *self.models[terms.adapter]

        def prepare() -> list[Sequence]:
            readings.append(RunningRead.prepare(*given, steps=steps, draws=draws, seed=self.seed))
            return readings[0].sequences

        async with aclosing(self._events(request, prepare, terms)) as events:
            async for event in events:
                if isinstance(event, Result) and event.error is not None:
                    raise EngineError(event.error)
        return readings[0].answer()

    async def prepared(self, prepare: Callable[[], T], kind: Kind, terms: Terms) -> T:
        """The value of a function that belongs to a request's preparation, from a thread; Full where it waits long."""
        async with terms.in_time():
            return await self._preparing.run(prepare, kind, self._of_owner[terms.owner], terms.arrived)

    async def _events(
        self,
        request: Request,
        prepare: Callable[[], list[Sequence]],
        terms: Terms,
        watch: bool = False,
    ) -> AsyncGenerator[Event | Accepted, None]:
        """The events of the draws that `prepare` makes in a thread of its own."""
        if self.is_draining:
            raise Closed("the engine is closed, or will be soon; ask another one")
        if self._unanswered >= self.max_unanswered:
            raise Full(f"{self._unanswered} requests are unanswered, and no more may wait; ask later")
        owner = terms.owner
        if owner and self.max_of_owner is not None and self._of_owner[owner] + request.best_of > self.max_of_owner:
            raise Full(f"{self._of_owner[owner]} answers to you are under way, and {self.max_of_owner} are the most")
        self.start()
        stream = _Stream(asyncio.get_running_loop())
        self._unanswered += 1
        self._of_owner[owner] += request.best_of
        event: Event | Accepted | Exception | None = None
        try:
            draws = await self.prepared(partial(self._prepare, request, prepare, terms), kind_of(request), terms)
            if self._is_closed:  # meanwhile; nobody takes commands any more
                raise Closed("the engine was closed; ask another one")
            for draw in draws:
                draw.owner = owner
            self._commands.put(partial(self._enter, stream, draws, watch, terms.adapter))
            while not isinstance(event, Result):
                async with terms.in_time():
                    event = await stream.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._unanswered -= 1
            self._of_owner[owner] -= request.best_of
            if not self._of_owner[owner]:
                del self._of_owner[owner]
            if not isinstance(event, Result | Exception):
                stream.is_left = True
                self._commands.put(partial(self._leave, stream))

    def _prepare(self, request: Request, prepare: Callable[[], list[Sequence]], terms: Terms) -> list[Sequence]:
        """The draws of a request; RequestError where there are none, or where its prompt is too long."""
        _, settings = self.models[terms.adapter]
        most, tokenizer, length = self.max_prompt_tokens or settings.positions, settings.tokenizer, characters(request)
        if most is not None and tokenizer is not None and length > (room := most * _longest_token(tokenizer)):
            raise RequestError(f"the prompt has {length} characters, more than the {room} of {most} tokens; shorten it")
        draws = prepare()
        count, most = len(draws[0].prompt_tokens), self.max_prompt_tokens
        if most is not None and count > most:
            raise RequestError(f"the prompt has {count} tokens, more than the {most} that are taken here; shorten it")
        return draws

    async def call(self, function: Callable[[Engine], T], adapter: str = BASE) -> T:
        """The answer of a function, which the engine's thread calls with the engine of a model between two steps."""
        future: Future[T] = Future()
        if self._is_closed:
            raise Closed("the engine is closed; ask another one")
        self.start()
        self._commands.put(lambda: fulfil(future, lambda: function(self._working(adapter))))
        return await asyncio.wrap_future(future)

    @property
    def unanswered(self) -> int:
        """The number of requests that are being prepared, wait or run."""
        return self._unanswered

    @property
    def is_working(self) -> bool:
        """False where no step can run any more: the engine is closed, or could not be made anew after a failure."""
        is_running = self._thread is None or self._thread.is_alive()
        return is_running and bool(self._engines) and not self._is_closed

    @property
    def is_warm(self) -> bool:
        """False while requests wait until the engine has warmed up."""
        return self._is_warm.is_set()

    def wait_until_warm(self) -> None:
        """Start the engine's thread and wait until it has warmed up, or failed to."""
        self.start()
        self._is_warm.wait()

    @property
    def step_seconds(self) -> float:
        """The time for which the step under way has run; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Take commands and step, until a command is None."""
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
            except Exception:  # whatever it is, the next requests are to be answered
                LOG.exception("the engine failed")
                has_failed = True
            self._step_began = None
            if has_failed:
                self._start_anew()
        self._fail_all(Closed("the engine was closed; ask another one"))
        self._engines = {}
        while not self._commands.empty():  # requests that came meanwhile are told, too
            if (command := self._commands.get()) is not None:
                command()

    def _warm_up(self) -> None:
        """Make the calls that the first requests would wait for; an engine that cannot make them answers nothing."""

        def say(done: int, calls: int) -> None:
            LOG.info("warming up: %d of %d calls are made", done, calls)
            if self._is_closed:
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
        """Run the commands that came since the last step, and wait for one while nothing else is to do."""
        while True:
            is_idle = not any(engine.unfinished for engine in self._engines.values())
            if not is_idle and self._commands.empty():
                return True
            command = self._commands.get()
            if command is None:
                return False
            command()

    def _enter(self, stream: _Stream, draws: list[Sequence], watch: bool, adapter: str) -> None:
        """Give a request to its engine; an error is its reader's."""
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

    def _leave(self, stream: _Stream) -> None:
        """End the request of a stream that nobody reads any more."""
        for id in stream.ids:
            if self._streams.pop(id, None) is not None:
                for engine in self._engines.values():
                    engine.cancel(id)

    def _hand_over(self, events: list[tuple[str | int, Event]]) -> None:
        """Give the events of a step to their readers, with one call into each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event]]] = {}
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

    def _post(self, stream: _Stream, event: Accepted | Exception) -> None:
        with suppress(RuntimeError):
            stream.loop.call_soon_threadsafe(stream.put, event)

    def _start_anew(self) -> None:
        """Fail the requests that ran, with words that tell nothing of one another, and make new engines."""
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
        """A new engine for each model; of the memory for pages each takes an equal part."""
        made = {name: Engine(model, settings=own, **self._options) for name, (model, own) in self.models.items()}
        if len(made) > 1:
            for engine in made.values():
                engine.pages.share = 1 / len(made)
            tokens = {name or "the model": engine.capacity for name, engine in made.items()}  # before one takes memory
            LOG.info("tokens that pages have room for: %s", tokens)
        return made

    def _working(self, adapter: str) -> Engine:
        if not self._engines:
            raise EngineError("the engine is closed, or failed and could not be made anew; ask another one")
        return self._engines[adapter]


def _put_all(events: list[tuple[_Stream, Event]]) -> None:
    for stream, event in events:
        stream.put(event)


@lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The characters of the longest token, and one for a space before the prompt."""
    return 1 + max(map(len, tokenizer.get_vocab()))
