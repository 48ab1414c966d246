"""The records of a step say what is pinned and stays, and those of a canvas what was demanded of it."""

from __future__ import annotations

from typing import Any

import pytest

from blockdiff import checkpoint
from blockdiff.sampling import Recorder, Request, Sampler
from tests.support.chat_tokenizer import chat_tokenizer

TOKENIZER = chat_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoint.init("sudoku4", tokenizer=TOKENIZER, device="cpu")


@pytest.mark.quick
def test_pins_and_what_is_demanded_are_in_the_trace(model: Any) -> None:
    recorder = Recorder()
    requests = [Request("free", prompt="a"), Request("held", prompt="a", template="x<?3>yz")]
    Sampler(model, TOKENIZER).generate(
        requests, max_new_tokens=17, max_steps=3, on_step=recorder.step, on_canvas=recorder.canvas
    )
    free, held = sorted(recorder.traces, key=lambda trace: str(trace.id))
    assert all(step.is_pinned is None and step.stays is None for step in free.steps) and free.control == ""
    pinned = [place for place in range(17) if place not in (1, 2, 3)]
    for step in held.steps:
        assert [place for place, is_pinned in enumerate(step.is_pinned or []) if is_pinned] == pinned
    assert held.control == "template 'x<?3>yz'" and held.canvases[0].max_steps == 3


@pytest.mark.quick
def test_what_stays_is_in_the_trace(model: Any) -> None:
    recorder = Recorder()
    Sampler(model, TOKENIZER, strategy="ddim").generate(
        ["a"], max_new_tokens=17, max_steps=3, on_step=recorder.step, on_canvas=recorder.canvas
    )
    (trace,) = recorder.traces
    assert trace.steps and all(step.stays is not None and len(step.stays) == 17 for step in trace.steps)
