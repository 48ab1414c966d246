"""A stream says what the whole answer says, whatever the model writes and wherever its canvases end."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.sampling import CommittedCanvas, Request, Result
from blockdiff.sampling.response import parse
from blockdiff.serving.deltas import AnswerStream

pytestmark = pytest.mark.quick

PIECES = (
    *("<|channel>", "<|channel>thought\n", "<|channel>thou", "<channel|>", "\n<channel|>"),
    *("<|tool_call>call:f{a:1}<tool_call|>", "<|tool_call>", "<tool_call|>", "<|tool_call>no<tool_call|>", '<|"|>'),
    *("ST", "OP", "STOP", "STO", "!", "\u20ac", " ", "\n", "Let me look", "42", "thought\n"),
)


@pytest.fixture(scope="module")
def settings():
    tokenizer = byte_level_bpe(["Let me look 42"], 300)
    return SimpleNamespace(tokenizer=tokenizer, text=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))


def answer(settings, request, tokens, lengths, max_tokens=None, prompt=""):
    """The words of a stream of an answer, in canvases of such lengths, and its last delta."""
    stream = AnswerStream(settings, request, max_tokens=max_tokens)
    ends = (n + 1 for n in range(len(tokens)) if any(stop in settings.text(tokens[: n + 1]) for stop in request.stop))
    stopped = next(ends, None) if request.stop else None
    tokens, deltas, at = tokens[:stopped], [], 0
    for length in lengths:
        canvas = tokens[at : at + length]
        at += length
        finish = "length" if at >= len(tokens) else None
        deltas.append(stream.canvas(CommittedCanvas("a", 0, prompt, canvas, len(canvas), "", 1, finish)))
        if finish:
            break
    parts = parse(tokens, request, settings, prompt, is_stopped=stopped is not None)
    result = Result("a", parts.text, tokens, "stop" if stopped else "length", [1], reasoning=parts.reasoning)
    deltas.append(stream.end(Result(**{**vars(result), "tool_calls": parts.tool_calls})))
    text, reasoning = ("".join(getattr(each, name) for each in deltas) for name in ("text", "reasoning"))
    return (text, reasoning, [call for each in deltas for call in each.calls]), deltas[-1].result


def test_2000_random_answers_are_the_same_whole_and_as_streams(settings):
    chance = random.Random(7)
    for _ in range(2000):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randint(1, 12)))
        tokens = settings.tokenizer(text, add_special_tokens=False)["input_ids"]
        stop = chance.choice([(), (), ("STOP",), ("STOP", "!"), ("OP", "\u20acST")])
        lengths = [chance.randint(1, 9) for _ in range(len(tokens) + 1)]
        most = chance.choice([None, None, chance.randint(1, len(tokens))])
        prompt = chance.choice(["", "", "a<|channel>thought\n"])
        said, whole = answer(settings, Request("a", prompt="a", stop=stop), tokens, lengths, most, prompt)
        assert said == (whole.text, whole.reasoning or "", whole.tool_calls or []), (text, stop, lengths, most, prompt)


def test_a_stream_goes_on_after_reasoning_that_opens_twice(settings):
    text = "<|channel>thought\nhm\n<channel|>Let me look<|channel>thought\n21 * 2\n<channel|>42"
    tokens = settings.tokenizer(text, add_special_tokens=False)["input_ids"]
    said, whole = answer(settings, Request("a", prompt="a"), tokens, [3] * len(tokens))
    assert said == ("Let me look42", "hm\n21 * 2", []) == (whole.text, whole.reasoning, whole.tool_calls or [])
