"""Assistant turns found in templates without generation tags: as the same template with tags marks them, or refused."""

from __future__ import annotations

import itertools

import pytest

from blockdiff.data.chat import Encoder
from blockdiff.data.rows import Row
from blockdiff.data.template import RefusedByTemplate, give_template, marked, render, turn_ends
from blockdiff.errors import DataError
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}OPEN{{ m.content + '<|im_end|>\n' }}CLOSE"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 3: contents are stripped, no line break stands after a turn, and a call is JSON in place of a text.
LLAMA = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>\n\n' }}"
    "{% if m.tool_calls %}OPEN{{ '{\"name\": \"' + m.tool_calls[0].function.name + '\"}<|eot_id|>' }}CLOSE"
    "{% elif m.role == 'assistant' %}OPEN{{ m.content | trim + '<|eot_id|>' }}CLOSE"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
)
# Qwen3: reasoning stands in the turns after the last question alone, and is empty in the last one where there is none.
QWEN = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set thoughts = '<think>\n' + (m.reasoning or '') + '\n</think>\n\n' %}"
    "{% set shows = loop.index0 > last.user and (loop.last or m.reasoning) %}"
    "{% set given = enable_thinking is defined and enable_thinking is false and not m.reasoning %}"
    "{% if shows and given %}{{ thoughts }}{% endif %}OPEN"
    "{% if shows and not given %}{{ thoughts }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}CLOSE{% else %}{{ m.content }}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)


def user(text="why?"):
    return {"role": "user", "content": text}


def assistant(text="so", **more):
    return {"role": "assistant", "content": text, **more}


CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {}}}])
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CONVERSATIONS = {
    "one turn": [user(), assistant()],
    "several turns": [{"role": "system", "content": "be kind"}, user(), assistant(), user("and?"), assistant("no")],
    "the same words": [user("so"), assistant("so"), user("so"), assistant("so")],
    "edges": [user(" a "), assistant("  so \n"), user("\n"), assistant("b\n\n")],
    "a stand-in": [user("aAstand-inBb"), assistant("aAstand-inBb"), user("cC"), assistant("aA")],
    "two of the assistant": [user(), assistant("one"), assistant("two")],
    "reasoning": [user(), assistant("so", reasoning="hm"), user("and?"), assistant("no", reasoning="hm, too")],
    "a call": [user(), CALL, {"role": "tool", "content": "4"}, assistant("four"), user(), assistant("five")],
}


def without_tags(template):
    return template.replace("OPEN", "").replace("CLOSE", "")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("template", [CHATML, LLAMA, QWEN], ids=["chatml", "llama", "qwen"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_are_found_where_the_same_template_with_tags_marks_them(template, name, thinking):
    messages, variables = CONVERSATIONS[name], {"enable_thinking": thinking}
    if name == "a call" and template is CHATML:
        with pytest.raises(RefusedByTemplate):
            render(chat_tokenizer(), without_tags(template), messages)
        return
    tagged = template.replace("OPEN", OPEN).replace("CLOSE", CLOSE)
    tools = TOOLS if name == "a call" and template is LLAMA else None
    arguments = messages, variables, tools
    # an answer before another one, and reasoning where thinking is off, are not written as they would be sampled
    if template is QWEN and (name == "two of the assistant" or (name == "reasoning" and not thinking)):
        remedy = "set data.thinking: true" if name == "reasoning" else "set data.template"
        with pytest.raises(RefusedByTemplate, match=f"generation prompt; {remedy}"):
            marked(chat_tokenizer(), without_tags(template), *arguments)
        return
    found = marked(chat_tokenizer(), without_tags(template), *arguments)
    expected = render(chat_tokenizer(), tagged, *arguments)
    assert found[:3] == expected[:3]
    last = marked(chat_tokenizer(), without_tags(template), *arguments, only_last=True)
    assert last.spans[-1][1] == expected.spans[-1][1] == len(expected.text)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (without_tags(CHATML).split("{% if add")[0], r"messages\[1\]: .*add_gen"),
        (
            # every turn says how many come after it
            "{% for m in messages %}{{ loop.revindex ~ m.role ~ m.content ~ '|' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '1assistant' }}{% endif %}",
            r"messages\[1\]: .*differently.*data\.turns",
        ),
    ],
)
def test_a_template_in_which_a_turn_cannot_be_found_is_refused_with_the_message(template, words):
    encoder = Encoder(chat_tokenizer(template), eos_id=1, canvas_length=4)
    rows = [Row("f.jsonl:3", messages=(user(), assistant(), user(), assistant()))]
    with pytest.raises(DataError, match=rf"f\.jsonl:3: .*\({words}"):
        encoder.encode(rows)


def test_a_template_that_calls_reasoning_by_its_other_name_writes_it():
    template = without_tags(QWEN).replace("m.reasoning", "m.reasoning_content")
    messages, variables = CONVERSATIONS["reasoning"], {"enable_thinking": True}
    assert "<think>\nhm, too\n</think>" in marked(chat_tokenizer(), template, messages, variables).text


def test_a_template_is_a_file_or_one_of_several_that_the_tokenizer_names(tmp_path):
    tokenizer, (path, broken) = chat_tokenizer(), (tmp_path / "own.jinja", tmp_path / "broken.jinja")
    path.write_text(without_tags(CHATML))
    broken.write_text("{% if %}")
    give_template(tokenizer, str(path))
    assert tokenizer.chat_template == without_tags(CHATML)
    tokenizer.chat_template = {"default": "d", "tool_use": "t"}
    for source, words in (
        ("tools", r"'tools' is neither .*tokenizer, verbatim, default, tool_use"),
        (str(tmp_path / "none.jinja"), "none.jinja: .*No such file"),
        (str(broken), "broken.jinja: cannot render a question"),
    ):
        with pytest.raises(DataError, match=f"data.template: .*{words}"):
            give_template(tokenizer, source)
    give_template(tokenizer, "tool_use")
    assert tokenizer.chat_template == "t"


def test_the_last_turn_alone_can_be_learnt_where_earlier_ones_are_written_otherwise():
    template = (
        "{% for m in messages %}{{ m.role + ('!' if m.role == 'assistant' and loop.last else ':') + m.content + '|' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant!' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    row = Row("f:1", messages=(user("a"), assistant("b"), user("c"), assistant("d")))
    with pytest.raises(DataError, match=r"messages\[1\]"):
        Encoder(tokenizer, eos_id=1, canvas_length=4).encode([row])
    (example,), _ = Encoder(tokenizer, eos_id=1, canvas_length=4, turns="last").encode([row])
    assert [tokenizer.decode(example.tokens[start:end]) for start, end in example.responses] == ["d|"]


def test_the_tokens_that_are_learnt_are_the_answer_and_the_end_of_its_turn():
    for template, end in ((CHATML, "<|im_end|>\n"), (LLAMA, "<|eot_id|>"), (QWEN, "<|im_end|>\n")):
        tokenizer = chat_tokenizer(without_tags(template))
        encoder = Encoder(tokenizer, eos_id=1, canvas_length=4)
        (example,), _ = encoder.encode([Row("f:1", messages=(user(), assistant(), user(), assistant("no")))])
        texts = [tokenizer.decode(example.tokens[start:stop]) for start, stop in example.responses]
        assert texts == ["so" + end, "no" + end]


def test_the_end_of_a_turn_of_a_template_without_tags_is_known():
    tokenizer = chat_tokenizer("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
        "{% if messages | length > 1 %}{{ '>' ~ messages[1].content ~ eos_token }}{% endif %}")  # fmt: skip
    assert turn_ends(tokenizer) == (1,)
    assert list(itertools.chain(turn_ends(chat_tokenizer(without_tags(CHATML))))) == []
