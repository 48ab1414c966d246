"""An engine before its first request: its pages, by what memory and the largest calls leave, and those calls."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.checkpoint import empty, preset_config
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import BlockdiffError, EngineError, RequestError
from blockdiff.images import PlacedImage
from blockdiff.models.pages import Pages
from blockdiff.sampling import engine as engines
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.request import Request
from blockdiff.sampling.warm_up import KEPT_BYTES, MARGIN
from tests.sampling.test_engine import LIVELY, alone, answers, model, nothing_is_left, requests_of  # noqa: F401
from tests.support.recorder import Recorder

pytestmark = pytest.mark.quick
GB = 10**9


# -- the memory of pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "weights", "peak", "tokens"),
    [
        (24, 18.0, 1.5, 20_000),
        (32, 26.5, 3.0, 12_000),
        (48, 26.5, 3.0, 450_000),
        (80, 51.6, 3.0, 850_000),
        (141, 51.6, 3.0, 4_000_000),
    ],
)
def test_windows_of_32_rows_get_their_pages_and_full_layers_the_rest(monkeypatch, card, weights, peak, tokens):
    """The 26B's shapes in bf16, of which 25 of 30 layers have a window of 1,024."""
    free = int(0.99 * card * 2**30 - weights * GB)
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    pages = Pages(empty(preset_config("diffusiongemma-26b-a4b"), "torch").to(torch.bfloat16), capacity=0)
    pages.kept_free = int(MARGIN * peak * GB) + KEPT_BYTES
    pages.grow(None, rows=32, added=512)
    sizes, most = pages._page_bytes(), {name: pool.most for name, pool in pages.pools.items()}
    assert sizes == {"sliding": 128 * 25 * 8192, "full": 128 * 5 * 4096}
    taken = sum(sizes[name] * most[name] for name in most)
    assert free - taken >= pages.kept_free and free - taken - pages.kept_free < sum(sizes.values())
    assert pages.capacity >= tokens and most["sliding"] <= 32 * 11 + 13
    if card >= 48:  # a row of any length has what its windows see, beside 31 others
        assert most["sliding"] == 32 * 11 + 13 and pages.capacity == most["full"] * 128
        assert pages.capacity > 4 * (free - pages.kept_free) / sum(sizes.values()) * 128  # what all alike would hold
    else:
        assert 0 <= most["full"] - most["sliding"] <= sum(sizes.values()) / sizes["full"]  # all alike


def on_a_device(engine: Engine, monkeypatch: pytest.MonkeyPatch, free: int, peak: int) -> list[object]:
    """Let an engine's pages be those of a device with so many bytes, where each call that is measured takes so many."""
    measured = list[object]()

    def peak_of(work, device):
        work()
        measured.append(work)
        return peak

    monkeypatch.setattr(memory, "peak_of", peak_of)
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    for pool in engine.pages.pools.values():
        pool.grows = False
    return measured


def test_pages_take_what_the_largest_calls_leave_once_these_were_made(model, monkeypatch):  # noqa: F811
    engine, peak = Engine(model, None, LIVELY, page_tokens=8, max_rows=4), 10**5
    images = sum(x.numel() * 8 for x in model.config.image_side().parameters())
    free = KEPT_BYTES + images + 2 * 10**6
    measured, requests = on_a_device(engine, monkeypatch, free, peak), requests_of(6)
    assert answers(engine, requests) == alone(model, requests)
    assert len(measured) == 4  # encode, step, filtered step, verify
    assert engine.pages.kept_free == KEPT_BYTES + images + int(MARGIN * 4 * peak)  # steps launched and captured
    left = free - engine.pages.kept_free - sum(x.nbytes for pool in engine.pages.pools.values() for x in pool.tensors)
    assert abs(left) <= 2 * sum(engine.pages._page_bytes().values())  # two pages of each kind are no row's
    nothing_is_left(engine)


@pytest.mark.parametrize("free", [KEPT_BYTES, 0])
def test_a_device_without_memory_for_the_rows_is_refused_in_one_line(model, monkeypatch, free):  # noqa: F811
    engine = Engine(model, None, LIVELY, max_rows=4)
    on_a_device(engine, monkeypatch, free, 10**5)
    if not free:

        def too_much(work, device):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(memory, "peak_of", too_much)
    with pytest.raises(BlockdiffError, match=r"4 rows.*fewer"):
        engine.submit(requests_of(1)[0])


def test_long_rows_share_and_are_preempted_in_few_pages_of_their_windows(model):  # noqa: F811
    """Twelve rows of up to 400 tokens with windows of 16: three run, in pages for the windows of three."""
    prompts = requests_of(12, longest=380)
    requests = [replace(each, tokens=[*prompts[n % 3].tokens[:200], *each.tokens]) for n, each in enumerate(prompts)]
    engine = Engine(model, None, LIVELY, page_tokens=8, max_rows=3, chunk_tokens=32, capacity=704)
    assert answers(engine, requests) == alone(model, requests)
    most = {name: pool.most for name, pool in engine.pages.pools.items()}
    assert most == {"sliding": 3 * 4 + 7, "full": 88} and engine.capacity == 704
    statistics = engine.pages.statistics
    assert engine._scheduler.preemptions and statistics.evictions and statistics.reused_tokens > 200
    nothing_is_left(engine)


def test_a_run_of_images_that_no_call_has_room_for_is_refused(model):  # noqa: F811
    engine = Engine(model, None, LIVELY, page_tokens=8, max_rows=1, chunk_tokens=8, capacity=1200)
    [sequence] = prepare_sequences(Request(0, tokens=[20] * 300), engine.settings)
    assert engine.capacity == 1200 and engine.pages.holds(324, 8 + 30) and not engine.pages.holds(324, 8 + 100)
    sequence.images = [PlacedImage(SimpleNamespace(tokens=100, digest=b""), 10)]
    with pytest.raises(RequestError, match="100 tokens of images"):
        engine.enter([sequence])


# -- the calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [None, "verified"])
def test_a_warm_engine_captures_nothing_more_and_answers_as_a_cold_one(model, monkeypatch, strategy):  # noqa: F811
    recorder, told = Recorder(), []
    requests = [replace(each, tokens=each.tokens[:20]) for each in requests_of(3)]
    expected = answers(Engine(model, None, LIVELY, strategy=strategy), requests)
    monkeypatch.setattr(engines, "step_capture", lambda model: recorder)
    monkeypatch.setattr("blockdiff.kernels.span_attention.torch.SMALL_SCORES", -1)
    engine = Engine(model, None, LIVELY, strategy=strategy, max_rows=3)
    engine.warm_up(lambda *counts: told.append(counts))
    assert told == [(n, len(told) - 1) for n in range(len(told))] and len(told) == 1 + 5 + 3
    assert recorder.captures == (6 if strategy else 3)  # of verifications, too
    assert engine.denoised_canvases == 0
    nothing_is_left(engine)
    assert answers(engine, requests) == expected
    engine.submit(requests[0])
    with pytest.raises(EngineError, match="warm_up: "):
        engine.warm_up()


def form(argument: Any) -> Any:
    """The part of an argument that decides which kernel is launched: whether it is there, its dtype, a flag."""
    if is_dataclass(argument):
        return type(argument), tuple(form(getattr(argument, each.name)) for each in fields(argument))
    if isinstance(argument, tuple | list):
        return tuple(map(form, argument))
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument if argument is None or isinstance(argument, bool) else "a value"


@pytest.mark.parametrize("strategy", [None, "verified"])
def test_requests_with_filters_and_constraints_make_no_new_call_in_a_warm_engine(model, strategy):  # noqa: F811
    """A GPU compiles a kernel with its first launch: each form of each op on logits was called before."""
    once = Generation(eos_ids=(1,), pad_id=0, max_steps=4, max_new_tokens=8, confidence=1e-9)
    engine = Engine(model, character_tokenizer("abcdefgh"), once, strategy=strategy, max_rows=1)
    called, kernels = set[Any](), model.kernels
    ops = {name: getattr(kernels, name) for name in ("token_stats", "class_stats", "look_ahead", "reach")}

    def noting(name: str) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            called.add((name, form(given), form([*named.values()])))
            return ops[name](*given, **named)

        return noted

    with patch.dict(kernels.__dict__, {name: noting(name) for name in ops}):
        engine.warm_up()
        warm = called.copy()
        filtered = "verified:top_p=0.5,temperature=1" if strategy else "entropy_bound:top_p=0.5"
        for n, asked in enumerate(({"strategy": filtered}, {"regex": "[ab]{3,8}"})):
            [result] = answers(engine, [Request(n, tokens=[3, 4, 5], seed=n, **asked)]).values()
            assert result.error is None
    assert called == warm and {name for name, *_ in warm} == ops.keys()


def test_calls_that_an_engine_refuses_are_left_out_of_its_warm_up(model):  # noqa: F811
    Engine(model, None, LIVELY, max_rows=1).warm_up()  # no tokenizer: no constraint
