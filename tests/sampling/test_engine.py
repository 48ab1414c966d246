"""The engine: whoever shares its steps, a request gets the answer that the loop in lockstep gives it alone."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import EngineError, Full, RequestError
from blockdiff.models.page_buffers import StepBuffers
from blockdiff.models.pages import Pages
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from blockdiff.sampling.request import Forwards, Request, Result
from blockdiff.sampling.rounds.batch import CanvasBatch
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.trace import CommittedCanvas, Step
from tests.oracles.lockstep import generate_in_lockstep
from tests.support.families import small_model
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config
from tests.support.scripted import ScriptedModel, ScriptedPages, random_script
from tests.support.soak import soak

pytestmark = pytest.mark.quick

L, V, EOS = 8, 384, 1
# Settings under which a random model stops early now and then, and meets an eos now and then.
LIVELY = Generation(
    max_steps=6, max_new_tokens=3 * L, stability=0, confidence=0.8, entropy_bound=1.0, eos_ids=tuple(range(1, 12))
)


@pytest.fixture(scope="module")
def model():
    """A random model in fp64, whose answers no rounding of another batch can change."""
    theirs = oracle(tiny_config(L, **TWO_LAYERS), seed=2)
    with torch.no_grad():  # as in test_parity: a weaker signal keeps random weights from being chaotic
        theirs.model.decoder.self_conditioning.down_proj.weight *= 0.1
        theirs.model.decoder.norm.weight *= 2
    return ours(theirs)


def requests_of(count: int, longest: int = 60, seed: int = 5, vocabulary: int = V) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        Request(n, tokens=torch.randint(12, vocabulary, (length,), generator=generator).tolist(), seed=n)
        for n, length in enumerate(lengths)
    ]


def alone(model, requests: list[Request], generation: Generation = LIVELY) -> dict[str | int, Result]:
    """The answers of the loop in lockstep, each request by itself."""
    settings = sampling_settings(model, None, generation)
    results = {}
    for request in requests:
        [asked] = prepare_sequences(request, settings)
        generate_in_lockstep(model, settings, [asked])
        results[request.id] = asked.result(settings)
    return results


def finished(engine: Engine) -> dict[str | int, Result]:
    """The results of all that is asked, in the order in which they came."""
    results = {}
    while True:
        is_unfinished = engine.step()
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
        if not is_unfinished:
            return results


def answers(engine: Engine, requests: list[Request]) -> dict[str | int, Result]:
    for request in requests:
        engine.submit(request)
    return finished(engine)


def nothing_is_left(engine: Engine) -> None:
    """Every page is free or cached, and nobody is admitted."""
    engine.pages.check()
    assert all(count == 0 for count in engine.pages.statistics.pages.values())
    assert (
        not engine.unfinished
        and not engine._sequences
        and not engine._scheduler.admitted
        and not engine._scheduler.waiting
    )


@pytest.fixture(scope="module")
def nine(model):
    """Nine requests, and what each gets alone."""
    requests = requests_of(9)
    return requests, alone(model, requests)


@pytest.mark.parametrize("options", [{}, {"max_rows": 3}, {"max_rows": 1}, {"max_rows": 4, "chunk_tokens": 8}])
def test_every_request_gets_its_answer_in_any_batch(model, nine, options):
    requests, expected = nine
    assert len({count for result in expected.values() for count in result.steps}) > 2
    assert {result.finish_reason for result in expected.values()} == {"eos", "length"}
    engine = Engine(model, None, LIVELY, page_tokens=8, **options)
    assert answers(engine, requests) == expected
    nothing_is_left(engine)
    engine = Engine(model, None, LIVELY, page_tokens=8, **options)
    assert answers(engine, requests[::-1]) == expected


@pytest.mark.parametrize(
    "family, strategy",
    [
        ("minimax_m3 denoising", "ddim"),
        ("qwen3 sliding, denoising", "entropy_bound:top_p=0.7,min_p=0.05"),
        ("minimax_m3 dense, denoising", "next_token:temperature=0.8,top_p=0.9"),
    ],
)
def test_in_fp64_company_changes_no_token_and_no_score_of_any_family(family, strategy):
    """Sums in fp32 would be rounded otherwise among other neighbours, pages and chunks, and flip near-ties."""
    model, settings = small_model(family), replace(LIVELY, max_steps=3, max_new_tokens=L)
    requests = [replace(request, scores=True) for request in requests_of(4, longest=25, vocabulary=90)]
    company = Engine(model, None, settings, strategy=strategy, max_rows=3, page_tokens=3, chunk_tokens=5)
    together = answers(company, requests)
    for request in requests:
        alone = answers(Engine(model, None, settings, strategy=strategy), [request])[request.id]
        found = together[request.id]
        assert replace(found, logprobs=None) == replace(alone, logprobs=None)
        assert found.logprobs == pytest.approx(alone.logprobs, rel=1e-12)
        assert found.logprobs != torch.tensor(found.logprobs, dtype=torch.float32).tolist()


def test_requests_that_arrive_while_others_run_get_the_same_answers(model):
    requests = requests_of(6)
    engine = Engine(model, None, LIVELY, max_rows=4)
    results = {}
    for request in requests:
        engine.submit(request)
        engine.step()
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    assert results | finished(engine) == alone(model, requests)


def test_a_prefix_that_others_have_encoded_is_shared_and_changes_nothing(model):
    head = requests_of(1, seed=9)[0].tokens[:1] * 40
    requests = [replace(request, tokens=[*head, *request.tokens]) for request in requests_of(6)]
    engine = Engine(model, None, LIVELY, page_tokens=8, max_rows=2)
    assert answers(engine, requests) == alone(model, requests)
    assert engine.pages.statistics.reused_tokens >= 4 * 40  # all but those that were encoded together at first
    nothing_is_left(engine)


def test_a_beginning_that_several_new_rows_have_in_common_is_encoded_once(model):
    start = list(range(100, 116))  # two pages
    asked = [Request(n, tokens=[*start, 20 + n, 30 + n, 40 + n], seed=n, max_new_tokens=L) for n in range(5)]
    engine = Engine(model, None, LIVELY, page_tokens=8)
    assert answers(engine, asked) == alone(model, asked)
    assert engine.encoded_tokens == 16 + 5 * 3
    # Another row that begins alike, and one that parts from them within the second page.
    more = [replace(asked[0], id=7), replace(asked[1], id=8, tokens=[*start[:12], 50, 51, 52, 53, 54])]
    assert answers(engine, more) == alone(model, more)
    assert engine.encoded_tokens - 31 <= 3 + 9 + 6  # 3 and 9 of their own, and what padding adds
    nothing_is_left(engine)


def test_a_row_that_is_preempted_is_resumed_with_the_same_answer(model):
    requests = requests_of(8, longest=40)
    engine = Engine(model, None, LIVELY, page_tokens=8, capacity=112, max_rows=8)
    assert answers(engine, requests) == alone(model, requests)
    assert engine._scheduler.preemptions > 0
    nothing_is_left(engine)


def test_a_page_that_a_request_found_counts_once_however_often_it_waits_or_is_preempted(model):
    head = list(range(100, 116))
    own = requests_of(8, longest=40)
    shared = [replace(request, id=f"s{request.id}", tokens=[*head, *request.tokens]) for request in own]
    engine = Engine(model, None, LIVELY, page_tokens=8, capacity=112, max_rows=8)
    found = answers(engine, [*own, *shared])
    assert engine._scheduler.preemptions > 0
    assert [found[request.id].cached_tokens for request in own] == [0] * 8
    assert {found[request.id].cached_tokens for request in shared} == {0, 16}


@pytest.mark.parametrize(
    ("strategy", "most"),
    [(None, (2 + 1) * 6 + 1), ("verified:steps=1", 24), ("next_token", 6)],  # two canvases, its own, and its encoding
)
def test_an_owner_of_many_answers_delays_anothers_first_canvas_by_two_canvases_at_most(model, strategy, most):
    """Counted in steps; all answers are those alone, which the tests of the other strategies look at with less work."""
    engine = Engine(model, None, LIVELY, strategy=strategy, page_tokens=8, max_rows=4)
    flood, late = requests_of(32, longest=12), Request("late", tokens=[12, 13, 14], seed=1)

    def submit(request: Request, owner: str) -> None:
        draws = prepare_sequences(request, engine.settings)
        draws[0].owner = owner
        engine.submit(request, draws=draws)

    for request in flood:
        submit(request, "a")
    for _ in range(8):
        engine.step()
    submit(late, "b")
    steps, events = 0, engine.events()
    while not any(isinstance(event, CommittedCanvas) and event.id == "late" for event in events):
        engine.step()
        steps += 1
        events += engine.events()
    assert steps <= most
    if strategy is None:
        results = {event.id: event for event in events if isinstance(event, Result)} | finished(engine)
        assert results == alone(model, [*flood, late])
        nothing_is_left(engine)


def test_what_can_never_fit_into_memory_is_refused(model):
    engine = Engine(model, None, LIVELY, page_tokens=8, capacity=64)
    with pytest.raises(RequestError, match=r"41 .*24 .*65 .*64"):
        engine.submit(Request("a", tokens=[20] * 41))
    engine.submit(Request("b", tokens=[20] * 40))
    assert finished(engine)["b"].error is None


@pytest.mark.parametrize("name", ["max_rows", "max_waiting", "page_tokens", "chunk_tokens"])
@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_a_count_of_nothing_is_refused_by_its_name(model, name, count):
    with pytest.raises(ValueError, match=f"{name} .* 1, got {count}"):
        Engine(model, generation=LIVELY, **{name: count})


def test_a_long_prompt_is_encoded_in_pieces_while_others_go_on(model):
    engine = Engine(model, None, replace(LIVELY, max_steps=12, confidence=1e-9), chunk_tokens=16, tokens_per_step=24)
    assert engine._scheduler.max_rows == 3
    engine.submit(Request("short", tokens=[20, 30]), watch=True)
    engine.step()
    engine.events()
    engine.submit(Request("long", tokens=[20] * 100), watch=True)
    steps = []
    for _ in range(9):
        engine.step()
        steps.append([event.id for event in engine.events() if isinstance(event, Step)])
    # a piece of 16 tokens in each step, and the short one is denoised in all of them
    assert steps == [["short"]] * 6 + [["short", "long"]] * 3


def test_steps_and_canvases_are_told_in_order_and_only_of_those_that_are_watched(model):
    watched, other = requests_of(2)
    engine = Engine(model, None, LIVELY)
    engine.submit(watched, watch=True)
    engine.submit(other)
    events = []
    while engine.step():
        events += engine.events()
    events += engine.events()
    steps = [event for event in events if isinstance(event, Step)]
    result = next(event for event in events if isinstance(event, Result) and event.id == watched.id)
    assert {step.id for step in steps} == {watched.id}
    assert [(s.canvas, s.step) for s in steps] == [(c, n) for c, count in enumerate(result.steps) for n in range(count)]
    canvases = [event for event in events if isinstance(event, CommittedCanvas) and event.id == other.id]
    assert [canvas.canvas for canvas in canvases] == list(range(len(canvases))) and canvases[-1].finish_reason


def test_cancelling_ends_a_request_wherever_it_is(model):
    requests = requests_of(5)
    expected = alone(model, requests)
    engine = Engine(model, None, LIVELY, max_rows=2, page_tokens=8)
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.cancel(0) and engine.cancel(4) and not engine.cancel(0) and not engine.cancel("nobody")
    results = finished(engine)
    assert results[0].finish_reason == results[4].finish_reason == "cancelled"
    assert results[0].tokens == expected[0].tokens[: len(results[0].tokens)]
    assert {n: results[n] for n in (1, 2, 3)} == {n: expected[n] for n in (1, 2, 3)}
    nothing_is_left(engine)


def test_a_full_queue_refuses_and_a_bad_request_is_its_own_error(model):
    first, second, third = requests_of(3)
    engine = Engine(model, None, LIVELY, max_rows=1, max_waiting=2)
    engine.submit(first)
    engine.submit(second)
    with pytest.raises(Full, match="2 requests"):
        engine.submit(third)
    with pytest.raises(RequestError, match="id 0"):
        engine.submit(first)
    with pytest.raises(RequestError, match="exactly one"):
        engine.submit(Request("x"))
    engine.step()
    engine.submit(third)
    assert finished(engine) == alone(model, [first, second, third])


def test_each_request_may_have_settings_of_its_own(model):
    names = "quota", "confident:threshold=0.2", "entropy_bound:top_k=5"
    own = [{}, {"max_steps": 2}, {"max_new_tokens": L}, *({"strategy": name, "max_steps": 4} for name in names)]
    requests = [replace(request, **options) for request, options in zip(requests_of(6), own, strict=True)]
    assert answers(Engine(model, None, LIVELY), requests) == alone(model, requests)


def test_who_stops_listening_leaves_no_pages_behind(model):
    pages = Pages(model, page_tokens=L)
    sampler = Sampler(model, None, replace(LIVELY, eos_ids=()), pages=pages)
    stream = sampler.stream(requests_of(6), batch_size=2)
    next(stream)
    assert any(pages.statistics.pages.values())
    stream.close()
    pages.check()
    assert not any(pages.statistics.pages.values())
    assert len(list(sampler.stream(requests_of(2)))) == 2


def test_a_call_while_another_thread_is_in_one_is_refused_and_nothing_is_lost(model, monkeypatch):
    requests, inside, go_on = requests_of(3), threading.Event(), threading.Event()
    engine, step = Engine(model, None, LIVELY), CanvasBatch.propose
    for request in requests[:2]:
        engine.submit(request)

    def slow(batch: CanvasBatch, *given: object):
        inside.set()
        assert go_on.wait(60)
        return step(batch, *given)

    monkeypatch.setattr(CanvasBatch, "propose", slow)
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert inside.wait(60)
    for call in (
        engine.step,
        engine.events,
        engine.close,
        lambda: engine.submit(requests[2]),
        lambda: engine.cancel(0),
    ):
        with pytest.raises(EngineError, match="another thread"):
            call()
    go_on.set()
    thread.join()
    assert answers(engine, requests[2:]) == alone(model, requests)


def test_after_its_end_an_engine_takes_no_call(model):
    engine = Engine(model, None, LIVELY)
    engine.submit(requests_of(1)[0])
    engine.step()
    engine.close()
    engine.close()
    nothing_is_left(engine)
    for call in (engine.step, engine.events, lambda: engine.submit(requests_of(1)[0])):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_what_is_no_request_is_refused_in_words(model):
    with pytest.raises(RequestError, match=r"Request.*str"):
        Engine(model, None, LIVELY).submit("a text")
    with pytest.raises(RequestError, match=r"id .*\[1\]"):
        Request([1], prompt="a text")


def test_strategies_of_requests_that_are_gone_are_forgotten(model):
    engine = Engine(model, None, replace(LIVELY, max_new_tokens=L), max_rows=2)
    for n in range(8):
        engine.submit(Request(n, tokens=[20], strategy=f"entropy_bound:t_max={0.8 + n / 100}"))
    finished(engine)
    assert len(engine._proposer._shapes) <= 4


def ended(engine: Engine, requests: list[Request]) -> dict[str | int, Result]:
    """The results of requests that all end within a few steps."""
    results = {}
    for request in requests:
        engine.submit(request)
    for _ in range(60):
        is_unfinished = engine.step()
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
        if not is_unfinished:
            nothing_is_left(engine)
            return results
    raise AssertionError("the engine does not end")


def test_logits_that_are_not_finite_end_their_request_and_no_other():
    script = random_script(L, 40, {}, {10: 0, 11: 2})

    def broken(last: int, canvas: int, step: int) -> torch.Tensor:
        return script(last, canvas, step) * (float("nan") if (last, canvas, step) == (11, 1, 1) else 1.0)

    results = []
    for each in (script, broken):
        model = ScriptedModel(each, L, 40)
        engine = Engine(model, None, Generation(max_steps=6, max_new_tokens=2 * L), pages=ScriptedPages(model))
        results.append(answers(engine, [Request(n, tokens=[n]) for n in (10, 11, 12)]))
        assert not engine.pages.rows
    whole, some = results
    assert some[10] == whole[10] and some[12] == whole[12]
    assert "not finite" in str(some[11].error) and "canvas 2, step 2" in str(some[11].error)


def test_a_soak_of_random_requests_leaks_no_page_and_every_answer_is_the_oracles(model):
    found = soak(model, 60)
    assert found.wrong == [] and found.leaked == 0
    assert found.answered + found.cancelled == 60 and found.cancelled and found.preemptions and found.reused_tokens


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"strategy": "next_token"}, {}),
        ({}, {"best_of": 2}),
    ],
)
def test_forwards_are_the_calls_that_the_model_ran(model, monkeypatch, options, asked):
    calls = Counter[str]()

    def counted(kind, function):
        return lambda *given, **more: (calls.update([kind]), function(*given, **more))[1]

    monkeypatch.setattr(Pages, "encode", counted("encode", Pages.encode))
    monkeypatch.setattr(StepBuffers, "denoise", counted("denoise", StepBuffers.denoise))
    settings = replace(LIVELY, max_new_tokens=3 * L)
    engine = Engine(model, None, settings, max_rows=1, chunk_tokens=16, **options)
    engine.submit(Request("a", tokens=[20] * 40, **asked))
    (result,) = finished(engine).values()
    assert result.forwards == Forwards(calls["denoise"], calls["encode"])
    assert calls["encode"] >= 3 and result.tokens_per_forward == len(result.tokens) / calls.total()
    if not asked and len(options) == 0:
        assert result.forwards.denoise == sum(result.steps)


def ends_by_turns(model, owners: str, lengths: list[int], **options) -> list[int]:
    """The order in which requests of owners, with prompts of such lengths, are answered; alone is what they answer."""
    settings = Generation(max_steps=2, max_new_tokens=L, eos_ids=())
    engine = Engine(model, generation=settings, page_tokens=8, chunk_tokens=16, tokens_per_step=16, **options)
    requests = [Request(n, tokens=[12 + n] * length, seed=n) for n, length in enumerate(lengths)]
    for owner, request in zip(owners, requests, strict=True):
        draws = prepare_sequences(request, engine.settings, 0, model.device)
        draws[0].owner = owner
        engine.submit(request, draws=draws)
    results = []
    while engine.unfinished:
        engine.step()
        results += [each for each in engine.events() if isinstance(each, Result)]
    assert {each.id: each for each in results} == alone(model, requests, settings)
    return [each.id for each in results]


@pytest.mark.parametrize("options", [{"max_rows": 2}, {"max_rows": 1}, {"max_rows": 2, "capacity": 250}])
def test_long_prompts_of_one_owner_delay_no_short_one_of_another(model, options):
    """Nor where they hold all places, or all memory."""
    assert ends_by_turns(model, "aab", [200, 200, 10], **options)[0] == 2


def test_an_owners_short_prompt_does_not_wait_for_its_long_one_nor_that_for_all_short_ones(model):
    order = ends_by_turns(model, "aaaaaaaa", [100, *[10] * 7], max_rows=8)
    assert order[0] == 1 and order.index(0) == 5
