"""Calls of tools are read off a response's tokens, and what is no call stays text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blockdiff.checkpoint import init
from blockdiff.data.chat import Encoder
from blockdiff.data.rows import check_row
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.sampling import Generation, Request
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from blockdiff.sampling.response import ResponseParser, parse
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.oracle import TWO_LAYERS, tiny_config

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


def read(tokenizer, text, tools=None):
    settings = SimpleNamespace(tokenizer=tokenizer, text=tokenizer.decode)
    request = Request(0, tools=tools)
    found, parser, said = parse(ids(tokenizer, text), request, settings), ResponseParser(request, settings, ""), ""
    for token in ids(tokenizer, text):  # one by one, they are the same response, and what was said once stays
        parser.add([token])
        assert parser.so_far().text.startswith(said)
        said = parser.so_far().text
    assert parser.whole() == found and found.text.startswith(said)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found.tool_calls or ()], found.text


def test_a_call_that_training_teaches_is_read_back_and_stands_apart(tokenizer):
    wanted = {"type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
    asked = {"role": "user", "content": "q"}
    messages = [asked, {"role": "assistant", "content": "so: ", "tool_calls": [wanted, wanted]}]
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=16, verbatim=True)
    ((example,), _) = encoder.encode([check_row({"messages": messages}, "f:1")])
    response = example.tokens[slice(*example.responses[0])]
    model = init(tiny_config(canvas_length=32, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    tokenizer.chat_template = encoder.template
    settings = sampling_settings(model, tokenizer, Generation(max_steps=1, max_new_tokens=320, eos_ids=(1,)))
    [answer] = prepare_sequences(Request("a", messages=[asked]), settings)
    answer.commit([*response, 1], 3, settings)
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


def xml(*pieces):
    return "".join("]<]minimax[>[" + piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("a" + xml("<tool_call>", '<invoke name="f">', "</invoke>", "</tool_call>") + "b", [("f", {})], "ab"),
        (
            xml("<tool_call>\n", '<invoke name="get">', "<city>12", "</city>", "<n>3", "</n>", "<of>")
            + xml("<item>1", "</item>", "<item>x", "</item>", "</of>", "</invoke>\n", "</tool_call>"),
            [("get", {"city": "12", "n": 3, "of": [1, "x"]})],
            "",
        ),
        (xml("<tool_call>", '<invoke name="f">', "<a>1"), [], None),
        (xml("<tool_call>", '<invoke name="f">', "<a>1", "</b>", "</invoke>", "</tool_call>"), [], None),
        ('<tool_call><invoke name="f"></invoke></tool_call>', [], None),
    ],
)
def test_calls_in_the_tags_of_minimax_m3_are_read_with_the_types_of_the_declaration(text, calls, rest):
    tokenizer = byte_level_bpe(["tool invoke item city"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["]<]minimax[>["]})
    declared = {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    found = read(tokenizer, text, [{"type": "function", "function": declared}])
    assert found == (calls, text if rest is None else rest)


LOOK = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '{"name": "look", "arguments": {"at": "a {b}"}}'


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (f"so<tool_call>\n{CALL}\n</tool_call>", [("look", {"at": "a {b}"})], "so"),
        (f"\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("look", {"at": "a {b}"})] * 2, ""),
        (f"<tool_call>{CALL}", [], None),
        ('<tool_call>{"name": 3}</tool_call>', [], None),
        ('<tool_call>{"name": "look", "arguments": 3}</tool_call>', [], None),
        ("<tool_call><function=look></function></tool_call>", [], None),
        (CALL, [], None),
    ],
)
def test_calls_of_hermes_and_qwen_are_json_between_two_tokens(text, calls, rest):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert read(tokenizer, text, LOOK) == (calls, text if rest is None else rest)


@pytest.mark.parametrize(
    ("text", "tools", "calls", "rest"),
    [
        ('{"name": "look", "parameters": {"n": 1}}', LOOK, [("look", {"n": 1})], ""),
        (
            '<|python_tag|>{"name": "look", "parameters": {}}; ' + CALL,
            LOOK,
            [("look", {}), ("look", {"at": "a {b}"})],
            "",
        ),
        ('{"name": "look", "parameters": {"n": 1}}', [], [], None),  # nothing can be called
        ('{"name": "leap", "parameters": {}}', LOOK, [], None),
        ('{"name": "look", "parameters": {"n": 1}} or so', LOOK, [("look", {"n": 1})], " or so"),
        ('{"name": "look", "parameters"', LOOK, [], None),
        ('{"city": "Ulm"}', LOOK, [], None),
        ("I look.", LOOK, [], None),
    ],
)
def test_a_call_of_llama_is_a_response_of_json_that_names_a_declared_tool(text, tools, calls, rest):
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    assert read(tokenizer, text, tools) == (calls, text if rest is None else rest)


CUT = [
    ("so: <|tool_call>call:f{a:1}<tool_call|> <|tool_call>call:weather{city:", 1, "so:  "),
    ("so: <|tool_call>call:weather{city:", 0, "so: "),
    ("so: ", 0, "so: "),
]


@pytest.mark.parametrize(("text", "calls", "rest"), CUT)
@pytest.mark.parametrize("end", ["is_cut", "is_stopped"])
def test_a_call_that_is_cut_is_left_out_and_told(tokenizer, text, calls, rest, end):
    settings = SimpleNamespace(tokenizer=tokenizer, text=tokenizer.decode)
    found = parse(ids(tokenizer, text), Request(0, stop=("city:",)), settings, **{end: True})
    assert (found.text, len(found.tool_calls or ())) == (rest, calls)
    assert found.is_call_cut == text.endswith("city:")


@pytest.mark.parametrize(
    ("text", "is_left_out"),
    [('{"name": "look", "par', True), ('{ "', True), ('{"na', True), ('{"city": "Ulm', False), ("look {", False)],
)
def test_of_llama_only_what_begins_as_a_call_is_a_call_that_is_cut(text, is_left_out):
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    settings = SimpleNamespace(tokenizer=tokenizer, text=tokenizer.decode)
    found = parse(ids(tokenizer, text), Request(0, tools=LOOK), settings, is_cut=True)
    assert (found.text, found.is_call_cut) == ("" if is_left_out else text, is_left_out)


def test_nothing_is_a_call_where_the_list_of_tools_is_empty(tokenizer):
    text = "so: <|tool_call>call:f{a:1}<tool_call|>"
    assert read(tokenizer, text, []) == ([], text)
