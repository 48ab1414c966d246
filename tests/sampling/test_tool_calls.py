"""Calls of tools are read off a response's tokens, and what is no call stays text."""

from __future__ import annotations

import pytest

from blockdiff.checkpoint import init
from blockdiff.data.chat import Encoder
from blockdiff.data.rows import check_row
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.sampling import Generation, Request
from blockdiff.sampling.sequence import sequences_of
from blockdiff.sampling.settings import settings_of
from blockdiff.sampling.tool_calls import called
from tests.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

ARGUMENTS = {
    "city": 'a "b", {c}: [d]\n<|"|>',
    "n": 3,
    "x": -1.5,
    "yes": True,
    "no": None,
    "list": [1, "two", {"k": []}],
    "deep": {"a b": {"c": "", "d": {}}},
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_bpe(["call city"], 300)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read(tokenizer, text):
    calls, rest = called(ids(tokenizer, text), tokenizer)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls or ()], tokenizer.decode(rest)


def test_a_call_that_training_teaches_is_read_back_and_stands_apart(tokenizer):
    wanted = {"type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
    asked = {"role": "user", "content": "q"}
    messages = [asked, {"role": "assistant", "content": "so: ", "tool_calls": [wanted, wanted]}]
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=16, verbatim=True)
    ((example,), _) = encoder.encode([check_row({"messages": messages}, "f:1")])
    response = example.tokens[slice(*example.responses[0])]
    model = init(tiny_config(canvas_length=32, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    tokenizer.chat_template = encoder.template
    settings = settings_of(model, tokenizer, Generation(max_steps=1, max_new_tokens=32, eos_ids=(1,)))
    [answer] = sequences_of(Request("a", messages=[asked]), settings)
    answer.commit([*response, 1], 3, (1,))
    result = answer.result(settings)
    assert (result.tool_calls, result.text) == ([wanted, wanted], "so: ")
    assert result.to_record()["tool_calls"] == [wanted, wanted]


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("hi", [], "hi"),
        ("a<|tool_call>call:f{}<tool_call|>b", [("f", {})], "ab"),
        ('<|tool_call>call:f{<|"|>k<|"|>:v w,n:01}<tool_call|>', [("f", {"k": "v w", "n": "01"})], ""),
        ("<|tool_call>call:f{a:1}", [], "<|tool_call>call:f{a:1}"),
        ("<|tool_call>no<tool_call|><|tool_call>call:f{}<tool_call|>", [("f", {})], "<|tool_call>no<tool_call|>"),
        ("<|tool_call>call:f{a}<tool_call|>", [], "<|tool_call>call:f{a}<tool_call|>"),
        ("<|tool_call>call:f{a:[1}<tool_call|>", [], "<|tool_call>call:f{a:[1}<tool_call|>"),
        ("<|tool_call>call:f{}x<tool_call|>", [], "<|tool_call>call:f{}x<tool_call|>"),
        ("<|tool_call>call:{}<tool_call|>", [], "<|tool_call>call:{}<tool_call|>"),
        ('<|tool_call>call:f{a:<|"|>b}<tool_call|>', [], '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
        ("<|tool_call>call:f{a:" + "[" * 3000 + "<tool_call|>", [], None),
    ],
)
def test_what_is_no_whole_call_stays_text(tokenizer, text, calls, rest):
    assert read(tokenizer, text) == (calls, text if rest is None else rest)
