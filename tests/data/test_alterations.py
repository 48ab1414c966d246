"""Alterations by a chat template are counted, and `verbatim` makes none, in training as in sampling."""

from __future__ import annotations

import json

import pytest

from blockdiff.data.chat import Encoder
from blockdiff.data.rows import check_row
from blockdiff.data.template import TOOL_TOKENS, packaged_template, render
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.errors import DataError
from blockdiff.sampling.request import Request
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

CODE = "  if x:\n    y()\n"
CALL = {"role": "assistant", "content": "one moment", "tool_calls": [{"name": "f", "arguments": "{}"}]}
TURNS = [
    {"role": "system", "content": "s "},
    {"role": "user", "content": CODE},
    {"role": "assistant", "content": "a", "reasoning": "r"},
    {"role": "assistant", "content": "\tb"},
    {"role": "user", "content": "c"},
    CALL,
    {"role": "tool", "content": " t "},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]
# The same format written by a template that strips nothing and knows neither reasoning nor tools.
PLAIN = (
    "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '|' }}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    return byte_level_bpe(["one moment"], 300)


def counts(tokenizer, *rows, **options):
    checked = [check_row({"messages": row}, "f:1") for row in rows]
    _, statistics = Encoder(tokenizer, eos_id=1, canvas_length=8, **options).encode(checked)
    names = ("stripped", "glued", "moved", "unreasoned", "unanswered", "spelt")
    return {name: getattr(statistics, name) for name in names if getattr(statistics, name)}, statistics


def test_what_the_format_alters_is_counted(tokenizer):
    # The two texts of assistant turns in a row are stripped where they are glued, too.
    found, statistics = counts(tokenizer, TURNS, TURNS[4:8])
    assert found == {"stripped": 3, "glued": 1, "moved": 2, "unreasoned": 1, "unanswered": 1}
    assert statistics.altered == (
        "3 texts stripped of white space, 1 assistant messages glued to the one before, "
        "2 texts moved behind the tool's answer, 1 messages without their reasoning, "
        "1 conversations end without an answer"
    )
    assert statistics.to_record()["glued"] == 1 and (statistics + statistics).stripped == 6


def test_verbatim_alters_nothing(tokenizer):
    found, _ = counts(tokenizer, TURNS, verbatim=True)
    assert found == {"unanswered": 1}
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, verbatim=True)
    ((example,), _) = encoder.encode([check_row({"messages": TURNS}, "f:1")])
    assert tokenizer.decode(example.tokens) == (
        f"<bos><|turn>system\ns <turn|>\n<|turn>user\n{CODE}<turn|>\n"
        "<|turn>model\n<|channel>thought\nr\n<channel|>a<turn|>\n<|turn>model\n\tb<turn|>\n"
        "<|turn>user\nc<turn|>\n<|turn>model\none moment<|tool_call>call:f{}<tool_call|>"
        '<|tool_response>response:f{value:<|"|> t <|"|>}<tool_response|>d<turn|>\n<|turn>user\ne<turn|>\n'
    )


def test_a_model_trained_verbatim_is_asked_verbatim(tokenizer):
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=8, verbatim=True)
    ((example,), _) = encoder.encode([check_row({"messages": [*TURNS, TURNS[2]]}, "f:1")])
    tokenizer.chat_template = encoder.template  # as training leaves it beside the model
    asked = Request(1, messages=TURNS).as_tokens(tokenizer, len(tokenizer))[1]
    assert asked == example.tokens[: example.responses[-1][0]]


def test_verbatim_needs_the_turn_tokens_and_other_templates_are_probed():
    other = chat_tokenizer(PLAIN)
    assert counts(other, TURNS[:5])[0] == {"unreasoned": 1, "unanswered": 1}
    backend = json.loads(other.backend_tokenizer.to_str().replace("<|turn>", "<|turm>"))
    lacking = type(other)(tokenizer_object=type(other.backend_tokenizer).from_str(json.dumps(backend)))
    with pytest.raises(DataError, match=r"^data\.template: verbatim .*<\|turn>.*<turn\|>"):
        counts(lacking, TURNS[:5], verbatim=True)


def test_templates_and_tokenizers_without_tools_refuse_rows_that_have_them():
    with pytest.raises(DataError, match=r"f:1: .*template.*'f'"):
        counts(chat_tokenizer(PLAIN), TURNS[4:8])
    with pytest.raises(DataError, match=r"f:1: .*template.*<\|tool>"):
        counts(chat_tokenizer(packaged_template()), TURNS[4:8])


FIELDS = {
    "z": {"type": "array", "description": "many", "items": {"type": "string", "enum": ["a", "b"]}},
    "b": {"type": "string", "enum": ["x", "y"]},
    "a": {"type": "integer", "description": "how many", "nullable": True},
    "o": {"type": "object", "properties": {"q": {"type": "number"}}, "required": ["q"]},
    "l": {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]}},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a", "b"]}
DECLARED = (
    '<|tool>declaration:get{description:<|"|>gets<|"|>,parameters:{properties:{'
    'a:{description:<|"|>how many<|"|>,nullable:true,type:<|"|>INTEGER<|"|>},'
    'b:{enum:[<|"|>x<|"|>,<|"|>y<|"|>],type:<|"|>STRING<|"|>},'
    'l:{items:{properties:{k:{type:<|"|>BOOLEAN<|"|>}},required:[<|"|>k<|"|>],type:<|"|>OBJECT<|"|>},'
    'type:<|"|>ARRAY<|"|>},'
    'o:{properties:{q:{type:<|"|>NUMBER<|"|>}},required:[<|"|>q<|"|>],type:<|"|>OBJECT<|"|>},'
    'z:{description:<|"|>many<|"|>,items:{enum:[<|"|>a<|"|>,<|"|>b<|"|>],type:<|"|>STRING<|"|>},'
    'type:<|"|>ARRAY<|"|>}'
    '},required:[<|"|>a<|"|>,<|"|>b<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)


def tool_row(*messages, **more):
    return check_row({"messages": [{"role": "user", "content": "q"}, *messages], **more}, "f:1")


def text_of(tokenizer, row, **options):
    return render(tokenizer, packaged_template(), row.messages, tools=row.tools, **options).text


def test_declarations_are_written_as_the_format_says(tokenizer):
    tools = [{"name": "get", "description": "gets", "parameters": SCHEMA}, {"name": "go"}]
    row = tool_row({"role": "assistant", "content": "a"}, tools=tools, system=" s ")
    head = f'<bos><|turn>system\ns{DECLARED}<|tool>declaration:go{{description:<|"|><|"|>}}<tool|><turn|>\n'
    assert text_of(tokenizer, row) == f"{head}<|turn>user\nq<turn|>\n<|turn>model\na<turn|>\n"
    row = tool_row({"role": "assistant", "content": "a"}, tools=tools)
    thinking = text_of(tokenizer, row, variables={"enable_thinking": True})
    assert thinking.startswith("<bos><|turn>system\n<|think|>\n<|tool>declaration:get{")


ARGUMENTS = {"n": 1, "f": 1.5, "t": True, "x": None, "s": "a b", "l": [1, "c"], "o": {"k": "v"}}
CALLED = '<|tool_call>call:get{f:1.5,l:[1,<|"|>c<|"|>],n:1,o:{k:<|"|>v<|"|>},s:<|"|>a b<|"|>,t:true,x:null}<tool_call|>'
ANSWERED = '<|tool_response>response:get{value:<|"|>sun<|"|>}<tool_response|>'


def called(*arguments, **more):
    calls = [{"id": str(n), "function": {"name": "get", "arguments": each}} for n, each in enumerate(arguments)]
    return {"role": "assistant", "tool_calls": calls, **more}


def answered(content="sun", call="0"):
    return {"role": "tool", "content": content, "tool_call_id": call}


def test_calls_and_answers_are_one_turn_and_what_the_tool_says_is_not_learnt(tokenizer):
    row = tool_row(called(ARGUMENTS, reasoning="hm"), answered(), {"role": "assistant", "content": " done "})
    thought = "<|channel>thought\nhm\n<channel|>"
    ((example,), statistics) = Encoder(tokenizer, eos_id=1, canvas_length=8).encode([row])
    assert tokenizer.decode(example.tokens) == (
        f"<bos><|turn>user\nq<turn|>\n<|turn>model\n{thought}{CALLED}{ANSWERED}done<turn|>\n"
    )
    # What comes after a call is the tool's to say; the token that hands over to it is the model's.
    assert [tokenizer.decode(example.tokens[start:end]) for start, end in example.responses] == [
        f"{thought}{CALLED}<|tool_response>",
        "done<turn|>\n",
    ]
    assert statistics.responses == 2


def test_several_answers_and_answers_that_are_objects(tokenizer):
    row = tool_row(called({}, {}), answered({"b": 1, "a": "x"}, "1"), answered(), called({}), answered("end"))
    call = "<|tool_call>call:get{}<tool_call|>"
    assert text_of(tokenizer, row).partition("<|turn>model\n")[2] == (
        f'{call}{call}<|tool_response>response:get{{a:<|"|>x<|"|>,b:1}}<tool_response|>{ANSWERED}'
        f'{call}<|tool_response>response:get{{value:<|"|>end<|"|>}}<tool_response|>'
    )


def test_after_an_answer_the_model_goes_on_with_its_turn(tokenizer):
    tokenizer.chat_template = packaged_template()
    messages = [{"role": "user", "content": "q"}, called({}), answered()]

    def asked(**options):
        request = Request(1, messages=messages, tools=[{"name": "get"}], **options)
        return tokenizer.decode(request.as_tokens(tokenizer, len(tokenizer))[1])

    assert asked().endswith(f"<|turn>model\n<|tool_call>call:get{{}}<tool_call|>{ANSWERED}")
    assert asked(thinking=True).endswith(f"{ANSWERED}<|channel>thought\n")
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(Exception, match="'get'"):
        asked()


def test_tokenizers_made_here_have_the_tokens_of_tools(tokenizer):
    assert all(len(tokenizer.encode(token, add_special_tokens=False)) == 1 for token in TOOL_TOKENS)
