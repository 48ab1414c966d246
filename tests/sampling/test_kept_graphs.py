"""Calls of a sampler go on with steps that calls before them have captured, and answer as if there had been none."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockdiff.models.pages import Pages
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.request import Result
from blockdiff.sampling.sampler import Sampler
from tests.sampling.test_graphs import LIVELY, model, recorder, requests_of, small_model

pytestmark = pytest.mark.quick
__all__ = ["model", "recorder"]  # fixtures


def sampler_of(model: Any, **given: Any) -> Sampler:
    return Sampler(model, None, LIVELY, **given)


def uncaptured(model: Any, count: int, **how: Any) -> list[Result]:
    return sampler_of(model).generate(requests_of(count), graphs=False, **how)


def kept_pages(sampler: Sampler) -> Pages:
    assert sampler._idle is not None
    return sampler._idle.engine.pages


def test_a_call_like_those_before_captures_nothing_and_answers_the_same(model, recorder):
    expected, sampler = uncaptured(model, 3), sampler_of(model)
    assert recorder.runs == 0
    for _ in range(2):  # what came once in the first call is captured in the second
        assert sampler.generate(requests_of(3)) == expected
    assert recorder.captures > 1
    done, pages = (recorder.runs, recorder.captures), kept_pages(sampler)
    replays = recorder.replays
    assert sampler.generate(requests_of(3)) == expected
    assert (recorder.runs, recorder.captures) == done and recorder.replays > replays
    assert kept_pages(sampler) is pages and not pages._rows
    pages.check()


def test_smaller_calls_share_what_larger_ones_have_and_larger_ones_begin_anew(model, recorder):
    sampler = sampler_of(model)
    assert sampler.generate(requests_of(4)) == uncaptured(model, 4)
    pages = kept_pages(sampler)
    assert sampler.generate(requests_of(1)) == uncaptured(model, 1) and kept_pages(sampler) is pages
    assert sampler.generate(requests_of(4)) == uncaptured(model, 4) and kept_pages(sampler) is pages
    assert sampler.generate(requests_of(6)) == uncaptured(model, 6) and kept_pages(sampler) is not pages


def test_other_weights_count_wherever_they_lie(recorder):
    model, other = small_model(), small_model(seed=4)
    sampler = sampler_of(model)
    for _ in range(2):
        sampler.generate(requests_of(2))
    pages, captures = kept_pages(sampler), recorder.captures
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    expected = uncaptured(other, 2)
    assert sampler.generate(requests_of(2)) == expected and kept_pages(sampler) is pages  # in place
    model.load_state_dict(small_model().state_dict(), assign=True)
    captures = recorder.captures
    assert sampler.generate(requests_of(2)) == uncaptured(small_model(), 2) != expected
    assert recorder.captures > captures


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_step_between_calls_counts_in_pages_that_are_kept(fused):
    model = small_model()
    pages = Pages(model, page_tokens=8, capacity=4096)
    optimiser = torch.optim.AdamW(model.parameters(), 0.05, fused=fused)
    sampler, engine = sampler_of(model, pages=pages), Engine(model, None, LIVELY, page_tokens=8)
    before = None
    for _ in range(2):
        expected = uncaptured(model, 3)
        assert sampler.generate(requests_of(3)) == expected != before
        for request in requests_of(3):
            engine.submit(request)
        while engine.step():
            pass
        ended = {event.id: event for event in engine.events() if isinstance(event, Result)}
        assert [ended[n].tokens for n in range(3)] == [each.tokens for each in expected]
        before = expected
        model.unembed(model.encode(torch.tensor([requests_of(1)[0].tokens])).hidden).square().mean().backward()
        optimiser.step()
    assert not pages._rows


def test_calls_in_turns_have_memory_of_their_own(model, recorder):
    expected, sampler = uncaptured(model, 2, batch_size=1), sampler_of(model)
    sampler.generate(requests_of(2), batch_size=1)
    streams = [sampler.stream(requests_of(2), batch_size=1) for _ in range(2)]
    for place in range(2):
        for stream in streams:
            assert next(stream) == (place, expected[place])
    for stream in streams:
        stream.close()
    assert sampler.generate(requests_of(2), batch_size=1) == expected


def test_memory_is_given_back_when_asked_and_for_calls_that_capture_nothing(model, recorder):
    sampler = sampler_of(model)
    sampler.generate(requests_of(1))
    assert sampler._idle is not None and sampler._idle.engine._batch.graphs is not None
    sampler.release()
    assert sampler._idle is None
    sampler.generate(requests_of(1))
    sampler.generate(requests_of(1), graphs=False)
    assert sampler._idle is not None and sampler._idle.engine._batch.graphs is None


def test_pages_that_were_given_keep_prompts_and_steps_for_the_next_call(model, recorder):
    pages = Pages(model, page_tokens=8, capacity=4096)
    sampler, expected = sampler_of(model, pages=pages), uncaptured(model, 3)
    for _ in range(3):
        done = recorder.captures
        assert sampler.generate(requests_of(3)) == expected
    assert recorder.captures == done and not pages._rows and pages.statistics.reused_tokens > 0
    pages.check()


def test_one_engine_answers_call_after_call_and_another_only_where_it_has_to(model):
    sampler = sampler_of(model)
    expected = uncaptured(model, 3)

    def engine_after(count: int, **how: Any) -> Any:
        assert sampler.generate(requests_of(3)[:count], **how) == expected[:count]
        return sampler._idle.engine

    first = engine_after(2)
    assert engine_after(2) is first and engine_after(1) is first and engine_after(2, batch_size=1) is first
    more = engine_after(3)
    assert more is not first and engine_after(2) is more
    uncaptured_engine = engine_after(2, graphs=False)
    assert uncaptured_engine is not more and engine_after(1, graphs=False) is uncaptured_engine
    assert engine_after(1) is not uncaptured_engine
    sampler.generate([replace(request, tokens=request.tokens * 40) for request in requests_of(1)])
    assert sampler._idle.engine.capacity > first.capacity


def test_a_call_that_breaks_off_within_a_step_leaves_no_engine_and_one_that_stops_between_steps_does(
    model, monkeypatch
):
    sampler = sampler_of(model)
    stream = sampler.stream(requests_of(3), batch_size=1)
    next(stream)
    stream.close()
    engine = sampler._idle.engine
    assert not engine.unfinished and not engine.events()
    monkeypatch.setattr(engine._batch, "step", lambda now: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.generate(requests_of(3), batch_size=1)
    assert sampler._idle is None
    assert sampler.generate(requests_of(3)) == uncaptured(model, 3)


def test_calls_of_several_threads_take_turns_and_each_gets_its_answers(model):
    sampler, expected = sampler_of(model), uncaptured(model, 4)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(sampler.generate, requests_of(4)) for _ in range(8)]
        assert all(call.result() == expected for call in calls)
    assert sampler._idle is not None and not sampler._idle.engine.unfinished


def test_nothing_is_shared_of_pages_that_were_forgotten(model):
    pages, tokens = Pages(model, page_tokens=8, capacity=256), torch.arange(12, 36)
    row = pages.open()
    pages.encode([row], tokens[None], [24])
    pages.accept(row)
    pages.forget()
    pages.check()
    assert pages.reuse(pages.open(), tokens.tolist()) == 0
    pages.release(row)
    pages.forget()
    pages.check()
    row = pages.open()
    assert pages.reuse(row, tokens.tolist()) == 0 and pages.free_tokens() == 256
    pages.encode([row], tokens[None], [24])
    pages.accept(row)
    pages.check()


def test_under_autocast_no_call_reads_weights_that_one_before_has_cast(recorder):
    model, other = small_model().float(), small_model(seed=4).float()
    sampler, found, expected = sampler_of(model), [], []
    for weights in (model, other):
        model.load_state_dict(copy.deepcopy(weights.state_dict()))
        for each, answers in ((sampler, found), (sampler_of(model), expected)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                answers.append(each.generate(requests_of(1)))
    assert found == expected and found[0] != found[1] and recorder.replays
    outside = sampler_of(model).generate(requests_of(1))
    assert sampler.generate(requests_of(1)) == outside  # nor in what was captured under autocast
