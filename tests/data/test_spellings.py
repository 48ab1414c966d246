"""Rows of other tools: excluded turns stay unlearnt, and calls are calls in every spelling."""

from __future__ import annotations

import json

import pytest

from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator
from blockdiff.data.dataset import load_dataset
from blockdiff.data.rows import Row, check_row
from blockdiff.data.sources import Source
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenise import conversation as prompted
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import DataError
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Rain in Bonn?"}
SAID = {"role": "assistant", "content": "No."}
ARGUMENTS = {"city": "Bonn"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "content": "sun", "name": "weather"}
CONVERSATION = (USER, CALLED, ANSWERED, SAID)
WRITTEN = json.dumps({"name": "weather", "arguments": ARGUMENTS})


def messages(row, **options):
    return check_row(row, "f:1", **options).messages


def talk(*turns):
    return {"messages": list(turns)}


# What each tool writes for the conversation above.
SPELLINGS = {
    "OpenAI": talk(USER, {**CALLED, "content": None}, {"role": "tool", "content": "sun"}, SAID),
    "OpenAI before tools": talk(
        USER,
        {"role": "assistant", "content": None, "function_call": json.loads(WRITTEN)},
        {"role": "function", "name": "weather", "content": "sun"},
        SAID,
    ),
    "JSON text": {"messages": json.dumps([USER, {**CALLED, "tool_calls": json.dumps([CALL])}, ANSWERED, SAID])},
    "messages as JSON": talk(*map(json.dumps, CONVERSATION)),
    "ShareGPT of LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "Rain in Bonn?"},
            {"from": "function_call", "value": WRITTEN},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "No."},
        ]
    },
    "ms-swift": talk(
        USER, {"role": "tool_call", "content": WRITTEN}, {"role": "tool_response", "content": "sun"}, SAID
    ),
    "Anthropic": talk(
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": ARGUMENTS}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sun"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    ),
    "TRL": {"prompt": [USER], "completion": [CALLED, ANSWERED, SAID]},
}


@pytest.mark.parametrize("tool", SPELLINGS)
def test_the_same_conversation_comes_out_of_every_tools_spelling(tool):
    found = [dict(message) for message in messages(SPELLINGS[tool])]
    assert found[2].pop("tool_call_id", "1") == "1"
    found[1]["tool_calls"] = [
        {key: value for key, value in call.items() if key != "id"} for call in found[1]["tool_calls"]
    ]
    assert found == list(CONVERSATION)


def test_calls_in_turns_of_their_own_join_the_turn_before_and_answers_find_them():
    first, second = ({"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}})} for name in "ab")
    found = messages(
        talk(USER, SAID, first, second, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"})
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool"]
    assert found[1]["content"] == "No."
    assert [call["function"]["name"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert [message["name"] for message in found[2:]] == ["a", "b"]


def test_anthropics_reasoning_and_what_the_user_says_behind_an_answer_are_kept():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]}
    found = messages(
        talk(
            USER,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            SAID,
        )
    )
    assert (found[1]["reasoning"], found[1]["content"]) == ("hm", "I look.")
    assert [message["content"] for message in found[2:]] == ["sun", "Well?", "No."]
    with pytest.raises(DataError, match=r"f:1: messages\[1\] .*tool_use"):
        messages(talk(USER, {"role": "assistant", "content": [use, {"type": "text", "text": "behind"}]}))
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    seen = messages(talk({"role": "user", "content": [{"type": "image", "source": source}]}, SAID))
    assert seen[0]["content"] == [{"type": "image", "image": b"hi"}]
    schema = {"properties": {}, "type": "object"}
    (tool,) = check_row({**talk(USER, SAID), "tools": [{"name": "f", "input_schema": schema}]}, "f:1").tools
    assert tool == {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("nothing", [None, "null", " ", "", {}])
def test_a_call_without_arguments_has_none_in_every_spelling(nothing):
    found = messages(talk(USER, {"role": "assistant", "tool_calls": [{"name": "go", "arguments": nothing}]}))
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {}
    go = {"function": {"name": "go", "arguments": nothing}}
    asked, _ = prompted(
        [USER, {"role": "assistant", "content": "", "tool_calls": [go]}, {"role": "tool", "content": ""}]
    )
    assert asked[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert "tool_calls" not in messages(talk(USER, {**SAID, "tool_calls": "[]"}))[1]


def test_an_answer_of_a_tool_that_nobody_called_is_read_and_an_id_may_be_a_whole_number_in_a_column_of_fractions():
    found = messages(talk(USER, {"role": "tool", "content": "sun"}, SAID))
    assert found[1] == {"role": "tool", "content": "sun"}
    assert check_row({**talk(USER, SAID), "id": 1.0}, "f:1").id == "1"


def test_a_row_of_messages_and_a_prompt_is_told_how_to_choose():
    with pytest.raises(DataError, match=r"f:1: has both .*data\.columns"):
        check_row({**talk(USER, SAID), "prompt": "Rain?"}, "f:1")
    assert messages({**talk(USER, SAID), "prompt": None}) == (USER, SAID)
    assert messages({"prompt": [USER], "answer": 4}, is_asked=True) == (USER,)


MARKS = [("weight", 0), ("train", False), ("loss", False), ("loss", None), ("trainable", False)]


@pytest.mark.parametrize(("key", "mark"), MARKS)
def test_turns_that_their_author_excludes_are_marked_and_others_are_not(key, mark):
    yes = {"weight": 1}.get(key, True)
    found = messages(talk(USER, {**SAID, key: mark}, {**USER, key: mark}, {**SAID, key: yes}, USER, SAID))
    assert [message.get("is_learnt", True) for message in found] == [True, False, True, True, True, True]
    assert messages(talk(USER, {**SAID, "weight": None}))[1] == SAID


def test_of_prompt_and_completion_in_messages_the_prompts_turns_are_not_learnt():
    found = messages({"prompt": [USER, SAID, USER], "completion": [SAID]})
    assert [message.get("is_learnt", True) for message in found] == [True, False, True, True]


BODIES = [("first", 0), ("second", 1), ("third", 2)]


def conversation(*excluded):
    turns = []
    for text, number in BODIES:
        turns += [{"role": "user", "content": f"say {text}"}, {"role": "assistant", "content": text}]
        turns[-1] |= {"is_learnt": False} if number in excluded else {}
    return Row("f:1", messages=tuple(turns))


@pytest.mark.parametrize("template", [packaged_template(), CHATML], ids=["with tags", "without"])
@pytest.mark.parametrize("excluded", [(0,), (1,), (0, 2)])
def test_an_excluded_turn_is_seen_and_neither_canvases_nor_next_tokens_score_it(template, excluded):
    tokenizer = chat_tokenizer(template)
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=4)
    (whole,), _ = encoder.encode([conversation()])
    (example,), statistics = encoder.encode([conversation(*excluded)])
    assert example.tokens == whole.tokens
    assert list(example.excluded) == [whole.responses[number] for number in excluded]
    assert example.responses == [span for number, span in enumerate(whole.responses) if number not in excluded]
    assert statistics.unscored_turns == len(excluded)
    assert f"({len(excluded)} assistant turn" in str(statistics)
    batch = Collator(4, 0, 1, 0, StratifiedTime(), canvases=AllCanvases())(
        [example], epoch=0, step=1, slots=[0], total_slots=1
    )
    columns = {column for start, end in example.excluded for column in range(start, end)}
    targets = {column + 1 for column in batch.is_ar_scored_BS[0].nonzero().flatten().tolist()}
    assert targets == set(range(1, len(example.tokens))) - columns
    starts = batch.start_BC[0][batch.length_BC[0] > 0].tolist()
    assert starts and not columns & {int(start) for start in starts}


def test_a_call_is_excluded_whole_and_the_text_behind_the_tools_answer_is_learnt():
    tokenizer = byte_level_bpe(["weather"], 300)
    tokenizer.chat_template = packaged_template()
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=4)
    marked = {**CALLED, "content": "I look.", "is_learnt": False}
    (example,), _ = encoder.encode([Row("f:1", messages=(USER, marked, ANSWERED, SAID))])
    texts = [tokenizer.decode(example.tokens[slice(*span)]) for span in (*example.excluded, *example.responses)]
    assert texts == [
        '<|tool_call>call:weather{city:<|"|>Bonn<|"|>}<tool_call|><|tool_response>',
        "I look.",
        "No.<turn|>\n",
    ]


def test_of_the_last_turn_alone_an_excluded_one_leaves_nothing():
    encoder = Encoder(chat_tokenizer(CHATML), eos_id=1, canvas_length=4, turns="last")
    with pytest.raises(DataError, match=r"f:1: .*data\.turns"):
        encoder.encode([conversation(2)])
    (example,), _ = encoder.encode([conversation(0)])
    assert len(example.responses) == len(example.excluded) == 1


def test_the_cache_keeps_what_is_excluded_and_names_keys_that_nothing_reads_once(tmp_path):
    encoder = Encoder(chat_tokenizer(CHATML), eos_id=1, canvas_length=4)
    turns = [USER, {**SAID, "weight": 0}, {**USER, "name": "Ada"}, SAID]
    rows = [{"messages": turns, "source": "web", "score": number} for number in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):
        data = load_dataset([Source(str(path))], encoder, cache=tmp_path / "cache")
        assert [len(example.excluded) for example in data.examples] == [1, 1, 1]
        assert data.total.unread == ["messages.name", "score", "source"]
        assert "3 keys are not read: messages.name, score, source" in data.total.unread_keys


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "Dataset"])
def test_keys_that_nothing_reads_are_named_of_columns_and_of_messages(tmp_path, kind):
    import datasets

    table = datasets.Dataset.from_list([{"messages": [{**USER, "mood": "wet"}, SAID], "source": "web"}])
    source = Source(str(tmp_path / f"rows.{kind}"), columns={"messages": "messages"})
    if kind == "jsonl":
        table.to_json(source.path)
    elif kind == "parquet":
        table.to_parquet(source.path)
    else:
        source = Source(rows=table)
    data = load_dataset([source], Encoder(chat_tokenizer(CHATML), eos_id=1, canvas_length=4), cache=None)
    assert data.total.unread == ["messages.mood", "source"]


@pytest.mark.parametrize("key", ["label", "kto_tag"])
@pytest.mark.parametrize("no", [False, "False"])
def test_an_answer_that_its_author_calls_a_bad_one_is_refused_where_it_would_be_learnt(key, no):
    with pytest.raises(DataError, match=rf"f:1: {key} is false"):
        check_row({"prompt": "a", "completion": "b", key: no}, "f:1")
    assert check_row({"prompt": "a", key: no}, "f:1", is_asked=True).prompt == "a"
    assert not check_row({"prompt": "a", "completion": "b", key: True}, "f:1").unread
    assert check_row({"prompt": "a", "completion": "b", key: 3}, "f:1").unread == {key}


def test_a_text_is_learnt_whole_by_next_tokens_and_refused_by_canvases():
    row = check_row({"text": "all of it", "meta": 1}, "f:1")
    tokenizer = chat_tokenizer()
    (example,), _ = Encoder(tokenizer, eos_id=1, canvas_length=1, chat=True).encode([row])
    assert example.tokens == [2, *tokenizer.encode("all of it", add_special_tokens=False), 1]
    assert example.responses == [(1, len(example.tokens))]
    with pytest.raises(DataError, match=r"f:1: .*prompt .*response"):
        Encoder(tokenizer, eos_id=1, canvas_length=4).encode([row])
