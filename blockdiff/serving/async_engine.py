"""An engine for asynchronous programs: one thread runs it, and every request is a stream of events.

It knows nothing of HTTP; `blockdiff.serving.app` is one of its users.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, abc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from blockdiff.decisions.form import ONE_BY_ONE, Asking
from blockdiff.decisions.question import Question
from blockdiff.errors import Closed, EngineError, Full, RequestError, TimedOut
from blockdiff.images import ImageInput
from blockdiff.sampling.calibration import temperatures
from blockdiff.sampling.constraints.compile_limit import COMPILE_SECONDS
from blockdiff.sampling.decide import Answer, RunningDecision, uncalibrated
from blockdiff.sampling.engine import Event
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from blockdiff.sampling.read import Choices, Read, RunningRead
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.sequence import Sequence
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.serving.engine_thread import BASE, Accepted, EngineThread, Stream
from blockdiff.serving.preparing import Kind, Preparing, characters, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

DRAIN_LOOKS = 0.05  # seconds between two checks whether all requests are answered
MOST_READS = 64  # the most questions of one decision that run at once
T = TypeVar("T")


@dataclass(frozen=True)
class Decided:
    """The answers to the questions about a state.

    prompt_tokens: tokens of all prompts together; cached_tokens: the number of them whose encoding was cached.
    """

    answers: list[Answer]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Terms:
    """The conditions under which a request is answered.

    arrived: its arrival by `time.monotonic`; owner: the client, with whom others take turns ("": nobody in
    particular); seconds: the time after arrival at which it ends with TimedOut (None: never); adapter: the name of
    the adapter that answers.
    """

    arrived: float = field(default_factory=time.monotonic)
    owner: str = ""
    seconds: float | None = None
    adapter: str = BASE

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Raise TimedOut if the request's time is over before the block ends."""
        seconds = None if self.seconds is None else self.arrived + self.seconds - time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise TimedOut(f"the answer took more than {self.seconds:g} s; ask for less, or later") from None


class AsyncEngine:
    """Answers requests in one thread, which alone touches the engine: `async for event in engine.generate(request)`.

    Use it with `async with`, or call `start` and `close`. If the engine raises, the running requests end with
    EngineError, and a new engine answers later ones.

    model: a model with its tokenizer, or a `Sampler`, whose settings are used; adapters: samplers over the same
    weights by name, each with its own engine, whose steps take turns in the one thread; max_waiting: unanswered
    requests allowed in addition to the engine's rows; max_of_owner: answers to one owner that may be under way (None:
    any number); max_prompt_tokens: tokens of a prompt (None: as many as the model has positions); max_image_bytes:
    bytes of the images of all unanswered requests, as tensors (None: any number); prepare_seconds: how long a
    request's preparation may wait, and how long its constraint may then compile; warms_up: whether `Engine.warm_up`
    runs before the first request; options: arguments of `Engine`, such as max_rows and seed.
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
        max_image_bytes: int | None = None,
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
        self.thread = EngineThread(self.models, warms_up, dict(max_waiting=sys.maxsize, **options))
        self.max_of_owner, self.max_prompt_tokens = max_of_owner, max_prompt_tokens
        self.max_image_bytes = max_image_bytes
        self.max_unanswered = self.thread.most_rows + max_waiting
        self._preparing = Preparing(prepare_seconds)
        self._unanswered = 0
        self._of_owner = Counter[str]()  # unanswered answers by owner
        self._images = Counter[ImageInput]()  # of unanswered requests, by identity
        self.is_draining = False  # running requests may end, and no new ones are accepted

    def start(self) -> AsyncEngine:
        """Start the engine's thread and the threads that prepare requests, unless they run. Returns the engine itself.

        Raises EngineError if it is closed, or if the system lets no more threads start.
        """
        if self.thread.is_closed:
            raise EngineError("the engine is closed; make another one")
        try:
            self._preparing.start()
            self.thread.start()
        except RuntimeError as error:
            raise EngineError(f"{error}; let this user have more processes (ulimit -u)") from None
        return self

    async def close(self) -> None:
        """End the running requests with Closed, and all threads after their present work."""
        self.is_draining = True
        await self.thread.close()
        self._preparing.close()

    async def drain(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Accept no more requests, wait for the unanswered ones, and close.

        The wait ends after `seconds`, or once `is_urgent()` is true.
        """
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
        """Yield the events of a request as they come: committed canvases, with `watch` also steps, last the Result.

        says_accepted: yield Accepted first, once the engine has the request.

        Raises RequestError if the request cannot be answered, Full if too many wait, and EngineError if the engine
        fails (TimedOut, Closed). Closing the generator ends the request within one step.
        """
        terms = terms or Terms()
        model, settings = self.models[terms.adapter]
        prepare = partial(prepare_sequences, request, settings, self.thread.seed, model.device)
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
        """Return the distributions of a template's holes after a prompt, as `Sampler.read`; raises as `generate`."""
        terms, readings = terms or Terms(), list[RunningRead]()
        arguments = request, template, choices, *self.models[terms.adapter]

        def prepare() -> list[Sequence]:
            readings.append(RunningRead.prepare(*arguments, steps=steps, draws=draws, seed=self.thread.seed))
            return readings[0].sequences

        await self._run(request, prepare, terms)
        return readings[0].answer()

    async def decide(
        self,
        request: Request,
        questions: abc.Sequence[Question],
        asking: Asking = ONE_BY_ONE,
        is_calibrated: bool = True,
        terms: Terms | None = None,
    ) -> Decided:
        """Answer typed questions about a state as `Sampler.decide`, and count the tokens of their prompts.

        Up to MOST_READS questions run at once, fewer if `max_of_owner` is less. Raises the errors of `generate`.
        """
        terms = terms or Terms()
        model, settings = self.models[terms.adapter]
        seed = self.thread.seed
        prepare = partial(RunningDecision.prepare, request, questions, model, settings, asking, seed)
        running = await self.prepared(prepare, kind_of(request), terms)
        free = asyncio.Semaphore(min(MOST_READS, self.max_of_owner or MOST_READS))

        async def read(draws: list[Sequence]) -> Result:
            async with free:
                return await self._run(draws[0].request, lambda: draws, terms)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(draws)) for draws in running.sequences]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        fitted = temperatures(model, settings, asking) if is_calibrated else uncalibrated
        counts = sum(each.prompt_tokens for each in results), sum(each.cached_tokens for each in results)
        return Decided(running.answers(fitted), *counts)

    async def _run(self, request: Request, prepare: Callable[[], list[Sequence]], terms: Terms) -> Result:
        """Run the draws that `prepare` makes and return their Result. Raises EngineError if they fail."""
        async with aclosing(self._events(request, prepare, terms)) as events:
            async for event in events:
                if isinstance(event, Result):
                    if event.error is not None:
                        raise EngineError(event.error)
                    return event
        raise EngineError("the read did not end")

    async def prepared(self, prepare: Callable[[], T], kind: Kind, terms: Terms) -> T:
        """Call `prepare` in a thread for preparations of this kind, and return its value.

        Raises Full if it waits for too long (see `Preparing.run`), and TimedOut.
        """
        async with terms.in_time():
            return await self._preparing.run(prepare, kind, self._of_owner[terms.owner], terms.arrived)

    async def _events(
        self,
        request: Request,
        prepare: Callable[[], list[Sequence]],
        terms: Terms,
        watch: bool = False,
    ) -> AsyncGenerator[Event | Accepted, None]:
        """Yield the events of the draws that `prepare` makes: Accepted first, last the Result.

        `prepare` runs in a thread of `Preparing`. Raises Closed, Full, RequestError and other errors of the engine.
        """
        if self.is_draining:
            raise Closed("the engine is closed, or will be soon; ask another one")
        if self._unanswered >= self.max_unanswered:
            raise Full(f"{self._unanswered} requests are unanswered, and no more may wait; ask later")
        owner = terms.owner
        if owner and self.max_of_owner is not None and self._of_owner[owner] + request.best_of > self.max_of_owner:
            raise Full(f"{self._of_owner[owner]} answers to you are under way, and {self.max_of_owner} are the most")
        self.start()
        stream = Stream(asyncio.get_running_loop())
        self._unanswered += 1
        self._of_owner[owner] += request.best_of
        event: Event | Accepted | Exception | None = None
        images = Counter[ImageInput]()
        try:
            draws = await self.prepared(partial(self._prepare, request, prepare, terms), kind_of(request), terms)
            if self.thread.is_closed:  # it was closed meanwhile, and nobody runs commands any more
                raise Closed("the engine was closed; ask another one")
            images.update(placed.image for placed in draws[0].images)
            self._images += images
            self._require_image_room(images)
            for draw in draws:
                draw.owner = owner
            self.thread.enter(stream, draws, watch, terms.adapter)
            while not isinstance(event, Result):
                async with terms.in_time():
                    event = await stream.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._images -= images
            self._unanswered -= 1
            self._of_owner[owner] -= request.best_of
            if not self._of_owner[owner]:
                del self._of_owner[owner]
            if not isinstance(event, Result | Exception):
                self.thread.leave(stream)

    def _require_image_room(self, images: Iterable[ImageInput]) -> None:
        """Raise Full if the images of all requests are too large, RequestError if `images` alone are."""
        most = self.max_image_bytes
        if most is None or sum(each.nbytes for each in self._images) <= most:
            return
        if (size := sum(each.nbytes for each in images)) > most:
            raise RequestError(f"the images take {size} bytes, more than the {most} that are taken here; send fewer")
        raise Full(f"the images of unanswered requests take {most} bytes, and no more may wait; ask later")

    def _prepare(self, request: Request, prepare: Callable[[], list[Sequence]], terms: Terms) -> list[Sequence]:
        """Return the draws of a request that `prepare` makes. Raises RequestError if the prompt is too long."""
        _, settings = self.models[terms.adapter]
        most, tokenizer, length = self.max_prompt_tokens or settings.positions, settings.tokenizer, characters(request)
        if most is not None and tokenizer is not None and length > (room := most * _longest_token(tokenizer)):
            raise RequestError(f"the prompt has {length} characters, more than the {room} of {most} tokens; shorten it")
        draws = prepare()
        count, most = len(draws[0].prompt_tokens), self.max_prompt_tokens
        if most is not None and count > most:
            raise RequestError(f"the prompt has {count} tokens, more than the {most} that are taken here; shorten it")
        return draws

    @property
    def unanswered(self) -> int:
        """The number of requests that are being prepared, wait or run."""
        return self._unanswered


@lru_cache(maxsize=4)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the characters of the longest token, plus 1 for a space before the prompt."""
    return 1 + max(map(len, tokenizer.get_vocab()))
