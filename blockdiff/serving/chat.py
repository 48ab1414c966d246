"""`POST /v1/chat/completions`: conversations, with tools, reasoning and constrained answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from blockdiff.data.messages import BadRow, checked_tools
from blockdiff.data.template import is_variable, own_template
from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.json_object import ANY_OBJECT
from blockdiff.sampling.request import FORMS, Request
from blockdiff.serving.answering import ApiCall, Server, respond
from blockdiff.serving.answers import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    Function,
    Message,
    TokenLogprob,
    ToolCall,
    TopLogprob,
)
from blockdiff.serving.async_engine import Terms
from blockdiff.serving.bodies import read_body
from blockdiff.serving.chunks import ChunkFormat
from blockdiff.serving.content import served_messages
from blockdiff.serving.deltas import AnswerStream, Delta
from blockdiff.serving.mapping import check_size, common_fields, seed_of
from blockdiff.serving.preparing import Kind
from blockdiff.serving.protocol import ChatRequest, NamedChoice
from blockdiff.serving.refusals import Refused

PATH = "/v1/chat/completions"


def router(server: Server) -> APIRouter:
    """Return a router that serves `POST /v1/chat/completions`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def chat(http: HttpRequest) -> Response:
        body = await read_body(http, ChatRequest)
        terms = server.terms(http, body)
        call = server.engine.prepared(partial(api_call, body, server, terms), kind_of(body.tool_choice), terms)
        return await respond(server, http, await call)

    return routes


def kind_of(choice: Any) -> Kind:
    """Return the kind of threads that map a body with this `tool_choice` to requests: "heavy" if a call is forced."""
    return "plain" if choice in ("none", "auto") else "heavy"  # a forced call compiles a schema


class ChatFormat(ChunkFormat):
    """The form of a chat's answers: choices with a message each."""

    prefix: ClassVar = "chatcmpl-"
    object: ClassVar = "chat.completion"
    chunk_object: ClassVar = "chat.completion.chunk"

    def choice(self, stream: AnswerStream, delta: Delta) -> ChatChoice:
        """Return a whole answer as a choice, from its last delta."""
        result = delta.result
        assert result is not None
        calls = [tool_call(stream, number, call) for number, call in enumerate(result.tool_calls or ())]
        message = Message(
            role="assistant",
            content=result.text if result.text or not calls else None,
            reasoning_content=result.reasoning,
            tool_calls=calls or None,
        )
        return ChatChoice(
            index=stream.index,
            message=message,
            finish_reason=delta.finish,
            steps=result.steps,
            logprobs=logprobs_of(stream, delta),
        )

    def delta(self, stream: AnswerStream, delta: Delta, is_first: bool) -> ChatDelta | None:
        """Return a delta as a choice of a chunk; None if it has nothing new. The first one has the role."""
        calls = [tool_call(stream, delta.first_call + n, call, is_indexed=True) for n, call in enumerate(delta.calls)]
        if not (is_first or delta.text or delta.reasoning or calls or delta.finish):
            return None
        message = Message(
            role="assistant" if is_first else None,
            content=delta.text or ("" if is_first else None),
            reasoning_content=delta.reasoning or None,
            tool_calls=calls or None,
        )
        steps = None if delta.result is None else delta.result.steps
        return ChatDelta(
            index=stream.index,
            delta=message,
            finish_reason=delta.finish,
            steps=steps,
            logprobs=logprobs_of(stream, delta),
        )


def api_call(body: ChatRequest, server: Server, terms: Terms) -> ApiCall:
    """Map a body to its requests, one for each of `n` answers.

    Empties `body.messages`. Raises RequestError for what the server or the model cannot do, and for more than a limit.
    """
    (_, settings), limits = server.engine.models[terms.adapter], server.limits
    check_size("n", body.n, server.most_answers)
    check_size("the characters of tools", len(json.dumps(body.tools)), limits.form_characters)
    try:
        declared = checked_tools(body.tools) or ()
    except BadRow as error:
        raise Refused(str(error), param="tools") from None
    max_tokens = body.max_completion_tokens or body.max_tokens
    variables = effort_fields(body.reasoning_effort, settings.tokenizer) | body.chat_template_kwargs
    fields = common_fields(body, settings, limits, max_tokens) | template_fields(variables)
    forced = None
    form = body.response_format
    if form is not None and form.type != "text":
        set_form(fields, json_schema=form.json_schema.schema_ if form.json_schema else ANY_OBJECT)
        check_size("the characters of response_format", len(json.dumps(fields["json_schema"])), limits.form_characters)
    if body.tool_choice not in ("none", "auto"):
        forced = body.tool_choice.function.name if isinstance(body.tool_choice, NamedChoice) else ""
        set_form(fields, json_schema=schema_of_call(declared, forced))
        fields["stop"] = ()  # stop texts would cut the call
    messages = served_messages(body.messages, limits)
    body.messages = []  # else images are held twice while the answer runs
    request = Request(
        uuid.uuid4().hex,
        messages=messages,
        tools=declared if body.tool_choice != "none" else (),
        scores=body.logprobs,
        top_logprobs=body.top_logprobs,
        **fields,
    )
    streams = [
        AnswerStream(
            settings,
            replace(request, id=f"{request.id}-{index}", seed=seed_of(body, index)),
            index,
            None if request.form else max_tokens,
            forced,
            None if body.parallel_tool_calls else 1,
        )
        for index in range(body.n)
    ]
    return ApiCall(body, streams, ChatFormat(), terms)


def template_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Request` for `chat_template_kwargs`.

    These are `thinking`, from `enable_thinking`, and `template_options`, all other variables. Raises RequestError if
    `enable_thinking` is neither true nor false.
    """
    options = dict(given)
    thinking = options.pop("enable_thinking", False)
    if not isinstance(thinking, bool):
        raise RequestError(f"chat_template_kwargs: enable_thinking must be true or false, got {thinking!r:.60}")
    return {"thinking": thinking, "template_options": options or None}


def effort_fields(effort: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the template variable for an effort of reasoning, by name, with its value; {} if no effort is given.

    If the chat template has no such variable, return {} for the efforts none and minimal, and raise Refused for others.
    """
    if effort is None:
        return {}
    template = None if tokenizer is None else own_template(tokenizer)
    thinks = effort not in ("none", "minimal")
    variables = {
        "reasoning_effort": effort,
        "enable_thinking": thinks,
        "thinking_mode": "enabled" if thinks else "disabled",
    }
    variable = next((name for name in variables if template and is_variable(name, template)), None)
    if variable is None and not thinks:
        return {}
    if variable is None:
        raise Refused(f"reasoning_effort {effort!r:.60}: the chat template has no variable for it; leave it out")
    return {variable: variables[variable]}


def set_form(fields: dict[str, Any], **form: Any) -> None:
    """Add a form of the whole response to `fields`. Raises RequestError if they have one already."""
    if taken := next((name for name in FORMS if fields.get(name) is not None), None):
        raise RequestError(f"{taken} says the form of the whole response, and so does another field; give one of them")
    fields |= form


def schema_of_call(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the JSON schema of a forced call.

    name: the function to call; the schema is that of its arguments. If "", the schema is an object with the name of any
    function and its arguments. Raises RequestError if `tools` does not declare `name`.
    """
    functions = {each["function"]["name"]: each["function"] for each in tools}
    if name and name not in functions:
        raise RequestError(f"tool_choice names {name!r:.80}, which tools does not declare")
    if name:
        return _arguments(functions[name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each}, "arguments": {"$id": f"tool:{each}"} | _arguments(function)},
            "required": ["name", "arguments"],
        }
        for each, function in functions.items()
    ]
    return {"anyOf": calls}


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, an object; without properties if none are declared.

    Raises RequestError if the declared parameters are no object.
    """
    schema = function.get("parameters") or {"properties": {}}
    if schema.get("type", "object") not in ("object", ["object"]):
        raise RequestError(f"the parameters of {function['name']!r:.80} must be an object, got {schema['type']!r:.40}")
    return {**schema, "type": "object"}


def tool_call(stream: AnswerStream, number: int, call: Mapping[str, Any], is_indexed: bool = False) -> ToolCall:
    """Return the tool call with index `number` of a response; is_indexed: with the index, as streams have it."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return ToolCall(
        index=number if is_indexed else None,
        id=f"call_{stream.request.id}_{number}",
        function=Function(name=function["name"], arguments=arguments),
    )


def logprobs_of(stream: AnswerStream, delta: Delta) -> ChatLogprobs | None:
    """Return the log-probabilities of all tokens of an answer; None unless requested and `delta` is the last one."""
    result = delta.result
    if result is None or result.logprobs is None or not stream.request.scores:
        return None
    top = result.top_logprobs or [[]] * len(result.tokens)
    content = [
        TokenLogprob(
            **_scored(stream, token, value), top_logprobs=[TopLogprob(**_scored(stream, *each)) for each in best]
        )
        for token, value, best in zip(result.tokens, result.logprobs, top, strict=False)
    ]
    return ChatLogprobs(content=content)


def _scored(stream: AnswerStream, token: int, value: float) -> dict[str, Any]:
    return {"token": stream.name_of(token), "bytes": list(stream.bytes_of(token)), "logprob": value}
