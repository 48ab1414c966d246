"""AsyncEngine: many readers, one thread; what goes wrong with one request or one engine stays there."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from blockdiff.checkpoint import init
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import EngineError, Full, RequestError, TimedOut
from blockdiff.sampling import CommittedCanvas, Engine, Request, Result, Sampler, Step
from blockdiff.serving import AsyncEngine, preparing
from blockdiff.serving.async_engine import Terms
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.scripted import ScriptedModel, ScriptedPages, random_script

pytestmark = pytest.mark.quick

L = 8
GENERATION = Generation(max_steps=3, max_new_tokens=2 * L, eos_ids=(1,))


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    model = init(tiny_config(L, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    return Sampler(model, None, GENERATION)


def request(id: str, **options) -> Request:
    return Request(id, **{"tokens": [*range(12, 12 + len(id) * 5)], "seed": 7, **options})


async def events_of(engine: AsyncEngine, asked: Request, watch: bool = False) -> list:
    return [event async for event in engine.generate(asked, watch)]


def test_an_engine_whose_threads_cannot_start_says_so_at_its_start(sampler, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    engine = AsyncEngine(sampler)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(EngineError, match="new thread"):
        engine.start()


def with_engine(sampler: Sampler, use: Callable[[AsyncEngine], Awaitable], **options):
    async def run():
        async with AsyncEngine(sampler, **options) as engine:
            return await asyncio.wait_for(use(engine), 60)

    return asyncio.run(run())


def test_each_reader_gets_the_events_of_its_request(sampler):
    asked = [request(id) for id in ("a", "bb", "ccc")] + [request("d", best_of=2)]
    alone = sampler.generate(asked)

    async def ask(engine):
        return await asyncio.gather(*(events_of(engine, each, watch=each.id == "a") for each in asked))

    found = with_engine(sampler, ask, max_rows=2)
    assert [replace(events[-1], logprobs=None) for events in found] == [replace(each, logprobs=None) for each in alone]
    assert all(isinstance(event, CommittedCanvas) for events in found[1:] for event in events[:-1])
    assert sum(isinstance(event, Step) for event in found[0]) == sum(alone[0].steps)
    assert {event.id for event in found[3]} == {"d", "d draw 1"}


def test_a_request_that_cannot_be_answered_raises_for_its_reader_alone(sampler):
    async def ask(engine):
        wrong = [request("a", noise=2.0), request("b", prompt="both"), Request("c", prompt="no tokenizer")]
        asked = [*wrong, request("d"), request("d")]
        return await asyncio.gather(*(events_of(engine, each) for each in asked), return_exceptions=True)

    *refused, answered, double = with_engine(sampler, ask)
    assert [type(error) for error in (*refused, double)] == [RequestError] * 4
    assert "id 'd' is being answered" in str(double)
    assert answered[-1].finish_reason == "length"


def test_who_stops_reading_ends_the_request_within_a_step_and_its_pages_are_free(sampler):
    gate, before = threading.Event(), []

    def wait(inner: Engine) -> None:  # holds the engine between two steps until the reader has left
        before.append(inner.denoised_canvases)
        gate.wait(60)

    async def ask(engine):
        stream = engine.generate(request("a", max_new_tokens=64 * L), watch=True)
        await anext(stream)
        held = asyncio.create_task(engine.thread.call(wait))
        await asyncio.sleep(0)
        await stream.aclose()
        gate.set()
        await held
        return await engine.thread.call(
            lambda inner: (inner.unfinished, inner.pages.statistics.pages, inner.denoised_canvases)
        )

    unfinished, pages, forwards = with_engine(sampler, ask)
    assert not unfinished and not any(pages.values())
    assert forwards == before[0] < 64 * 3


def test_an_engine_that_fails_fails_those_that_run_and_the_next_are_answered(sampler, monkeypatch, caplog):
    step, steps = Engine.step, []

    def failing(engine):
        steps.append(engine)
        if len(steps) == 2:
            raise RuntimeError("a kernel broke")
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)

    async def ask(engine):
        lost = await asyncio.gather(*(events_of(engine, request(id)) for id in "ab"), return_exceptions=True)
        return lost, await events_of(engine, request("a")), engine.thread.is_working

    lost, answered, is_working = with_engine(sampler, ask, max_rows=2)
    assert [type(error) for error in lost] == [EngineError] * 2 and "its log says why" in str(lost[0])
    assert answered[-1] == sampler.generate([request("a")])[0] and is_working
    assert "a kernel broke" not in str(lost[0]) and "a kernel broke" in caplog.text and steps[0] is not steps[-1]


def test_an_engine_that_fails_when_a_reader_leaves_is_made_anew(sampler, monkeypatch):
    monkeypatch.setattr(Engine, "cancel", lambda engine, id: 1 / 0)

    async def ask(engine):
        stream = engine.generate(request("a", max_new_tokens=64 * L))
        await anext(stream)
        await stream.aclose()
        return await events_of(engine, request("a"))

    assert with_engine(sampler, ask)[-1] == sampler.generate([request("a")])[0]


def test_logits_that_are_not_finite_end_the_row_that_has_them_alone():
    script = random_script(L, 40, {}, {})

    def broken(last: int, canvas: int, step: int) -> torch.Tensor:
        return script(last, canvas, step) * (float("nan") if last == 11 else 1.0)

    model = ScriptedModel(broken, L, 40)

    async def ask(engine):
        return await asyncio.gather(*(events_of(engine, Request(n, tokens=[n])) for n in (10, 11, 12)))

    found = with_engine(Sampler(model, None, GENERATION), ask, pages=ScriptedPages(model))
    assert "not finite" in found[1][-1].error
    assert all(isinstance(found[n][-1], Result) and found[n][-1].error is None for n in (0, 2))


def test_more_than_may_wait_are_told_to_come_later(sampler):
    async def ask(engine):
        many = [events_of(engine, request(f"n{n}")) for n in range(4)]
        return await asyncio.gather(*many, return_exceptions=True)

    found = with_engine(sampler, ask, max_rows=1, max_waiting=2)
    assert [type(each) for each in found] == [list] * 3 + [Full]


def test_closing_tells_those_that_still_read(sampler):
    async def ask(engine):
        stream = engine.generate(request("a", max_new_tokens=64 * L))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            [event async for event in stream]
        with pytest.raises(EngineError, match="closed"):
            await events_of(engine, request("b"))

    with_engine(sampler, ask)


def test_closing_tells_those_whose_request_is_still_prepared(sampler, monkeypatch):
    begun, gate = queue.SimpleQueue(), threading.Event()

    def waiting(*of):
        begun.put(of)
        gate.wait(60)
        return prepare(*of)

    prepare = AsyncEngine._prepare
    monkeypatch.setattr(AsyncEngine, "_prepare", waiting)

    async def ask(engine):
        asked = [asyncio.create_task(events_of(engine, request(f"a{n}"))) for n in range(4)]  # there are two threads
        await asyncio.to_thread(begun.get, timeout=60)
        await engine.close()
        gate.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [str(error) for error in with_engine(sampler, ask)] == ["the engine was closed; ask another one"] * 4
    assert begun.qsize() < 2  # what waited was not prepared


def test_the_time_of_a_request_is_over_while_it_is_prepared_too(sampler, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(AsyncEngine, "_prepare", lambda *_: gate.wait(5))

    async def ask(engine):
        with pytest.raises(TimedOut, match=r"0\.05 s"):
            await anext(engine.generate(request("a"), terms=Terms(seconds=0.05)))
        return gate.set()

    with_engine(sampler, ask)


def test_constraints_are_prepared_by_turns(sampler, monkeypatch):
    """The first one of somebody who comes last is next, before what waits of somebody with several."""
    monkeypatch.setitem(preparing.THREADS, "heavy", 1)
    gate, prepare, begun = threading.Event(), AsyncEngine._prepare, []

    def slow(engine, request, *others):
        begun.append(request.id)
        gate.wait(60)
        return prepare(engine, request, *others)

    monkeypatch.setattr(AsyncEngine, "_prepare", slow)

    async def ask(engine):
        async def of(id):
            return [event async for event in engine.generate(request(id, banned=(5,)), terms=Terms(owner=id[0]))]

        asked = [asyncio.create_task(of(id)) for id in ("a0", "a1", "a2", "b0")]
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(*asked)

    with_engine(sampler, ask)
    assert begun == ["a0", "b0", "a1", "a2"]


def test_answers_by_turns_are_those_alone(sampler):
    asked = [request(f"n{n}", tokens=[12, 13, 14 + n], max_new_tokens=4 * L) for n in range(8)]
    alone = sampler.generate(asked)

    async def ask(engine):
        async def of(number, each):
            return [event async for event in engine.generate(each, terms=Terms(owner="a" if number < 6 else "b"))][-1]

        return await asyncio.gather(*(of(number, each) for number, each in enumerate(asked)))

    assert with_engine(sampler, ask, max_rows=2) == alone


def test_an_owner_may_have_so_many_answers_and_an_answer_may_take_so_long(sampler):
    async def ask(engine):
        first = engine.generate(request("a", max_new_tokens=64 * L), terms=Terms(owner="a"))
        await anext(first)
        with pytest.raises(Full, match="1 answers"):
            await anext(engine.generate(request("bb"), terms=Terms(owner="a")))
        await first.aclose()
        with pytest.raises(TimedOut, match=r"0\.05 s"):
            [
                event
                async for event in engine.generate(request("ccc", max_new_tokens=200 * L), terms=Terms(seconds=0.05))
            ]
        return engine.unanswered

    assert with_engine(sampler, ask, max_of_owner=1) == 0


def test_who_waits_for_a_thread_that_does_not_come_back_is_told_so_in_time(sampler, monkeypatch):
    """Two requests hold both threads, and the third is answered although they go on."""
    gate, prepare = threading.Event(), AsyncEngine._prepare

    def slow(engine, asked, *others):
        if asked.id != "c":
            gate.wait(60)
        return prepare(engine, asked, *others)

    monkeypatch.setattr(AsyncEngine, "_prepare", slow)

    async def ask(engine):
        async def of(id):
            return [event async for event in engine.generate(request(id, banned=(5,)))]

        held = [asyncio.create_task(of(id)) for id in ("a", "b")]
        await asyncio.sleep(0.05)
        with pytest.raises(Full):
            await asyncio.wait_for(of("c"), 20)
        gate.set()
        return [type(events[-1]) for events in await asyncio.gather(*held)]

    assert with_engine(sampler, ask, prepare_seconds=0.2) == [Result, Result]
