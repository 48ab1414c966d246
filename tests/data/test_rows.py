"""Rows are read, or refused with file, line and reason."""

from __future__ import annotations

import json

import datasets
import pytest

from blockdiff.data.rows import Row, check_row, written_texts
from blockdiff.data.sources import Source, read_rows
from blockdiff.errors import DataError

pytestmark = pytest.mark.quick

GOOD = '{"prompt": "1+1=", "response": "2"}'


def chat(*messages, **more):
    return json.dumps({"messages": list(messages), **more})


def user(content="hello"):
    return {"role": "user", "content": content}


def assistant(content="hi", **more):
    return {"role": "assistant", "content": content, **more}


def calls(*functions, **more):
    made = [{"id": str(number), "type": "function", "function": each} for number, each in enumerate(functions, 1)]
    return {"role": "assistant", "tool_calls": made, **more}


def answer(content, call=None):
    return {"role": "tool", "content": content, **({} if call is None else {"tool_call_id": call})}


CALLS = calls({"name": "get", "arguments": {"city": "Bonn"}})


def test_both_forms_of_rows_are_read_with_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + "\n\n" + chat(user(), assistant(), id=7) + "\n   \n", encoding="utf-8")
    pair, messages = list(read_rows(Source(str(path))))
    assert (pair.prompt, pair.response, pair.messages, pair.id) == ("1+1=", "2", None, None)
    assert pair.where == f"{path}:1"
    assert messages.where == f"{path}:3"
    assert messages.id == "7"
    assert messages.messages == (user(), assistant())


def test_role_names_reasoning_names_and_text_parts_come_out_in_one_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + chat(
            {"role": "developer", "content": "be brief"},
            user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            {"role": "model", "content": "c", "reasoning_content": "so", "tool_calls": None},
        ).encode()
    )
    (row,) = read_rows(Source(str(path)))
    assert row.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "reasoning": "so"},
    )


def test_conversations_in_the_sharegpt_form_are_the_same_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    lines = [
        {"conversations": [{"from": "system", "value": "s"}, *turns]},
        {"system": "s", "conversations": turns},
        {"system": "s", "messages": [user("a"), assistant("b")]},
        {"system": "", "messages": turns},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = ({"role": "system", "content": "s"}, user("a"), assistant("b"))
    assert [row.messages for row in list(read_rows(Source(str(path))))] == [expected] * 3 + [expected[1:]]


def test_prompt_and_completion_and_the_alpaca_form_are_read_without_columns():
    row = check_row({"prompt": "a", "completion": "b"}, "f:1")
    assert (row.prompt, row.response) == ("a", "b")
    assert check_row({"prompt": "a", "completion": "b", "response": "c"}, "f:1").response == "c"
    alpaca = {"instruction": "add", "input": "1 1", "output": " 2"}
    assert check_row(alpaca, "f:1").messages == (user("add\n\n1 1"), assistant(" 2"))
    assert check_row({**alpaca, "input": "", "system": "s"}, "f:1").messages == (
        {"role": "system", "content": "s"}, user("add"), assistant(" 2")
    )  # fmt: skip
    # Columns say more than names do.
    named = check_row(alpaca, "f:1", {"prompt": "input", "response": "output"})
    assert (named.prompt, named.response, named.messages) == ("1 1", " 2", None)


def test_calls_of_tools_their_answers_and_declarations_come_out_in_one_form():
    function = {"name": "get", "arguments": '{"city": "Bonn"}'}
    weather = {"name": "get", "description": "the weather", "parameters": {"type": "object"}}
    forms = [
        ({**calls(function), "content": None}, answer("sun", "1"), [{"type": "function", "function": weather}]),
        ({"role": "assistant", "content": "", "tool_calls": [function]}, answer("sun"), [weather]),
        (CALLS, {**answer("sun"), "name": "get"}, json.dumps([weather])),
    ]
    for call, result, tools in forms:
        row = check_row({"messages": [user(), call, result, assistant()], "tools": tools}, "f:1")
        assert row.tools == ({"type": "function", "function": weather},)
        made = row.messages[1]
        assert made["content"] == "" and made["tool_calls"][0]["function"] == CALLS["tool_calls"][0]["function"]
        assert (row.messages[2]["role"], row.messages[2]["name"], row.messages[2]["content"]) == ("tool", "get", "sun")
    assert check_row({"messages": [user(), assistant()], "tools": []}, "f:1").tools is None


def test_a_declaration_stays_as_it_came_and_a_bare_or_written_out_one_is_only_wrapped():
    schema = {"properties": {"zone": {"default": None, "type": "string"}, "unit": {"const": None}}, "type": "object"}
    bare = {"parameters": schema, "name": "get"}
    wrapped = {"function": bare, "type": "function", "strict": None}
    for given, expected in (
        ([wrapped], wrapped),
        ([bare], {"type": "function", "function": bare}),
        ([json.dumps(wrapped)], wrapped),
        (json.dumps([bare]), {"type": "function", "function": bare}),
    ):
        (tool,) = check_row({"messages": [user(), assistant()], "tools": given}, "f:1").tools
        assert json.dumps(tool) == json.dumps(expected)  # the order of keys, too


@pytest.mark.parametrize("kind", ["parquet", "arrow", "Dataset", "stream"])
def test_nulls_that_columns_of_objects_invent_are_no_values_and_those_that_were_written_are(tmp_path, kind):
    arguments = [{"city": "Bonn"}, {"zone": 1}]
    rows = [{"messages": [user(), calls({"name": "get", "arguments": each}), assistant()]} for each in arguments]
    table = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        table.to_parquet(tmp_path / "rows.parquet")
        source = Source(str(tmp_path / "rows.parquet"))
    elif kind == "arrow":
        table.save_to_disk(tmp_path / "rows")
        source = Source(str(tmp_path / "rows"))
    else:
        source = Source(rows=table if kind == "Dataset" else table.to_iterable_dataset())
    read = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in read_rows(source)]
    assert read == arguments
    written = {"messages": [user(), calls({"name": "get", "arguments": {"city": None, "in": [None]}})]}
    row = check_row(json.loads(json.dumps(written)), "f:1")
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None, "in": [None]}


def test_objects_that_datasets_keeps_as_json_are_read_with_their_own_nulls(tmp_path):
    call = calls({"name": "get", "arguments": {"city": None, "zone": {"a": 1}}})
    other = calls({"name": "get", "arguments": {"zone": "x"}})
    rows = [{"messages": [user(), each, assistant()]} for each in (call, other)]
    table = datasets.Dataset.from_list(rows, features=datasets.Features(messages=datasets.List(datasets.Json())))
    table.to_parquet(tmp_path / "rows.parquet")
    for source in (Source(rows=table), Source(str(tmp_path / "rows.parquet"))):
        read = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in read_rows(source)]
        assert read == [{"city": None, "zone": {"a": 1}}, {"zone": "x"}]


def test_answers_of_tools_are_given_to_calls_by_id_by_name_or_in_order():
    two = calls({"name": "get", "arguments": {}}, {"name": "set", "arguments": {}})
    swapped = [answer("a", "2"), answer("b", "1")]
    named = [{**answer("a"), "name": "set"}, answer("b")]
    for answers, names in ((swapped, ["set", "get"]), (named, ["set", "get"]), ([answer("a")] * 2, ["get", "set"])):
        row = check_row({"messages": [user(), two, *answers, assistant()]}, "f:1")
        assert [message["name"] for message in row.messages[2:4]] == names


def test_the_texts_of_a_row_are_all_that_somebody_wrote():
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"})
    assert list(written_texts(Row("f:1", messages=talk))) == ["a", "c", "b"]
    assert list(written_texts(Row("f:1", prompt="", response="b"))) == ["b"]


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"prompt": "a", "response"', "not valid JSON"),
        ("{'prompt': 'a'}", "not valid JSON"),
        ('{"prompt": "a', "JSON.*column 14"),
        (GOOD + GOOD, "not valid JSON"),
        ("[" * 100_000, "nested"),
        ('{"prompt": "a", "response": NaN}', "NaN"),
        ("[1, 2]", "row is a list"),
        ("null", "row is null"),
        ("3", "row is a number"),
        ("{}", "keys: none"),
        ('{"promt": "a", "completion": "b"}', "keys: 'promt', 'completion'.*'prompt'"),
        ('{"mesages": []}', "'messages'.*'mesages'"),
        ('{"prompt": [], "completion": []}', "no assistant"),
        ('{"prompt": [], "completion": "a"}', "prompt is a list.*completion is a string"),
        ('{"prompt": "a", "completion": []}', "completion is a list.*prompt is a string"),
        ('{"prompt": "a", "completion": ""}', "completion is empty"),
        ('{"prompt": "a", "response": "b", "tools": [{}]}', ": has tools, .*prompt"),
        ('{"instruction": "a", "input": "b"}', "neither messages.*prompt"),
        ('{"instruction": "a", "output": " "}', "output.*empty"),
        ('{"instruction": "a", "output": "b", "history": [["c", "d"]]}', "history"),
        ('{"prompt": "a"}', "response.*missing"),
        ('{"response": "a"}', "prompt.*missing"),
        ('{"prompt": 1, "response": "a"}', "prompt.*number"),
        ('{"prompt": "a", "response": ["b"]}', ": response .*list"),
        ('{"prompt": "a", "response": true}', "response.*boolean"),
        ('{"prompt": "a", "response": ""}', "response.*empty"),
        ('{"prompt": "\\ud800", "response": "a"}', "prompt.*surrogate"),
        ('{"prompt": "a", "response": "b", "id": [1]}', r"\bid .*list"),
        ('{"prompt": "a", "response": "b", "messages": []}', "messages.*prompt/response"),
        ('{"messages": {}}', ": messages is an object"),
        ('{"messages": []}', "no assistant"),
        (chat(user()), "no assistant"),
        (chat("hello"), r"messages\[0\] .*string"),
        (chat({"content": "a"}), r"messages\[0\].*no role"),
        (chat(user(), {"role": "assistant"}), r"messages\[1\].*no content"),
        (chat({"role": "wizard", "content": "a"}), "role 'wizard'"),
        (chat({"role": ["user"], "content": "a"}), r"role \['user'\]"),
        (chat({"role": "tool", "content": "a"}), "no assistant"),
        (chat(user(), CALLS, answer("a", "2"), assistant()), "call '2'"),
        (chat(user(), CALLS, answer("a", "1"), answer("b", "1"), assistant()), r"messages\[3\].*role tool"),
        (chat(user(), CALLS, {**answer("a"), "name": "set"}, assistant()), "tool 'set'"),
        (chat(user(), calls({"name": "get", "arguments": "{"})), r"arguments.*string.*JSON"),
        (chat(user(), calls({"name": "get", "arguments": [1]})), "arguments.*list"),
        (chat(user(), calls({"name": "get", "arguments": {"a": "\ud800"}})), r"arguments\.a.*surrogate"),
        (chat(user(), calls({"arguments": {}})), r"messages\[1\].*no function"),
        (chat({**user(), "tool_calls": [1]}, assistant()), "only an assistant"),
        (chat(user(), {**assistant(), "tool_responses": [1]}), "tool_responses"),
        (chat(user(), assistant(), tools=[{"type": "function"}]), r"tools\[0\].*no function"),
        (chat(user(), assistant(), tools={"name": "get"}), "tools.*object"),
        (chat(user(), assistant(), tools=[{"name": "get", "parameters": []}, {"name": 1}]), r"tools\[1\]"),
        (chat(user(None), assistant()), r"messages\[0\]\.content .*null"),
        (chat(user(), assistant("  \n")), r"messages\[1\]\.content.*empty"),
        (chat(user(), assistant(tool_calls=[{}])), r"tool_calls\[0\].*no function"),
        (chat(user(), assistant(reasoning=4)), r"messages\[1\]\.reasoning.*number"),
        (chat({**user(), "reasoning": "x"}, assistant()), "only an assistant"),
        (chat(user(), {"role": "system", "content": "a"}, assistant()), r"messages\[1\].*role system"),
        (chat(user([{"type": "image"}]), assistant()), "1 parts.*image"),
        (chat(user([{"type": []}]), assistant()), r"content\[0\] is \[\]"),
        (chat(user(), {"role": "tool_call", "content": 5}), r"messages\[1\] .*tool_call.*number"),
        (chat(user(), assistant([{"type": "tool_use"}])), r"messages\[1\]\.tool_calls\[0\].*no function"),
        (chat(user(), assistant(train_detail=[])), "train_detail"),
        (chat(user(), assistant(weight="0")), r"weight is '0'"),
        (chat(user([{"type": "text"}]), assistant()), r"content\[0\]\.text.*null"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_reason(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD + "\n\n" + line + "\n" + GOOD + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=reason) as caught:
        list(read_rows(Source(str(path))))
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert ";" in message and "\n" not in message


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*UTF-8"):
        list(read_rows(Source(str(path))))


def test_files_that_hold_nothing_are_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n  \n")
    with pytest.raises(DataError, match=r"empty\.jsonl: .*no rows"):
        list(read_rows(Source(str(empty))))
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(Source(str(tmp_path / "missing.jsonl"))))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder: .*without rows"):
        list(read_rows(Source(str(tmp_path / "folder"))))


def test_a_row_with_another_name_for_its_response_is_told_of_columns():
    with pytest.raises(DataError, match=r"columns.*response.*'answer'"):
        check_row({"prompt": "a", "answer": "b", "id": 1}, "rows.jsonl:1")
