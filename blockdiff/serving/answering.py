"""Responses to requests: run a request, and send its answers as one object or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from blockdiff import __version__
from blockdiff.errors import BlockdiffError
from blockdiff.sampling.request import Result
from blockdiff.sampling.trace import CommittedCanvas, Step
from blockdiff.serving.answers import CachedTokens, ReasoningTokens, Usage
from blockdiff.serving.async_engine import AsyncEngine, Terms
from blockdiff.serving.deltas import AnswerStream, Delta
from blockdiff.serving.engine_thread import BASE, Accepted
from blockdiff.serving.limits import Limits
from blockdiff.serving.metrics import CallMetrics, Metrics
from blockdiff.serving.protocol import GenerationBody
from blockdiff.serving.refusals import Refused, error_body

LOG = logging.getLogger("blockdiff.serving")
FINGERPRINT = f"blockdiff-{__version__}"
LEFT = 499  # the status if the client is gone; nobody reads this answer
Event = dict[str, str]  # a server-sent event: its `data`, and its type in `event` if the protocol names types
T = TypeVar("T")


class TimedBody(Protocol):
    """The body of a request that may name a model and a time limit in seconds."""

    model: str | None
    timeout: float | None


@dataclass
class Server:
    """The parts of a server that its routes share.

    names: names by which requests may call the model; answers and `/v1/models` have the first. The adapters are the
    ones of `engine`. created: Unix time of the start, in seconds.
    """

    engine: AsyncEngine
    names: tuple[str, ...]
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def served(self) -> list[str]:
        """The names of the model and of its adapters, as `/v1/models` lists them."""
        return [self.names[0], *(name for name in self.engine.models if name != BASE)]

    @property
    def most_answers(self) -> int:
        """The most answers that a request may ask for: the limit, or the engine's whole queue if that is smaller."""
        return min(self.limits.most_answers, self.engine.max_unanswered)

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter that a request names as its model, BASE for the model itself or if `name` is None.

        Raises Refused (404) if no such model is served.
        """
        if name is None or name in self.names:
            return BASE
        if name not in self.engine.models or name == BASE:
            words = f"the model {name!r:.80} is not served here; these are: {', '.join(self.served)}"
            raise Refused(words, 404, "model_not_found", "model")
        return name

    def terms(self, http: HttpRequest, body: TimedBody) -> Terms:
        """Return arrival, owner, time limit and adapter of a request. Raises Refused if its model is not served."""
        seconds = self.limits.seconds(body.timeout)
        return Terms(http.state.measures.began, http.state.owner, seconds, self.adapter_of(body.model))


class AnswerFormat(Protocol):
    """The form of one route's answers.

    prefix: of the ids. In all methods `head` has the fields id, created, model and system_fingerprint, and `ends` the
    last delta of each answer, in order.
    """

    prefix: ClassVar[str]

    def whole(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> dict[str, Any]:
        """Return all answers as one object."""

    def events(self, head: dict[str, Any], stream: AnswerStream, delta: Delta, is_first: bool) -> Iterable[Event]:
        """Return the stream's events for a delta; none if the client would learn nothing from it.

        is_first: true for the first delta of an answer, which is empty.
        """

    def end(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> Iterable[Event]:
        """Return the events that follow all answers."""

    def error(self, head: dict[str, Any], error: dict[str, Any]) -> Iterable[Event]:
        """Return the events of an error, which ends the stream."""


@dataclass(frozen=True)
class ApiCall:
    """A request of the protocol, ready to run: an AnswerStream for each answer, and the form of the answers."""

    body: GenerationBody
    streams: Sequence[AnswerStream]
    format: AnswerFormat
    terms: Terms


async def respond(server: Server, http: HttpRequest, call: ApiCall) -> Response:
    """Answer a request, with one object or with a stream of events as its body asks.

    If the client leaves first, the status is LEFT. Raises RequestError, Full and EngineError if no answer begins; later
    errors are events of the stream.
    """
    name = call.body.model or server.names[0]
    head = dict(
        id=call.format.prefix + uuid.uuid4().hex, created=int(time.time()), model=name, system_fingerprint=FINGERPRINT
    )
    measures: CallMetrics = http.state.measures
    measures.answers, measures.outcome = call.body.n, "left"
    if not call.body.stream:
        content = await unless_left(http, _whole(server, call, measures, head))
        return Response(status_code=LEFT) if content is None else JSONResponse(content)
    groups = _grouped(server, call, measures, head)
    first = await unless_left(http, anext(groups))  # before the response begins, so that a refusal has its status
    if first is None:
        await groups.aclose()
        return Response(status_code=LEFT)
    events = _events(first, groups, call.format, head, measures)
    return _Stream(groups, events, send_timeout=server.limits.read_seconds, sep="\n")


class _Stream(EventSourceResponse):
    """A stream that closes its generators however it ends, even if the client left or reads too slowly."""

    def __init__(
        self, groups: AsyncGenerator[list[Event], None], events: AsyncGenerator[Event, None], **options: Any
    ) -> None:
        super().__init__(events, **options)
        self._groups, self._events = groups, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close both generators."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._groups.aclose()


async def _whole(server: Server, call: ApiCall, measures: CallMetrics, head: dict[str, Any]) -> dict[str, Any]:
    ends: dict[int, Delta] = {}
    async with aclosing(_merged([_deltas(server, call, stream, measures) for stream in call.streams])) as deltas:
        async for index, each in deltas:
            if each.result is not None:
                ends[index] = each
    measures.outcome = ends[0].finish
    return call.format.whole(head, call, [ends[stream.index] for stream in call.streams])


async def _grouped(
    server: Server, call: ApiCall, measures: CallMetrics, head: dict[str, Any]
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of a stream: one list for each delta, which may be empty, and one for the end."""
    ends: dict[int, Delta] = {}
    has_begun = set[int]()
    async with aclosing(_merged([_deltas(server, call, stream, measures) for stream in call.streams])) as deltas:
        async for index, each in deltas:
            yield [*call.format.events(head, call.streams[index], each, index not in has_begun)]
            has_begun.add(index)
            if each.result is not None:
                ends[index] = each
    measures.outcome = ends[0].finish
    yield [*call.format.end(head, call, [ends[stream.index] for stream in call.streams])]


async def _events(
    first: list[Event],
    groups: AsyncGenerator[list[Event], None],
    form: AnswerFormat,
    head: dict[str, Any],
    measures: CallMetrics,
) -> AsyncGenerator[Event, None]:
    """Yield the events one by one, `first` before `groups`. An error in `groups` becomes events, too."""
    for event in first:
        yield event
    try:
        async for group in groups:
            for event in group:
                yield event
    except Exception as error:
        if not isinstance(error, BlockdiffError):
            LOG.exception("%s failed", measures.id)
        status, body = error_body(error, measures.id)
        measures.failed(status, body)
        for event in form.error(head, body["error"]):
            yield event


async def _deltas(
    server: Server, call: ApiCall, stream: AnswerStream, measures: CallMetrics
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of one answer. The first one is empty: the engine has accepted the request."""
    generated = server.engine.generate(stream.request, call.body.stream_frames, True, call.terms)
    async with aclosing(generated) as events:
        async for event in events:
            if isinstance(event, Accepted):
                yield Delta()
            elif isinstance(event, Step):
                yield stream.frame(event)
            elif isinstance(event, CommittedCanvas):
                measures.canvas()
                if call.body.stream_frames:
                    yield stream.committed(event)
                yield stream.canvas(event)
            elif isinstance(event, Result):
                measures.results.append(event)
                yield stream.end(event)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) for the items of several streams as they come. The first error ends all."""
    if len(streams) == 1:  # without tasks
        async with aclosing(streams[0]) as only:
            async for each in only:
                yield 0, each
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(1)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for each in stream:
                    await queue.put((number, each))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_left(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client leaves before, cancel the work and return None."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, watcher):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


def usage_of(call: ApiCall, ends: Sequence[Delta]) -> Usage:
    """Sum the counts of all answers. A prompt counts once, however many answers it gets.

    ends: the last delta of each answer, in the order of the prompts, `n` for each.
    """
    results = [end.result for end in ends if end.result is not None]
    of_prompts = results[:: call.body.n]
    prompt, completion = sum(each.prompt_tokens for each in of_prompts), sum(len(each.tokens) for each in results)
    tokenizer = call.streams[0].settings.tokenizer
    thoughts = [each.reasoning for each in results if each.reasoning]
    reasoning = 0
    if tokenizer is not None:
        reasoning = sum(len(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in thoughts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=sum(each.cached_tokens for each in of_prompts)),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=reasoning),
        denoising_steps=sum(sum(each.steps) for each in results),
        forwards=sum(each.forwards.total for each in results),
    )
