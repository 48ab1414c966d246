"""Chat templates of released models in small: turns are learnt where they are sampled, or refused by name."""

from __future__ import annotations

from datetime import date
from itertools import product

import pytest

from blockdiff.data.chat import Encoder
from blockdiff.data.rows import check_row
from blockdiff.data.template import dated, render
from blockdiff.data.tokenise import chat_prompt
from blockdiff.errors import DataError
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.templates import CALLS, LFM, PLAIN, TEMPLATES

pytestmark = pytest.mark.quick


def user(text="Rain?"):
    return {"role": "user", "content": text}


def assistant(text="No.", **more):
    return {"role": "assistant", "content": text, **more}


def call(name="weather", **arguments):
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(text="sun", name="weather"):
    return {"role": "tool", "tool_call_id": name, "name": name, "content": text}


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "map")]
ASKS = assistant("", tool_calls=[call(city="Bonn")])
ASKS_TWO = assistant("", tool_calls=[call(city="Bonn"), call("map")])
THINK = ("qwen3", "nemotron")  # templates that are told whether to think
CONVERSATIONS = {
    "one turn": [user(), assistant()],
    "several turns": [{"role": "system", "content": "Be kind."}, user(), assistant("a"), user("And?"), assistant("b")],
    "one turn and reasoning": [user(), assistant(reasoning="hm")],
    "reasoning": [user(), assistant("a", reasoning="hm"), user("And?"), assistant("b", reasoning="well")],
    "reasoning in content": [user(), assistant("<think>\nhm\n</think>\n\na"), user("And?"), assistant("b")],
    "a call": [user(), ASKS, answer(), assistant(), user("And?"), assistant("b")],
    "two calls": [user(), ASKS_TWO, answer(), answer("a map", "map"), assistant()],
    "a call and a text": [user(), {**ASKS, "content": "Wait."}, answer(), assistant()],
    "a call and reasoning": [user(), {**ASKS, "reasoning": "look"}, answer(), assistant(reasoning="so")],
}


def encoded(template, messages, **options):
    tokenizer = chat_tokenizer(template)
    tools = {"tools": TOOLS} if any("tool_calls" in message for message in messages) else {}
    row = check_row({"messages": messages, **tools}, "f:1")
    (example,), statistics = Encoder(tokenizer, eos_id=1, canvas_length=4, **options).encode([row])
    return tokenizer, row, example, statistics


def learnt(template, messages, **options):
    tokenizer, _, example, statistics = encoded(template, messages, **options)
    return [tokenizer.decode(example.tokens[start:end]) for start, end in example.responses], statistics.altered


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_the_tokens_that_transformers_gives_them(name):
    tokenizer = chat_tokenizer(TEMPLATES[name])
    compared = 0
    for messages in CONVERSATIONS.values():
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        for end in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            try:
                prompt = chat_prompt(messages[:end], tools, tokenizer)
            except DataError as error:
                assert "it does not write the" in str(error) and name in ("lfm", "gpt_oss", "phi3", "dated")
                continue
            text = tokenizer.apply_chat_template(
                messages[:end], tools, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            assert (prompt.text, prompt.tokens) == (text, tokenizer(text, add_special_tokens=False)["input_ids"])
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("name", "turns"), list(product(TEMPLATES, ["all", "last"])))
def test_turns_are_learnt_behind_the_prompts_they_are_sampled_with_or_refused(name, turns, thinking):
    learnt_turns = 0
    for messages in CONVERSATIONS.values():
        try:
            tokenizer, row, example, statistics = encoded(
                TEMPLATES[name], messages, turns=turns, enable_thinking=thinking
            )
        except DataError as error:
            assert str(error).startswith("f:1: the chat template refuses it (")
            continue
        places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        bare = 0
        for (start, end), place in zip(example.responses, places[-len(example.responses) :], strict=True):
            prompt = chat_prompt(messages[:place], row.tools, tokenizer, thinking=thinking and name in THINK).text
            before = tokenizer.decode(example.tokens[:start])
            assert prompt in (before, f"{before}<think>\n\n</think>\n\n")
            bare += before != prompt
            assert tokenizer.decode(example.tokens[start:end]).strip().endswith(">") or statistics.endless
            learnt_turns += 1
        assert bare == statistics.bare and (not bare or (name == "qwen3" and not thinking))
    assert learnt_turns or name == "glm"


def test_a_call_that_a_template_drops_is_refused_by_name():
    for template, messages, words in (
        (LFM, [user(), ASKS, answer(), assistant()], r"the call of 'weather' in messages\[1\]"),
        (TEMPLATES["gpt_oss"], [user(), ASKS_TWO, answer(), answer("a", "map"), assistant()], "the call of 'map'"),
        (PLAIN.replace("call.function |", "call.function.name |"), [user(), ASKS], "the arguments of .* 'weather'"),
        (PLAIN.replace("call.function | tojson", "call.function.arguments"), [user(), ASKS], "the call of 'weather'"),
        (PLAIN.replace("call.function |", "call.function | string |"), [user(), ASKS], "the arguments .*Python does"),
        (PLAIN.replace("{{ m.content }}" + CALLS, ""), [user(), assistant()], r"the text of messages\[1\]"),
    ):
        with pytest.raises(DataError, match=f"^f:1: .*it does not write {words}"):
            encoded(template, messages)
    # the name of the tool stands in a text, and nowhere else
    with pytest.raises(DataError, match="it does not write the tool 'weather'"):
        encoded(TEMPLATES["phi3"], [user("weather? map?"), ASKS, answer(), assistant()])


def test_a_template_that_wants_arguments_as_text_gets_them_so():
    deepseek = PLAIN.replace("call.function | tojson", "(call.function.name + ' ' + call.function.arguments)")
    messages = [user(), assistant("", tool_calls=[call(city="Köln", day="<eos>")]), answer(), assistant()]
    found, _ = learnt(deepseek, messages)
    text = 'weather {"city": "Köln", "day": "<eos>"}'
    assert found == [f"<tool_call>{text}</tool_call><|im_end|>\n", "No.<|im_end|>\n"]
    tokenizer = chat_tokenizer(deepseek)
    spelt = {**messages[1]["tool_calls"][0]["function"], "arguments": text.removeprefix("weather ")}
    theirs = [messages[0], {**messages[1], "tool_calls": [{"type": "function", "id": "weather", "function": spelt}]}]
    asked = chat_prompt([*messages[:2], answer()], TOOLS, tokenizer).text
    assert asked == tokenizer.apply_chat_template(
        [*theirs, answer()], TOOLS, tokenize=False, add_generation_prompt=True
    )


def test_a_text_beside_a_call_that_a_template_drops_is_counted():
    found, altered = learnt(TEMPLATES["dated"], [user(), {**ASKS, "content": "Wait."}, answer(), assistant()])
    assert found[0] == '{"name": "weather", "arguments": {"city": "Bonn"}}<|im_end|>\n'
    assert altered == "1 texts beside calls left out"


def test_the_last_turn_s_reasoning_is_learnt_behind_the_prompt_that_opens_it():
    r1 = TEMPLATES["r1"]
    expected = ["hm\n</think>\n\nNo.<|im_end|>\n"]
    assert learnt(r1, [user(), assistant(reasoning="hm")]) == (expected, "")
    content = [user(), assistant("<think>\nhm\n</think>\n\nNo.")]
    assert learnt(r1, content) == (expected, "1 texts in <think> read as reasoning")
    with pytest.raises(DataError, match=r"messages\[1\]: its prompt ends in <think>, but it has no reasoning; write"):
        learnt(r1, [user(), assistant()])
    two = CONVERSATIONS["reasoning"]
    with pytest.raises(DataError, match=r"messages\[1\]: its prompt ends in <think>.*data\.turns: last"):
        learnt(r1, two)
    assert learnt(r1, two, turns="last") == (
        ["well\n</think>\n\nb<|im_end|>\n"],
        "1 messages without their reasoning",
    )


@pytest.mark.parametrize("turns", ["all", "last"])
def test_an_earlier_turn_that_the_row_excludes_needs_no_prompt_of_its_own(turns):
    first, asked, *rest = CONVERSATIONS["reasoning"]
    tokenizer, _, example, _ = encoded(TEMPLATES["r1"], [first, {**asked, "train": False}, *rest], turns=turns)
    assert [tokenizer.decode(example.tokens[a:b]) for a, b in example.responses] == ["well\n</think>\n\nb<|im_end|>\n"]
    assert [tokenizer.decode(example.tokens[a:b]) for a, b in example.excluded] == ["a<|im_end|>\n"]
    three = [first, asked, first, {**asked, "train": False}, *rest]
    if turns == "last":
        assert len(encoded(TEMPLATES["r1"], three, turns=turns)[2].excluded) == 1
    else:
        with pytest.raises(DataError, match=r"messages\[1\]: its prompt ends in <think>"):
            encoded(TEMPLATES["r1"], three, turns=turns)


def test_reasoning_that_spells_a_control_token_stays_text_where_it_is_put_in():
    tokenizer, _, example, _ = encoded(TEMPLATES["r1"], [user(), assistant(reasoning="a <eos> b")])
    assert tokenizer.eos_token_id not in example.tokens
    assert "a <eos> b\n</think>" in tokenizer.decode(example.tokens)


def test_reasoning_that_a_template_leaves_out_is_counted_also_of_the_last_turn():
    thought = [user(), assistant(reasoning="o")]  # a text that stands elsewhere, too
    assert learnt(PLAIN, thought) == (["No.<|im_end|>\n"], "1 messages without their reasoning")
    found = learnt(TEMPLATES["gpt_oss"], thought)
    assert found == (
        ["<|channel|>analysis<|message|>o<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>"],
        "",
    )
    qwen3 = TEMPLATES["qwen3"]
    assert learnt(qwen3, thought, enable_thinking=True) == (["<think>\no\n</think>\n\nNo.<|im_end|>\n"], "")
    with pytest.raises(DataError, match=r"messages\[1\].*set data\.thinking: true"):
        learnt(qwen3, thought)


def test_turns_that_lack_the_empty_reasoning_of_their_prompts_are_counted():
    qwen3 = TEMPLATES["qwen3"]
    found, altered = learnt(qwen3, CONVERSATIONS["a call"])
    calls = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call><|im_end|>\n'
    assert found == [calls, "No.<|im_end|>\n", "b<|im_end|>\n"]
    assert altered == "2 turns without the empty reasoning in which their prompts end"
    nemotron = learnt(TEMPLATES["nemotron"], CONVERSATIONS["several turns"])
    assert nemotron == (["a<|im_end|>\n", "b<|im_end|>\n"], "")
    # the last turn is put behind it
    closed = TEMPLATES["r1"].replace("<think>\n'", "<think>\n\n</think>\n\n'")
    tokenizer, _, example, _ = encoded(closed, [user(), assistant()])
    assert tokenizer.decode(example.tokens).endswith("assistant\n<think>\n\n</think>\n\nNo.<|im_end|>\n")


def test_a_turn_without_an_end_is_refused_with_what_to_set():
    for messages in (CONVERSATIONS["one turn"], [user(), ASKS], CONVERSATIONS["several turns"]):
        for turns in ("all", "last"):
            with pytest.raises(DataError, match=r"messages\[\d\]: no end of the turn .*data\.template.*eos_token"):
                encoded(TEMPLATES["glm"], messages, turns=turns)
    tagged = PLAIN.replace("{{ m.content }}" + CALLS, "{% generation %}{{ m.content }}{% endgeneration %}")
    with pytest.raises(DataError, match=r"generation %} tags end before the turn does.*data\.template"):
        encoded(tagged, CONVERSATIONS["one turn"])


def test_ends_that_differ_in_the_last_turn_and_prompts_that_are_prefixes_are_read():
    several = CONVERSATIONS["several turns"]
    assert learnt(TEMPLATES["phi3"], several) == (["a<|end|>\n", "b<|end|>\n<|endoftext|>"], "")
    head = "<|channel|>final<|message|>"
    assert learnt(TEMPLATES["gpt_oss"], several) == (
        [head + "a", head + "b<|return|>"],
        "1 turns without the end that the last one has",
    )
    assert learnt(TEMPLATES["mistral"], several)[0] == [" a<eos>", " b<eos>"]
    calls = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]<eos>'
    assert learnt(TEMPLATES["mistral"], CONVERSATIONS["a call"])[0] == [calls, " No.<eos>", " b<eos>"]


def test_tags_that_begin_before_the_end_of_the_prompt_are_moved_behind_it():
    turn = "{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role != 'assistant' %}"
    own = "{{ '<|im_start|>assistant\n' ~ m.content ~ '<|im_end|>\n' }}"
    tags = f"{{% generation %}}{own}{{% endgeneration %}}{{% continue %}}"
    tagged = PLAIN.replace(turn, f"{{% if m.role == 'assistant' %}}{tags}{{% endif %}}{turn}")
    assert tagged != PLAIN
    assert learnt(tagged, CONVERSATIONS["several turns"]) == (["a<|im_end|>\n", "b<|im_end|>\n"], "")


def test_turns_that_tags_mark_elsewhere_than_after_their_prompts_are_counted():
    tagged = TEMPLATES["r1"].replace(
        "{{ text }}" + CALLS, "{% generation %}{{ text ~ '<|im_end|>' }}{% endgeneration %}"
    )
    assert learnt(tagged, CONVERSATIONS["several turns"]) == (
        ["a<|im_end|>", "b<|im_end|>"],
        "2 turns tagged elsewhere than after their prompts",
    )


def test_rows_with_tools_are_written_by_the_template_called_tool_use():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATES["phi3"], "tool_use": PLAIN}
    rows = [check_row({"messages": CONVERSATIONS["a call"], "tools": TOOLS}, "f:1")]
    rows.append(check_row({"messages": CONVERSATIONS["one turn"]}, "f:2"))
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=4)
    with_tools, without = encoder.encode(rows)[0]
    assert tokenizer.decode(with_tools.tokens).startswith("<|im_start|>system\n[{")
    assert tokenizer.decode(without.tokens) == "<|user|>\nRain?<|end|>\n<|assistant|>\nNo.<|end|>\n<|endoftext|>"
    tokenizer.chat_template = encoder.exported_template  # as training leaves it beside the model
    for messages, tools, example in ((CONVERSATIONS["a call"], TOOLS, with_tools), (rows[1].messages, None, without)):
        prompt = chat_prompt(messages[:1], tools, tokenizer)
        assert prompt.tokens == example.tokens[: example.responses[0][0]]


def test_a_template_that_writes_the_date_writes_the_day_that_it_is_given():
    asked = TEMPLATES["dated"].replace("'%d %b %Y'", "'%A %-d %B %Y, %d.%m.'")
    template, messages = f"\n{asked} {{{{ strftime_now is defined }}}}", CONVERSATIONS["several turns"]
    tokenizer = chat_tokenizer(template)
    day = render(tokenizer, dated(template, date(2026, 3, 5)), messages).text
    assert day.startswith("\nToday: Thursday 5 March 2026, 05.03.\n<|im_start|>system")
    today = tokenizer.apply_chat_template(messages, tokenize=False)
    assert day == today.replace(today.split("\n")[1], "Today: Thursday 5 March 2026, 05.03.")
    assert render(tokenizer, dated(template, date.today()), messages).text == today
    assert dated(PLAIN, date(2026, 3, 5)) == PLAIN


def test_tokens_and_fingerprints_follow_the_day_of_the_run():
    messages = CONVERSATIONS["one turn"]
    first, later = (encoded(TEMPLATES["dated"], messages, day=date(2026, 3, day)) for day in (5, 6))
    assert first[2].tokens != later[2].tokens and "Today: 05 Mar 2026\n" in first[0].decode(first[2].tokens)
    for name, differ in (("dated", True), ("plain", False)):
        tokenizer = chat_tokenizer(TEMPLATES[name])
        made = {Encoder(tokenizer, 1, 4, day=date(2026, 3, day)).fingerprint for day in (5, 6)}
        assert len(made) == 1 + differ
