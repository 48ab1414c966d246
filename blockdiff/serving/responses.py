"""`POST /v1/responses`: the answers of chats, written as output items and as events of the Responses protocol.

The server keeps nothing: a request brings its whole history.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from blockdiff.serving import chat
from blockdiff.serving.answering import ApiCall, Event, Server, respond, usage_of
from blockdiff.serving.async_engine import Terms
from blockdiff.serving.bodies import read_body
from blockdiff.serving.deltas import AnswerStream, Delta
from blockdiff.serving.responses_body import ENCRYPTED, PATH, ResponsesRequest, as_chat

Item = dict[str, Any]


@dataclass(frozen=True)
class TextOf:
    """How items of one type hold their text, and how events about it are named.

    type: of the item; id: the prefix of its ids; own: its further fields; parts: its field with the list of parts;
    part: the initial fields of its only part; events, text: the prefixes of event names about the part and about its
    text; index: the events' field for the index of the part.
    """

    type: str
    id: str
    own: Item
    parts: str
    part: Item
    events: str
    text: str
    index: str = "content_index"


MESSAGE = TextOf(
    *("message", "msg_", {"role": "assistant"}, "content", {"type": "output_text", "annotations": [], "logprobs": []}),
    *("response.content_part", "response.output_text"),
)
REASONING = TextOf(
    *("reasoning", "rs_", {"summary": []}, "content", {"type": "reasoning_text"}),
    *("response.content_part", "response.reasoning_text"),
)
SUMMARY = TextOf(  # all the reasoning, if the request asks for a summary
    *("reasoning", "rs_", {}, "summary", {"type": "summary_text"}),
    *("response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index"),
)


def router(server: Server) -> APIRouter:
    """Return a router that serves `POST /v1/responses`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def create(http: HttpRequest) -> Response:
        body = await read_body(http, ResponsesRequest)
        terms = server.terms(http, body)
        call = server.engine.prepared(partial(api_call, body, server, terms), chat.kind_of(body.tool_choice), terms)
        return await respond(server, http, await call)

    return routes


def api_call(body: ResponsesRequest, server: Server, terms: Terms) -> ApiCall:
    """Map a Responses body to the requests of the equal chat completion, with answers in the form of Responses.

    Empties `body.input`. Raises the errors of `as_chat` and `chat.api_call`.
    """
    chat_body = as_chat(body)
    body.input = ""  # else images are held twice while the answer runs
    return replace(chat.api_call(chat_body, server, terms), format=ResponseFormat(body))


@dataclass
class ResponseFormat:
    """The form of one response: a list of items, which events build one after the other. See `AnswerFormat`."""

    body: ResponsesRequest
    items: list[Item] = field(default_factory=list)
    open: TextOf | None = None  # the kind of the last item, if it is a text that may still grow
    number: int = 0  # of the next event

    prefix: ClassVar = "resp_"

    def whole(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole response, made by the events of a delta with the whole answer."""
        [end], [stream] = ends, call.streams
        assert end.result is not None
        calls = end.result.tool_calls or ()
        at_once = replace(end, text=end.result.text, reasoning=end.result.reasoning or "", calls=calls, first_call=0)
        for _ in self.events(head, stream, at_once, False):
            pass
        return self._ended(head, call, end)

    def events(self, head: dict[str, Any], stream: AnswerStream, delta: Delta, is_first: bool) -> Iterable[Event]:
        """Yield the events of a delta, by which items begin, grow and end; update `items` accordingly."""
        if is_first:
            for type in ("response.created", "response.in_progress"):
                yield self._event(type, response=self._response(head, "in_progress"))
        if delta.reasoning:
            yield from self._grow(SUMMARY if self.body.reasoning.summary else REASONING, delta.reasoning)
        if delta.text:
            yield from self._grow(MESSAGE, delta.text)
        for number, each in enumerate(delta.calls, delta.first_call):
            yield from self._close()
            yield from self._call(stream, number, each)
        if delta.result is not None:
            if not self.items:
                yield from self._grow(MESSAGE, "")
            logprobs = chat.logprobs_of(stream, delta)
            spoken = [item["content"][0] for item in self.items if item["type"] == "message"]
            if logprobs is not None and spoken:  # the last text has them for all tokens
                spoken[-1]["logprobs"] = [each.model_dump() for each in logprobs.content]
            yield from self._close("incomplete" if delta.finish == "length" else "completed")

    def end(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> Iterable[Event]:
        """Yield the last event, with the whole response."""
        response = self._ended(head, call, ends[0])
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, head: dict[str, Any], error: dict[str, Any]) -> Iterable[Event]:
        """Yield the error, with its fields both at the top and in `error`, and the event of the failed response."""
        fields = {name: error[name] for name in ("code", "message", "param")}
        yield self._event("error", **fields, error=error)
        failed = {"code": "server_error", "message": error["message"]}
        yield self._event("response.failed", response=self._response(head, "failed") | {"error": failed})

    def _grow(self, kind: TextOf, text: str) -> Iterable[Event]:
        """Yield the events of `text`, which is added to the last item, or begins a new one if that is not open."""
        if self.open is not kind:
            yield from self._close()
            text = text if kind is MESSAGE else text.lstrip("\n")
            item: Item = {"type": kind.type, "id": kind.id + uuid.uuid4().hex, "status": "in_progress", **kind.own}
            if kind is not MESSAGE and ENCRYPTED in self.body.include:
                item["encrypted_content"] = "none"  # clients send reasoning back if it has this
            part = kind.part | {"text": ""}
            self.open = kind
            self.items.append(item | {kind.parts: [part]})
            yield self._event("response.output_item.added", item=item | {kind.parts: []}, **self._place())
            yield self._event(f"{kind.events}.added", part=part, **self._part(kind))
        self.items[-1][kind.parts][0]["text"] += text
        if text:
            logprobs: Item = {"logprobs": []} if kind is MESSAGE else {}
            yield self._event(f"{kind.text}.delta", delta=text, **logprobs, **self._part(kind))

    def _call(self, stream: AnswerStream, number: int, call: Mapping[str, Any]) -> Iterable[Event]:
        """Yield the events of a tool call, which comes whole; number: its index in the answer."""
        tool_call = chat.tool_call(stream, number, call)
        item = {
            "type": "function_call",
            "id": "fc_" + uuid.uuid4().hex,
            "call_id": tool_call.id,
            "name": tool_call.function.name,
        }
        item |= {"arguments": tool_call.function.arguments, "status": "completed"}
        self.items.append(item)
        location = {"item_id": item["id"], **self._place()}
        yield self._event(
            "response.output_item.added", item=item | {"arguments": "", "status": "in_progress"}, **self._place()
        )
        yield self._event("response.function_call_arguments.delta", delta=item["arguments"], **location)
        fields = {name: item[name] for name in ("name", "arguments")}
        yield self._event("response.function_call_arguments.done", **fields, **location)
        yield self._event("response.output_item.done", item=item, **self._place())

    def _close(self, status: str = "completed") -> Iterable[Event]:
        """Yield the events that end the open item; none if no item is open."""
        if (kind := self.open) is None:
            return
        item, self.open = self.items[-1], None
        [part] = item[kind.parts]
        item["status"] = status
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"{kind.text}.done", **fields, **self._part(kind))
        yield self._event(f"{kind.events}.done", part=part, **self._part(kind))
        yield self._event("response.output_item.done", item=item, **self._place())

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _part(self, kind: TextOf) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], kind.index: 0, **self._place()}

    def _event(self, type: str, **fields: Any) -> Event:
        data = {"type": type, "sequence_number": self.number, **fields}
        self.number += 1
        return {"event": type, "data": json.dumps(data, ensure_ascii=False, separators=(",", ":"))}

    def _ended(self, head: dict[str, Any], call: ApiCall, end: Delta) -> dict[str, Any]:
        """Return the finished response, with its usage and the denoising steps of each canvas."""
        assert end.result is not None
        usage = usage_of(call, [end])
        response = self._response(head, "incomplete" if end.finish == "length" else "completed")
        if end.finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details.model_dump() | {"cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
            "denoising_steps": usage.denoising_steps,
            "forwards": usage.forwards,
        }
        return response | {"steps": end.result.steps, "completed_at": int(time.time())}

    def _response(self, head: dict[str, Any], status: str) -> dict[str, Any]:
        """Return the response so far, with the fields of its request that the protocol repeats."""
        body = self.body
        request_fields = body.model_dump(
            mode="json",
            include={
                *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
                *("reasoning", "temperature", "tool_choice", "tools", "top_logprobs", "top_p"),
            },
        )
        form = (
            {"type": "text"}
            if body.text.format is None
            else body.text.format.model_dump(by_alias=True, exclude_none=True)
        )
        return {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self.items,
            "usage": None,
            "text": {"format": form},
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **request_fields,
        }
