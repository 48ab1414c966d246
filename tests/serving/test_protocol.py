"""OpenAI's protocol, asked by OpenAI's client: what is honoured, what passes, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import openai
import pytest

from blockdiff.request_options import SERVED
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.scores import score
from blockdiff.serving.limits import Limits
from blockdiff.serving.mapping import common_fields
from blockdiff.serving.protocol import INERT, NEUTRAL, ChatRequest, CompletionRequest
from tests.support.asking import answering, chat_tokenizer, served

pytestmark = pytest.mark.quick

USER = [{"role": "user", "content": "hi"}]
KINDS = {"chat": ChatRequest, "completions": CompletionRequest}
ASKED = {"model": "blockdiff", "messages": USER, "seed": 5}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


async def streamed(asking, **options):
    """The chunks of a chat's stream."""
    return [chunk async for chunk in await asking.openai.chat.completions.create(stream=True, **options)]


def joined(chunks, index=0):
    """The content of an answer's deltas."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(delta.content or "" for delta in deltas)


def test_each_option_of_a_request_that_a_body_has_is_passed_on_alone(chatty):
    given = dict(template="a<?2>", regex="a", json_schema={"type": "null"}, banned=["a", 3], draft="ab")
    given |= dict(max_steps=3, min_tokens=2, best_of=2, repetition_penalty=1.5, noise=0.25)
    assert given.keys() == SERVED.keys()
    for kind, prompt in ((ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "a"})):
        unasked = common_fields(kind(**prompt), chatty.settings, Limits(), None)
        for name, value in given.items():
            fields = common_fields(kind(**prompt, **{SERVED[name]: value}), chatty.settings, Limits(), None)
            assert fields == unasked | {name: tuple(value) if isinstance(value, list) else value}


def test_a_chat_is_what_the_sampler_answers_whole_or_as_a_stream(chatty):
    [alone] = chatty.generate([Request(0, messages=USER, seed=5, scores=True)])

    async def use(asking):
        create = asking.openai.chat.completions.create
        options = {"stream_options": {"include_usage": True}}
        return await create(**ASKED), await streamed(asking, **ASKED, **options)

    whole, chunks = served(chatty, use)
    [choice] = whole.choices
    assert whole.object == "chat.completion" and whole.model == "blockdiff" and whole.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content == alone.text == joined(chunks)
    assert choice.finish_reason == "length" and choice.steps == alone.steps
    assert whole.usage.completion_tokens == 16 == len(alone.tokens)
    assert whole.usage.prompt_tokens == alone.prompt_tokens and whole.usage.denoising_steps == sum(alone.steps)
    *news, last = chunks
    assert last.choices == [] and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert news[0].choices[0].delta.role == "assistant" and news[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == news[0].id for chunk in news)


def test_completions_continue_texts_and_tokens_in_order_with_n_answers_each(chatty):
    tokens = chatty.tokenizer("abc", add_special_tokens=False)["input_ids"]

    async def use(asking):
        create = asking.openai.completions.create
        several = await create(model="blockdiff", prompt=["a", "b"], n=2, seed=3, max_tokens=5)
        stream = await create(model="blockdiff", prompt=tokens, seed=3, stream=True)
        return several, [chunk async for chunk in stream]

    several, chunks = served(chatty, use)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in several.choices}) > 1
    assert several.usage.completion_tokens == 4 * 5 and {each.finish_reason for each in several.choices} == {"length"}
    [alone] = chatty.generate([Request(0, tokens=tokens, seed=3)])
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_seed_repeats_an_answer_and_temperature_zero_needs_none(chatty):
    async def use(asking):
        async def text(**options):
            found = await asking.openai.chat.completions.create(**{**ASKED, "seed": openai.omit, **options})
            return [choice.message.content for choice in found.choices]

        return [
            await text(**options)
            for options in ({"seed": 1}, {"seed": 1, "n": 2}, {"temperature": 0}, {"temperature": 0}, {}, {})
        ]

    first, two, zero, zero_again, free, other = served(chatty, use)
    assert first == two[:1] and two[0] != two[1]
    assert zero == zero_again and free != other


def test_the_log_probabilities_are_those_of_the_next_token_head(chatty):
    [alone] = chatty.generate([Request(0, messages=USER, seed=5, scores=True, top_logprobs=2)])

    async def use(asking):
        chunks = await streamed(asking, **ASKED, logprobs=True)
        whole = await asking.openai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
        old = await asking.openai.completions.create(model="blockdiff", prompt="a", logprobs=2, max_tokens=3)
        return whole.choices[0].logprobs.content, chunks[-1].choices[0].logprobs.content, old.choices[0].logprobs

    whole, last, old = served(chatty, use)
    assert [each.logprob for each in whole] == pytest.approx(alone.logprobs)
    assert [each.logprob for each in last] == pytest.approx(alone.logprobs)
    assert all(len(each.top_logprobs) == 2 for each in whole)
    for each, best in zip(whole, alone.top_logprobs, strict=True):
        assert best[0][1] >= best[1][1] and best[0][1] >= each.logprob - 1e-5
        if best[0][0] == chatty.tokenizer(each.token)["input_ids"][0]:
            assert best[0][1] == pytest.approx(each.logprob, abs=1e-5)
    assert len(old.tokens) == len(old.token_logprobs) == len(old.text_offset) == 3


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"response_format": {"type": "json_object"}}, dict),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": WEATHER["function"]["parameters"]},
                }
            },
            dict,
        ),
        ({"extra_body": {"regex": "[0-9]{3}"}}, int),
        ({"extra_body": {"template": "[<?2>, 7]", "regex": r"\[[0-9]+, 7\]"}}, list),
        ({"extra_body": {"template": "12<?1>", "regex": "[0-9]+"}, "temperature": 0, "max_tokens": 1}, int),
    ],
)
def test_an_answer_has_the_form_that_is_asked_for(chatty, options, holds):
    async def use(asking):
        options_of_all = {**ASKED, "max_tokens": 48, **options}
        whole = await asking.openai.chat.completions.create(**options_of_all)
        return whole.choices[0].message.content, joined(await streamed(asking, **options_of_all))

    whole, stream = served(chatty, use)
    assert whole == stream and isinstance(json.loads(whole), holds)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_always_parses(chatty, choice):
    nothing = {"type": "function", "function": {"name": "now"}}

    async def use(asking):
        options = dict(tools=[WEATHER, nothing], tool_choice=choice, max_tokens=96, n=2, stop=['"', "{}"])
        return await asking.openai.chat.completions.create(**ASKED, **options), await streamed(
            asking, **ASKED, **options
        )

    whole, chunks = served(chatty, use)
    for each in whole.choices:
        [call] = each.message.tool_calls
        assert each.finish_reason == "tool_calls" and each.message.content is None
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert isinstance(arguments["days"], int) and len(arguments["city"]) <= 4
        else:
            assert arguments == {} and choice == "required"
        deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == each.index]
        [streamed_call] = [call for delta in deltas for call in delta.tool_calls or ()]
        assert streamed_call.function.model_dump() == call.function.model_dump()


def test_reasoning_and_calls_are_fields_and_not_text_whole_or_streamed():
    text = (
        '<|channel>thought\nlet me see\n<channel|>so: <|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>'
    )
    text += '<|tool_call>call:weather{city:<|"|>Rom<|"|>,days:1}<tool_call|>'

    async def use(asking):
        options = dict(tools=[WEATHER], extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        one = await asking.openai.chat.completions.create(**ASKED, **options, parallel_tool_calls=False)
        whole = await asking.openai.chat.completions.create(**ASKED, **options)
        return one, whole, await streamed(asking, **ASKED, **options)

    # the first canvas ends after the reasoning's line break, which is no part of it
    length = len(chat_tokenizer()(text.partition("<channel|>")[0], add_special_tokens=False)["input_ids"])
    one, whole, chunks = served(answering(text, length), use)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("let me see", "so: ")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"city": "Ulm", "days": 2},
        {"city": "Rom", "days": 1},
    ]
    assert whole.choices[0].finish_reason == "tool_calls" and len(one.choices[0].message.tool_calls) == 1
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert joined(chunks) == "so: "
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "let me see"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, json.loads(call.function.arguments)["city"]) for call in calls] == [(0, "Ulm"), (1, "Rom")]
    assert len([delta for delta in deltas if delta.content or getattr(delta, "reasoning_content", None)]) > 1


@pytest.mark.parametrize(
    ("options", "content", "calls", "finish"),
    [
        ({"tool_choice": "none"}, "so: call:weather{city:Ulm,days:2}", 0, "stop"),
        ({"tools": openai.omit}, "so: call:weather{city:Ulm,days:2}", 0, "stop"),
        ({"max_tokens": 25}, "so: ", 0, "length"),
        ({"stop": "Ulm"}, "so: ", 0, "length"),
        ({}, "so: ", 1, "tool_calls"),
    ],
)
def test_what_no_call_may_be_is_content_and_a_call_that_is_cut_is_left_out(options, content, calls, finish):
    text = 'so: <|tool_call>call:weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>'

    async def use(asking):
        asked = {**ASKED, "tools": [WEATHER], **options}
        whole = await asking.openai.chat.completions.create(**asked)
        return whole.choices[0], await streamed(asking, **asked)

    whole, chunks = served(answering(text), use)
    assert (whole.message.content or "", len(whole.message.tool_calls or ())) == (content, calls)
    streamed_calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (joined(chunks), len(streamed_calls)) == (content, calls)
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == finish


def test_a_stream_never_says_what_a_stop_text_or_half_a_character_takes_back():
    async def use(asking):
        options = dict(**ASKED, stop=["STOP", "!"])
        whole = await asking.openai.chat.completions.create(**options)
        return whole.choices[0], await streamed(asking, **options)

    text = "0123456789a ST\u20acOP 0123456STOP and more"
    whole, chunks = served(answering(text, canvas_length=5, canvases=12), use)
    assert whole.message.content == joined(chunks) == "0123456789a ST\u20acOP 0123456"
    assert whole.finish_reason == "stop" and not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks)


def test_a_form_that_fills_all_its_tokens_has_stopped_and_was_not_cut(chatty):
    async def use(asking):
        options = {**ASKED, "max_tokens": 16, "extra_body": {"regex": "[a-z]{16}"}}
        return await asking.openai.chat.completions.create(**options), await streamed(asking, **options)

    whole, chunks = served(chatty, use)
    assert whole.usage.completion_tokens == 16 and len(whole.choices[0].message.content) == 16
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_tokens_that_are_parts_of_characters_have_their_bytes_and_names_of_their_own(chatty):
    async def use(asking):
        form = {"extra_body": {"regex": "a\u20ac"}}
        whole = await asking.openai.chat.completions.create(**ASKED, **form, logprobs=True, top_logprobs=20)
        old = await asking.openai.completions.create(model="blockdiff", prompt="a", logprobs=5, **form)
        return whole.choices[0].logprobs.content, old.choices[0].logprobs

    new, old = served(chatty, use)
    assert b"".join(bytes(each.bytes) for each in new[:4]) == "a\u20ac".encode()
    assert [each.token for each in new[:4]] == old.tokens[:4] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert all(len(each) == 5 for each in old.top_logprobs)


def test_an_answer_that_is_cut_has_as_many_tokens_as_were_asked_for_and_their_log_probabilities(chatty):
    async def use(asking):
        whole = await asking.openai.chat.completions.create(**ASKED, max_tokens=11, logprobs=True, top_logprobs=1)
        return whole, joined(await streamed(asking, **ASKED, max_tokens=11))

    whole, stream = served(chatty, use)
    [choice] = whole.choices
    [alone] = chatty.generate([Request(0, messages=USER, seed=5)])
    assert whole.usage.completion_tokens == len(choice.logprobs.content) == 11 and choice.finish_reason == "length"
    assert choice.message.content == stream == chatty.settings.text(alone.tokens[:11])


def test_frames_are_events_that_the_client_passes_through(chatty):
    async def use(asking):
        return await streamed(asking, **ASKED, extra_body={"stream_frames": True})

    chunks = served(chatty, use)
    frames = [chunk.frame for chunk in chunks if getattr(chunk, "frame", None)]
    assert [frame["is_committed"] for frame in frames] == 2 * [False, False, False, True] and joined(chunks)
    assert {"canvas", "step", "tokens", "texts", "entropy", "is_kept"} <= {*frames[0]}
    assert len(frames[0]["texts"]) == 8


def test_a_last_message_of_the_assistant_is_continued(chatty):
    begun = [*USER, {"role": "assistant", "content": "hello th"}]
    tokens = Request(0, messages=USER).as_tokens(chatty.tokenizer, 384)[1]
    tokens += chatty.tokenizer("hello th", add_special_tokens=False)["input_ids"]
    [alone] = chatty.generate([Request(0, tokens=tokens, seed=5)])

    async def use(asking):
        options = [{}, {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}]
        create = asking.openai.chat.completions.create
        return [(await create(**{**ASKED, "messages": begun}, **each)).choices[0].message.content for each in options]

    assert served(chatty, use) == [alone.text, alone.text]


def test_what_front_ends_send_as_history_is_taken(chatty):
    """Several system messages, one of them late, and messages of the assistant with nothing in them."""
    sent = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "and?"},
    ]
    same = [{"role": "system", "content": "be kind\n\nbe brief"}, {"role": "user", "content": "hi"}]
    same += [{"role": role, "content": text} for role, text in (("assistant", ""), ("user", ""), ("assistant", ""))]
    same += [{"role": "user", "content": "and?"}]
    prompt = Request(0, messages=same).as_tokens(chatty.tokenizer, 384)[1]
    [alone] = chatty.generate([Request(0, tokens=prompt, seed=5)])

    async def use(asking):
        found = await asking.http.post("/v1/chat/completions", json={**ASKED, "messages": sent})
        return found.json()["choices"][0]["message"]["content"]

    assert served(chatty, use) == alone.text


def test_what_front_ends_keep_with_a_history_is_read_over_and_broken_arguments_stay_text(chatty):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Be'}}
    answered = {"role": "tool", "tool_call_id": "1", "content": "no JSON"}
    plain = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answered, {**USER[0], "content": "so?"}]
    kept = dict(id="m", timestamp=1, reasoning_details=[{"type": "x"}], provider_specific_fields={"a": 1}, images=[])
    prompt = chatty.tokenizer.decode(Request(0, messages=plain).as_tokens(chatty.tokenizer, 384).tokens)
    assert 'call:weather{"city": "Be<tool_call|>' in prompt

    async def use(asking):
        found = []
        for messages in (plain, [message | kept for message in plain]):
            answer = await asking.http.post("/v1/chat/completions", json={**ASKED, "messages": messages})
            found.append(answer.json()["choices"][0]["message"]["content"])
        return found, await asking.refusal(**{**ASKED, "messages": [{**USER[0], "images": ["a"]}]})

    (alone, same), (status, error) = served(chatty, use)
    assert alone == same and status == 400 and "messages[0].images" in error["message"]


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{% if enable_thinking %}T{% endif %}{{ messages[0].content }}", "high", "Thi"),
        ("{% if enable_thinking %}T{% endif %}{{ messages[0].content }}", "none", "hi"),
        ("{{ reasoning_effort }}{{ messages[0].content }}", "low", "lowhi"),
        ("{{ thinking_mode }}{{ messages[0].content }}", "minimal", "disabledhi"),
        ("{{ messages[0].content }}", "none", "hi"),
        ("{{ messages[0].content }}", "low", None),
    ],
)
def test_an_effort_of_reasoning_is_the_variable_that_the_template_has(chatty, template, effort, prompt):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template

    async def use(asking):
        return (await asking.http.post("/v1/chat/completions", json={**ASKED, "reasoning_effort": effort})).json()

    found = served(Sampler(chatty.model, tokenizer, chatty.generation), use)
    if prompt is None:
        assert "reasoning_effort 'low'" in found["error"]["message"]
    else:
        [alone] = chatty.generate([Request(0, tokens=tokenizer(prompt, add_special_tokens=False)["input_ids"], seed=5)])
        assert found["choices"][0]["message"]["content"] == alone.text


def test_top_k_and_min_p_are_those_of_the_strategy(chatty):
    strategy = "entropy_bound:top_k=2,min_p=0.1"
    [alone] = chatty.generate([Request(0, messages=USER, seed=5, strategy=strategy)])

    async def use(asking):
        off = {"top_k": -1, "min_p": 0, "regex": "[a-z]+"}
        plain = await asking.openai.chat.completions.create(**ASKED, extra_body=off)
        found = await asking.openai.chat.completions.create(**ASKED, extra_body={"top_k": 2, "min_p": 0.1})
        return plain.choices[0].message.content, found.choices[0].message.content

    plain, found = served(chatty, use)
    assert plain and found == alone.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_has_the_prompt_and_its_log_probabilities(chatty, is_stream):
    """As lm-eval's local-completions asks: `echo` with `logprobs` and one token."""
    text = "hello there"
    tokens = chatty.tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = chatty.tokenizer.bos_token_id
    [expected] = score(chatty.model, [[bos]], [tokens])

    async def use(asking):
        options = dict(model="blockdiff", echo=True, logprobs=2, max_tokens=1, seed=1, stream=is_stream)
        found = []
        for prompt in (text, [bos, *tokens]):
            answer = await asking.openai.completions.create(prompt=prompt, **options)
            chunks = [chunk async for chunk in answer] if is_stream else [answer]
            found.append(("".join(each.choices[0].text for each in chunks), chunks[-1].choices[0].logprobs))
        return found

    (said, of_text), (_, of_tokens) = served(chatty, use)
    assert said.startswith(text) and len(said) >= len(text)
    assert of_text.token_logprobs[:-1] == pytest.approx(expected.logprobs, abs=1e-5)
    assert of_tokens.token_logprobs[0] is None and of_tokens.top_logprobs[0] is None
    assert of_tokens.token_logprobs[1:] == pytest.approx(of_text.token_logprobs)
    assert "".join(of_text.tokens[:-1]) == text and of_text.text_offset[:2] == [0, len(of_text.tokens[0])]
    for value, best in zip(of_text.token_logprobs, of_text.top_logprobs, strict=True):
        assert len(best) == 2 and max(best.values()) >= value - 1e-5


def test_neutral_and_inert_fields_pass(chatty):
    inert = dict(user="u", store=True, metadata={"a": "b"}, service_tier="auto", safety_identifier="s")
    neutral = dict(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, modalities=["text"], top_p=1, n=1)
    developer = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]

    async def use(asking):
        create = asking.openai.chat.completions.create
        found = await create(**{**ASKED, "messages": developer}, **inert, **neutral, response_format={"type": "text"})
        return found.choices[0].message.content

    assert served(chatty, use)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"messages": [*USER, {"role": "assistant", "content": "a", "reasoning": "b"}]}, "is continued, but it has"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "continue_final_message"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"top_k": 5, "regex": "a"}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n:"),
        ({"n": 99}, "n: 99 is more than the 16"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
            "image_url",
        ),
        ({"messages": [{"role": "critic", "content": "x"}]}, "critic"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "regex"),
        ({"regex": "("}, "regular expression"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "oneOf": []}}}},
            "oneOf",
        ),
        ({"draft": "x", "noise": 7}, "noise"),
        ({"strategy": "nosuch"}, "nosuch"),
        ({"chat_template_kwargs": {"thinking_mode": "disabled"}}, "thinking_mode"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"regex": "a" * 100_001}, "characters of regex"),
        ({"best_of": 2, "n": 2}, "best_of"),
        ({"regex": "[a]{50}", "max_tokens": 1}, "(over HTTP, max_tokens)"),
        ({"nosuch": 1}, "nosuch: is not a field of /v1/chat/completions"),
        ({"steps": 1_000_000}, "steps"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 10_000_000}, "max_new_tokens"),
        ({"tools": [{"type": "function", "function": None}], "tool_choice": "required"}, "declares no function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}], "tool_choice": "required"},
            "parameters is a number",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": None}}, "tool_choice"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(chatty, options, word):
    status, error = served(chatty, lambda asking: asking.refusal(**{**ASKED, **options}))
    assert status == 400 and word in error["message"] and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and {"param", "code"} <= {*error}


def test_other_models_and_other_paths_are_errors_in_the_same_form(chatty):
    async def use(asking):
        listed = await asking.openai.models.list()
        one = await asking.openai.models.retrieve("blockdiff")
        with pytest.raises(openai.NotFoundError, match="'gpt'"):
            await asking.openai.chat.completions.create(model="gpt", messages=USER)
        with pytest.raises(openai.APIStatusError, match="/v1/chat/completions"):
            await asking.openai.get("/chat/completions", cast_to=object)
        return [model.id for model in listed.data], one

    names, one = served(chatty, use)
    assert (names, one.id, one.max_model_len) == (["blockdiff"], "blockdiff", chatty.settings.positions)


def test_many_at_once_each_get_their_own_answer_and_a_prompt_that_was_asked_before_is_cached(chatty):
    long = [{"role": "user", "content": "hello there " * 40}]

    async def use(asking):
        create = asking.openai.chat.completions.create
        many = [create(model="blockdiff", messages=[{"role": "user", "content": f"q{n}"}], seed=n) for n in range(6)]
        answers = [each.choices[0].message.content for each in await asyncio.gather(*many)]
        first, again = [await create(model="blockdiff", messages=long) for _ in range(2)]
        return answers, first.usage, again.usage

    answers, first, again = served(chatty, use)
    alone = chatty.generate([Request(n, messages=[{"role": "user", "content": f"q{n}"}], seed=n) for n in range(6)])
    assert answers == [each.text for each in alone]
    assert first.prompt_tokens_details.cached_tokens == 0 < again.prompt_tokens_details.cached_tokens
    assert again.prompt_tokens_details.cached_tokens <= again.prompt_tokens == first.prompt_tokens


def test_a_read_gives_the_probabilities_of_holes_as_the_sampler_does(chatty):
    body = {"messages": USER, "template": "a<?one>b<?two:1>", "choices": {"one": ["x", "y"]}, "draws": 2, "seed": 3}
    [alone] = chatty.read([Request(0, messages=USER, seed=3)], body["template"], body["choices"], draws=2)

    async def use(asking):
        found = await asking.http.post("/v1/read", json=body)
        wrong = [{"draws": 65}, {"template": "no hole"}, {"choices": {"three": ["x"]}}, {"prompt": "x"}, {"n": 2}]
        return found.json(), [await asking.refusal("/v1/read", **{**body, **options}) for options in wrong]

    found, refused = served(chatty, use)
    assert found["holes"]["one"]["probabilities"] == pytest.approx(alone.probabilities["one"])
    assert found["holes"]["two"]["spread"].keys() == alone.spread["two"].keys()
    assert [status for status, _ in refused] == [400] * 5


def test_the_table_of_fields_is_that_of_the_protocol():
    """Line by line: whose field it is, and what happens to it; and no field is left out."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.partition("\n## Fields\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|", 2) for line in section.splitlines() if line.startswith("| `")]
    lines = [[cell.strip() for cell in row] for row in rows]
    own = {name: {field.alias or key for key, field in kind.model_fields.items()} for name, kind in KINDS.items()}
    told: dict[str, set[str]] = {name: set() for name in KINDS}
    for names, of, what in lines:
        fields = {name.partition(".")[0] for name in re.findall(r"`([a-z_.]+)`", re.sub(r"\(.*?\)", "", names))}
        if "refused" in what[:40] or "these values pass" in what:
            assert fields <= {*NEUTRAL}
        elif what.startswith("pass"):
            assert fields <= INERT
        else:
            for name in ("chat", "completions") if of == "both" else (of,):
                assert fields <= own[name], (fields - own[name], of)
                told[name] |= fields
    beyond = {*re.findall(r"`([a-z_]+)`", section.partition("Fields beyond the protocol")[2].partition("\n\n")[0])}
    for name, fields in own.items():
        assert fields <= told[name] | beyond, fields - told[name] - beyond
    assert {*NEUTRAL} | INERT <= {*re.findall(r"`([a-z_]+)`", section)}
