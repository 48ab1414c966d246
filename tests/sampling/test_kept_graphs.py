"""Calls of a sampler go on with steps that calls before them have captured, and answer as if there had been none."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockdiff.errors import EngineError, RequestError
from blockdiff.models.pages import Pages
from blockdiff.models.weights import notice_steps
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
    assert sampler._engine is not None
    return sampler._engine.pages


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


def test_calls_of_any_size_have_one_engine(model, recorder):
    sampler = sampler_of(model)
    for count in (4, 1, 4, 6, 2):
        assert sampler.generate(requests_of(count)) == uncaptured(model, count)
        engine = sampler._engine
        assert engine is not None and engine.most_rows == (4 if count < 6 and engine.most_rows < 6 else 6)
    kept_pages(sampler).check()


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
    notice_steps(optimiser)
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


def test_calls_in_turns_share_the_engine_and_each_gets_its_own_events(model, recorder):
    expected, sampler = uncaptured(model, 2, batch_size=1), sampler_of(model)
    sampler.generate(requests_of(2), batch_size=1)
    engine, told = sampler._engine, ([], [])
    streams = [sampler.stream(requests_of(2), batch_size=1, on_canvas=told[n].append) for n in range(2)]
    for place in range(2):
        for stream in streams:
            assert next(stream) == (place, expected[place])
    assert sampler._engine is engine and told[0] == told[1] != []
    assert [event.finish_reason for event in told[0] if event.finish_reason] == [r.finish_reason for r in expected]
    next(stream := sampler.stream(requests_of(2), batch_size=1))
    assert sampler.generate(requests_of(5)) == uncaptured(model, 5)  # which needs larger buffers
    assert next(stream) == (1, expected[1]) and sampler._engine is engine and not engine.unfinished


def test_a_stream_that_is_left_takes_nothing_from_a_call_beside_it(model):
    expected, sampler = uncaptured(model, 3), sampler_of(model)
    left, kept = sampler.stream(requests_of(3), batch_size=1), sampler.stream(requests_of(3), batch_size=2)
    next(left)
    first = next(kept)
    left.close()
    assert dict([first, *kept]) == dict(enumerate(expected))
    assert sampler._engine is not None and not sampler._engine.unfinished
    kept_pages(sampler).check()
    assert not kept_pages(sampler)._rows


def test_a_call_that_begins_beside_another_waits_for_the_memory_of_pages_that_were_given(model):
    """Together they do not fit: the second is neither refused nor answered in pages of its own."""
    request = replace(requests_of(1)[0], max_new_tokens=LIVELY.max_new_tokens)
    [expected] = uncaptured(model, 1)
    tokens = len(request.tokens) + LIVELY.max_new_tokens + 16
    pages = Pages(model, page_tokens=8, capacity=-(-tokens // 8) * 8)
    sampler = sampler_of(model, pages=pages)
    first, second = sampler.stream([request] * 2), sampler.stream([request] * 2)
    assert next(first) == (0, expected) and next(second) == (0, expected)
    assert next(first) == (1, expected) and next(second) == (1, expected)
    assert kept_pages(sampler) is pages and sampler.generate([request]) == [expected]


def test_memory_is_given_back_when_asked_and_a_call_may_go_without_captured_steps(model, recorder):
    sampler = sampler_of(model)
    sampler.generate(requests_of(1), graphs=False)
    assert recorder.runs == 0
    sampler.generate(requests_of(1))
    assert recorder.runs and sampler._engine is not None and sampler._engine.captures
    sampler.release()
    assert sampler._engine is None


def test_pages_that_were_given_keep_prompts_and_steps_for_the_next_call(model, recorder):
    pages = Pages(model, page_tokens=8, capacity=4096)
    sampler, expected = sampler_of(model, pages=pages), uncaptured(model, 3)
    for _ in range(3):
        done = recorder.captures
        assert sampler.generate(requests_of(3)) == expected
    assert recorder.captures == done and not pages._rows and pages.statistics.reused_tokens > 0
    pages.check()


def test_one_engine_answers_call_after_call_with_pages_for_the_largest(model):
    sampler = sampler_of(model)
    expected = uncaptured(model, 3)
    engines, capacities = [], []
    for count, how in ((2, {}), (1, {}), (2, {"batch_size": 1}), (3, {}), (2, {})):
        assert sampler.generate(requests_of(3)[:count], **how) == expected[:count]
        engines.append(sampler._engine)
        capacities.append(sampler._engine.capacity)
    sampler.generate([replace(request, tokens=request.tokens * 40) for request in requests_of(1)])
    assert {*engines, sampler._engine} == {engines[0]}
    assert capacities == sorted(capacities) and capacities[0] < capacities[-1] < sampler._engine.capacity


def test_a_model_that_moves_between_calls_gets_its_engine_anew_and_none_under_a_call():
    model = small_model().float()
    sampler, request = sampler_of(model), requests_of(1)
    stream = sampler.stream(requests_of(3), batch_size=1)
    next(stream)
    model.double()
    with pytest.raises(RequestError, match="have changed"):
        sampler.generate(request)
    stream.close()
    assert sampler.generate(request) == uncaptured(model, 1)


def test_a_call_that_breaks_off_within_a_step_leaves_no_engine_and_one_that_stops_between_steps_does(
    model, monkeypatch
):
    sampler = sampler_of(model)
    stream = sampler.stream(requests_of(3), batch_size=1)
    next(stream)
    stream.close()
    engine = sampler._engine
    assert not engine.unfinished and not engine.events()
    other = sampler.stream(requests_of(3), batch_size=1)
    next(other)
    monkeypatch.setattr(engine._proposer, "propose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.generate(requests_of(3), batch_size=1)
    assert sampler._engine is None
    with pytest.raises(EngineError, match="another call"):
        list(other)
    assert sampler.generate(requests_of(3)) == uncaptured(model, 3)


def test_calls_of_several_threads_take_turns_and_each_gets_its_answers(model):
    sampler, expected = sampler_of(model), uncaptured(model, 4)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(sampler.generate, requests_of(4)) for _ in range(8)]
        assert all(call.result() == expected for call in calls)
    assert sampler._engine is not None and not sampler._engine.unfinished


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
