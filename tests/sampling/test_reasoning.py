"""Reasoning stands apart from the answer, and is asked for in the chat template."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blockdiff.checkpoint import init
from blockdiff.data.chat import Encoder
from blockdiff.data.rows import Row
from blockdiff.data.template import packaged_template, render
from blockdiff.data.tokenizer import byte_level_bpe, character_tokenizer
from blockdiff.errors import RequestError
from blockdiff.sampling import Generation, Request, Sampler
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.response import CONTEXT, ResponseParser, parse
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

TOKENIZER = chat_tokenizer(packaged_template())
OPENED, CLOSED = "<|channel>thought\n", "\n<channel|>"
CHAT = [{"role": "user", "content": "6*7?"}]


def split(tokens, tokenizer, prompt=""):
    settings = SimpleNamespace(tokenizer=tokenizer, text=tokenizer.decode)
    found = parse(tokens, Request(0), settings, prompt)
    parser = ResponseParser(Request(0), settings, prompt)
    for token in tokens:  # one by one, they are the same response
        parser.add([token])
    assert parser.whole() == found
    return found.reasoning, found.text


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("42", None, "42"),
        (f"{OPENED}6 * 7{CLOSED}42", "6 * 7", "42"),
        (f"{OPENED}6 *", "6 *", ""),
        (f"{OPENED}a{CLOSED}b{OPENED}c{CLOSED}d", "a\nc", "bd"),
        (f"{OPENED}a{CLOSED}b{OPENED}c", "a\nc", "b"),
        (f"{OPENED}{CLOSED}b{OPENED}c{CLOSED}", "c", "b"),
        ("a<channel|>b", None, "ab"),
        ("", None, ""),
    ],
)
def test_every_channel_is_reasoning_and_all_text_outside_is_the_answer(text, reasoning, answer):
    assert split(TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (f"{OPENED}plan STOP", "plan", ""),
        (f"{OPENED}a{CLOSED}b{OPENED}plan STOP", "a\nplan", "b"),
        (f"{OPENED}S{CLOSED}b STOP", "S", "b "),
    ],
)
def test_reasoning_ends_before_a_stop_text_as_an_answer_does(text, reasoning, answer):
    settings, request = SimpleNamespace(tokenizer=TOKENIZER, text=TOKENIZER.decode), Request(0, stop=("STOP",))
    parser, said = ResponseParser(request, settings, ""), ""
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        so_far = parser.so_far().reasoning or ""
        assert so_far.startswith(said) and reasoning.startswith(so_far)
        said = so_far
        parser.add([token])
    found = parser.whole(is_stopped=True)
    assert (found.reasoning, found.text) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [("<T>a</T>b", False, "a", "b"), ("a</T>b", True, "a", "b"), ("a b", True, "a b", "")],
)
@pytest.mark.parametrize("name", ["mm:think", "think"])  # of MiniMax M3, and of Qwen3 and others
def test_reasoning_may_have_been_opened_by_the_prompt(name, text, is_open, reasoning, answer):
    tokenizer = byte_level_bpe(["a b"], 300)
    tokenizer._tokenizer.add_tokens([f"<{name}>", f"</{name}>"])  # which need not be special ones
    tokens = tokenizer(text.replace("T>", f"{name}>"), add_special_tokens=False)["input_ids"]
    assert split(tokens, tokenizer, f"a<{name}>\n" if is_open else "") == (reasoning, answer)


def test_a_tokenizer_without_channels_has_no_reasoning():
    tokenizer = character_tokenizer("abcdefg")
    assert split([1, 5, 9], tokenizer) == (None, tokenizer.decode([1, 5, 9]))


def test_a_request_asks_for_thinking_as_training_does():
    encoder = Encoder(TOKENIZER, eos_id=1, canvas_length=8, enable_thinking=True)
    row = Row("f:1", messages=(*CHAT, {"role": "assistant", "content": "42"}))
    (example,), _ = encoder.encode([row])
    expected = example.tokens[: example.responses[0][0]]
    text, tokens, _ = Request(0, messages=CHAT, thinking=True).as_tokens(TOKENIZER, 500)
    assert tokens == expected and "<|think|>" in text
    assert "<|think|>" not in Request(0, messages=CHAT).as_tokens(TOKENIZER, 500)[0]


# As Qwen3's does, it thinks unless it is told not to; and one that opens the reasoning itself.
THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENS = "{{ messages[0].content }}<|channel>thought\n"


@pytest.mark.parametrize("thinking", [False, True])
def test_a_template_is_told_of_thinking_what_training_tells_it(thinking):
    tokenizer = chat_tokenizer(THINKS)
    [trained] = render(tokenizer, THINKS, CHAT, {"enable_thinking": thinking}, is_prompt=True)[:1]
    assert Request(0, messages=CHAT, thinking=thinking).as_tokens(tokenizer, 500)[0] == trained
    assert trained.endswith("</think>\n\n") != thinking


def test_a_form_has_no_place_where_the_template_begins_with_reasoning():
    model = init(tiny_config(canvas_length=32, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    sampler = Sampler(model, chat_tokenizer(OPENS), Generation(max_steps=1, max_new_tokens=32, eos_ids=(1,)))
    for form in ({"regex": "a"}, {"json_schema": {"type": "object"}}, {"template": "<?3>"}):
        with pytest.raises(RequestError, match=f"{next(iter(form))} .*reasoning"):
            sampler.generate([Request("a", messages=CHAT, **form)])


def test_thinking_needs_messages():
    with pytest.raises(RequestError, match=r"thinking .*messages"):
        Request(0, prompt="a", thinking=True).as_tokens(TOKENIZER, 500)


def test_a_result_has_its_reasoning_apart():
    model = init(tiny_config(canvas_length=32, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    sampler = Sampler(model, TOKENIZER, Generation(max_steps=1, max_new_tokens=32, eos_ids=(1,)))
    said = TOKENIZER(f"{OPENED}6 * 7{CLOSED}42", add_special_tokens=False)["input_ids"]
    [asked] = prepare_sequences(Request("a", messages=CHAT, thinking=True), sampler.settings)
    asked.commit([*said, 1], 3, sampler.settings)
    result = asked.result(sampler.settings)
    assert (result.reasoning, result.text, result.tokens) == ("6 * 7", "42", [*said, 1])
    assert result.to_record()["reasoning"] == "6 * 7"


def test_what_was_said_so_far_decodes_the_last_tokens_alone():
    """And is what all of them say, with halves of characters held back."""
    decoded: list[int] = []
    text = lambda tokens: decoded.append(len(tokens)) or TOKENIZER.decode(tokens)  # noqa: E731
    settings = SimpleNamespace(tokenizer=TOKENIZER, text=text)
    said = f"{OPENED}{'why, 漢 '.strip() * 20}{CLOSED}{'a. é 🙂 , it ' * 20}"
    tokens = TOKENIZER(said, add_special_tokens=False)["input_ids"]
    parser = ResponseParser(Request(0), settings, "")
    for count in range(1, len(tokens) + 1):
        decoded.clear()
        parser.add(tokens[count - 1 : count])
        so_far = parser.so_far()
        assert sum(decoded) <= 2 * (2 * CONTEXT + 4)
        alone = ResponseParser(Request(0), settings, "")
        alone.add(tokens[:count])
        assert so_far == alone.so_far()
    assert so_far == parser.whole() and so_far.text.endswith(", it ")
