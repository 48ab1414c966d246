"""`/v1/responses`, asked by OpenAI's client: the same answers as chats have, as items and typed events."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai
import pydantic
import pytest

from blockdiff.errors import RequestError
from blockdiff.sampling import Request
from blockdiff.serving.async_engine import Terms
from blockdiff.serving.bodies import parsed_body
from blockdiff.serving.content import served_messages
from blockdiff.serving.engine_thread import BASE
from blockdiff.serving.limits import Limits
from blockdiff.serving.protocol import INERT
from blockdiff.serving.responses import api_call
from blockdiff.serving.responses_body import ResponsesRequest, as_chat, messages_of
from tests.support.asking import answering, served

pytestmark = pytest.mark.quick

ASKED = {"model": "blockdiff", "input": "hi"}
SEED = {"extra_body": {"seed": 5}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": PARAMETERS,
    "strict": True,
}
SAID = '<|channel>thought\nlet me see\n<channel|>so: <|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>'


class Weather(pydantic.BaseModel):
    """A form of an answer."""

    days: int
    is_wet: bool


async def streamed(asking, **options):
    """The events of a stream, and the response at its end."""
    async with asking.openai.responses.stream(**options) as stream:
        return [event async for event in stream], await stream.get_final_response()


def test_a_response_is_what_the_sampler_answers_whole_or_as_a_stream(chatty):
    [alone] = chatty.generate([Request(0, messages=[{"role": "user", "content": "hi"}], seed=5)])

    async def use(asking):
        whole = await asking.openai.responses.create(**ASKED, **SEED, metadata={"a": "b"}, store=True)
        events = await asking.openai.responses.create(**ASKED, **SEED, stream=True)
        return whole, [event async for event in events]

    whole, events = served(chatty, use)
    assert whole.object == "response" and whole.id.startswith("resp_") and whole.model == "blockdiff"
    assert whole.output_text == alone.text and whole.steps == alone.steps
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.store, whole.metadata, whole.error) == (False, {"a": "b"}, None)
    assert whole.usage.input_tokens == alone.prompt_tokens and whole.usage.output_tokens == len(alone.tokens)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == alone.text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == alone.text


def test_reasoning_text_and_calls_are_items_whole_or_streamed():
    async def use(asking):
        options = dict(ASKED, tools=[WEATHER], reasoning={"effort": "high"})
        return await asking.openai.responses.create(**options), await streamed(asking, **options)

    whole, (events, final) = served(answering(SAID), use)
    types = [event.type.removeprefix("response.") for event in events]
    assert [each for number, each in enumerate(types) if each != types[number - 1]] == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ),
        *("output_item.done", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    for response in (whole, final):
        thought, message, call = response.output
        assert (thought.content[0].text, message.content[0].text) == ("let me see", "so: ")
        assert call.name == "weather" and json.loads(call.arguments) == {"city": "Ulm", "days": 2}
        assert {item.status for item in response.output} == {"completed"} == {response.status}
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]


def test_reasoning_is_a_summary_where_one_is_asked_for_and_goes_back_as_reasoning():
    async def use(asking):
        options = dict(ASKED, tools=[WEATHER], reasoning={"effort": "high", "summary": "auto"})
        options["include"] = ["reasoning.encrypted_content"]
        return await asking.openai.responses.create(**options), await streamed(asking, **options)

    whole, (events, final) = served(answering(SAID), use)
    for response in (whole, final):
        assert response.output[0].content is None and response.output[0].summary[0].text == "let me see"
        assert response.output[0].encrypted_content == "none"
    said = [event for event in events if event.type.startswith("response.reasoning_summary")]
    assert "".join(event.delta for event in said if event.type.endswith("text.delta")) == "let me see"
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in said]
    assert [*dict.fromkeys(kinds)] == ["part.added", "text.delta", "text.done", "part.done"]
    history = [item.model_dump(exclude_none=True) for item in whole.output]
    assert messages_of(ResponsesRequest(input=history))[0]["reasoning"] == "let me see"


def test_reasoning_that_is_cut_is_an_item_that_is_not_complete():
    async def use(asking):
        return await asking.openai.responses.create(**ASKED, max_output_tokens=12)

    found = served(answering(SAID), use)
    [thought] = found.output
    assert thought.status == found.status == "incomplete" and thought.content[0].text.startswith("let")


def test_a_class_is_parsed_and_a_forced_call_has_its_arguments(chatty):
    async def use(asking):
        limits = dict(ASKED, **SEED, max_output_tokens=48)
        parsed = await asking.openai.responses.parse(**limits, text_format=Weather)
        _, final = await streamed(asking, **limits, text_format=Weather)
        tool = openai.pydantic_function_tool(Weather, name="now")["function"]
        choice = {"type": "function", "name": "now"}
        forced = dict(limits, tools=[{"type": "function", **tool}], tool_choice=choice)
        return parsed, final, await asking.openai.responses.parse(**forced)

    parsed, final, forced = served(chatty, use)
    assert isinstance(parsed.output_parsed, Weather) and parsed.output_parsed == final.output_parsed
    [call] = forced.output
    assert Weather(**call.parsed_arguments) == Weather(**json.loads(call.arguments)) and forced.status == "completed"


def test_a_history_of_items_is_the_conversation_that_a_chat_has():
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "1",
        "name": "weather",
        "arguments": "{}",
        "status": "completed",
    }
    items = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "and"}]},
        call,
        call | {"call_id": "2", "parsed_arguments": None},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "assistant", "phase": "final_answer", "content": "done"},
        {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "x"},
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}],
        },
    ]
    calls = [{"id": id, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for id in "12"]
    assert messages_of(ResponsesRequest(input=items, instructions="be kind")) == [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "reasoning": "hm\nand", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "2", "content": "rain"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AA"}]},
    ]


def test_what_a_response_said_goes_back_as_its_input_with_the_outputs_of_calls():
    async def use(asking):
        create, tools = asking.openai.responses.create, [WEATHER]
        first = await create(**ASKED, tools=tools)
        outputs = [{"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}]
        history = [{"role": "user", "content": "hi"}, *first.output, *outputs]
        chat = await asking.openai.chat.completions.create(
            model="blockdiff",
            messages=[
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "so: ",
                    "reasoning": "let me see",
                    "tool_calls": [
                        {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 2}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "sun"},
            ],
            tools=[{"type": "function", "function": {key: each for key, each in WEATHER.items() if key != "type"}}],
        )
        return (
            await create(model="blockdiff", input=history, tools=tools)
        ).usage.input_tokens, chat.usage.prompt_tokens

    tokens, of_chat = served(answering(SAID), use)
    assert tokens == of_chat


def test_the_items_of_an_input_are_let_go_once_they_are_read(chatty):
    async def use(asking):
        body = ResponsesRequest(input=[{"role": "user", "content": "hi"}])
        return body, api_call(body, asking.server, Terms(0.0, "a", None, BASE))

    body, call = served(chatty, use)
    assert body.input == "" and call.body.messages == [] and call.streams[0].request.messages


def test_log_probabilities_stand_with_the_text(chatty):
    async def use(asking):
        options = dict(ASKED, **SEED, include=["message.output_text.logprobs"], top_logprobs=2)
        whole = await asking.openai.responses.create(**options)
        chat = await asking.openai.chat.completions.create(
            model="blockdiff", messages=[{"role": "user", "content": "hi"}], seed=5, logprobs=True, top_logprobs=2
        )
        return whole.output[0].content[0].logprobs, chat.choices[0].logprobs.content

    found, of_chat = served(chatty, use)
    assert [each.model_dump() for each in found] == [each.model_dump() for each in of_chat]


def test_an_error_under_way_is_an_error_of_the_client_and_the_response_has_failed(monkeypatch):
    from blockdiff.errors import EngineError
    from blockdiff.serving.deltas import AnswerStream

    def fail(*_):
        raise EngineError("the engine failed")

    monkeypatch.setattr(AnswerStream, "end", fail)

    async def use(asking):
        with pytest.raises(openai.APIError, match="the engine failed"):
            await streamed(asking, **ASKED)
        text = (await asking.http.post("/v1/responses", json={**ASKED, "stream": True})).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]

    *_, error, failed = served(answering("hello"), use)
    assert (error["type"], error["code"], error["message"]) == ("error", "server_error", "the engine failed")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "the engine failed"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n: is not a field of /v1/responses"),
        ({"include": ["web_search_call.results"]}, "include.0"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is 'web_search'"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0] is 'mcp'"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "other"),
        ({"reasoning": {"effort": "low", "mode": "pro"}}, "reasoning.mode"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0] refers to an item by its id"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0] is 'web_search_call'"),
        ({"input": [{"type": "function_call_output", "call_id": "9", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.b/c.png"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [3]}, "input"),
        ({"input": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"regex": "(", "seed": 1}, "regular expression"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(chatty, options, word):
    status, error = served(chatty, lambda asking: asking.refusal("/v1/responses", **{**ASKED, **options}))
    assert status == 400 and word in error["message"] and "\n" not in error["message"]


ODD = [
    10**20,
    -1,
    1e308,
    True,
    None,
    "",
    "\ud800",
    [],
    {},
    [None],
    [{}],
    [[]],
    {"type": None},
    {"type": []},
    {"text": 3},
]
PLACES = {
    "body": [*ResponsesRequest.model_fields, "previous_response_id"],
    "item": ["type", "role", "content", "call_id", "name", "arguments", "output", "summary"],
    "part": ["type", "text", "image_url", "refusal"],
    "tool": ["type", "name", "parameters", "function"],
}


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_are_taken_or_refused_and_raise_nothing_else(value):
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
    ]
    cases = [{**ASKED, name: value} for name in PLACES["body"]] + [{**ASKED, "input": [value]}]
    for place, item in enumerate(items):
        changed = [{**item, name: value} for name in PLACES["item"]]
        changed += [
            {**item, key: [{**part, name: value}]}
            for key in ("content", "output")
            for part in item.get(key, ())
            for name in PLACES["part"]
        ]
        cases += [{**ASKED, "input": [*items[:place], each, *items[place + 1 :]]} for each in changed]
    cases += [{**ASKED, "tools": [{**WEATHER, name: value}]} for name in PLACES["tool"]]
    taken = 0
    for case in cases:
        try:
            chat = as_chat(parsed_body(json.dumps(case).encode(), ResponsesRequest, "/v1/responses"))
            served_messages(chat.messages, Limits())
            taken += 1
        except RequestError as error:
            assert "\n" not in str(error)
    assert 0 < taken < len(cases)


def test_a_response_cannot_be_had_again(chatty):
    async def use(asking):
        for call in (asking.openai.responses.retrieve, asking.openai.responses.delete, asking.openai.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="/v1/responses/resp_1"):
                await call("resp_1")

    served(chatty, use)


def test_the_table_of_fields_is_that_of_the_body():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.partition("\n## Responses\n")[2].partition("\n## ")[0]
    told = {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", section)}
    table = page.partition("\n## Fields\n")[2].partition("\n## ")[0]
    own = {field.alias or name for name, field in ResponsesRequest.model_fields.items()}
    assert own <= told | {*re.findall(r"`([a-z_]+)`", table)}
    assert {*ResponsesRequest.neutral} - {"prompt"} <= told | {*re.findall(r"`([a-z_]+)`", table)} | INERT
