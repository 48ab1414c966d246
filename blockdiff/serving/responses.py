"""`POST /v1/responses`: the same answers as chats have, as items of an output and as events of their types.

Nothing is kept: a request brings its whole history.
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
from blockdiff.serving.responses_body import PATH, ResponsesRequest, as_chat

Item = dict[str, Any]
# By the type of an item: its own fields; the beginning of its id, and the part that has its text.
OF_TYPE: Mapping[str, Item] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}
PARTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("rs_", {"type": "reasoning_text"}),
    "message": ("msg_", {"type": "output_text", "annotations": [], "logprobs": []}),
}


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def create(http: HttpRequest) -> Response:
        body = await read_body(http, ResponsesRequest)
        terms = server.terms(http, body)
        made = server.engine.prepared(partial(api_call, body, server, terms), chat.kind_of(body.tool_choice), terms)
        return await respond(server, http, await made)

    return routes


def api_call(body: ResponsesRequest, server: Server, terms: Terms) -> ApiCall:
    """The request of a body: the chat's, answered in this form."""
    return replace(chat.api_call(as_chat(body), server, terms), format=ResponseFormat(body))


@dataclass
class ResponseFormat:
    """The form of one response: its items, which its events bring one after the other."""

    body: ResponsesRequest
    items: list[Item] = field(default_factory=list)
    number: int = 0  # of the next event

    prefix: ClassVar = "resp_"

    def whole(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> dict[str, Any]:
        """The response: what its events say if all of it comes at once."""
        [end], [stream] = ends, call.streams
        assert end.result is not None
        calls = end.result.tool_calls or ()
        at_once = replace(end, text=end.result.text, reasoning=end.result.reasoning or "", calls=calls, first_call=0)
        for _ in self.events(head, stream, at_once, False):
            pass
        return self._ended(head, call, end)

    def events(self, head: dict[str, Any], stream: AnswerStream, delta: Delta, is_first: bool) -> Iterable[Event]:
        """The events of a delta: items begin, grow and end."""
        if is_first:
            for type in ("response.created", "response.in_progress"):
                yield self._event(type, response=self._response(head, "in_progress"))
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.text:
            yield from self._grow("message", delta.text)
        for number, each in enumerate(delta.calls, delta.first_call):
            yield from self._close()
            yield from self._call(stream, number, each)
        if delta.result is not None:
            if not any(item["type"] in ("message", "function_call") for item in self.items):
                yield from self._grow("message", "")
            logprobs = chat.logprobs_of(stream, delta)
            spoken = [item["content"][0] for item in self.items if item["type"] == "message"]
            if logprobs is not None and spoken:  # of all tokens, with the last text
                spoken[-1]["logprobs"] = [each.model_dump() for each in logprobs.content]
            yield from self._close("incomplete" if delta.finish == "length" else "completed")

    def end(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> Iterable[Event]:
        """The event with the whole response."""
        found = self._ended(head, call, ends[0])
        yield self._event(f"response.{found['status']}", response=found)

    def error(self, head: dict[str, Any], error: dict[str, Any]) -> Iterable[Event]:
        """The error, in the forms that clients read, and the response that has failed."""
        said = {name: error[name] for name in ("code", "message", "param")}
        yield self._event("error", **said, error=error)
        failed = {"code": "server_error", "message": error["message"]}
        yield self._event("response.failed", response=self._response(head, "failed") | {"error": failed})

    def _grow(self, kind: str, text: str) -> Iterable[Event]:
        """The events of a text that the last item goes on with, or a new one begins with."""
        if not self.items or self.items[-1]["type"] != kind or self.items[-1]["status"] != "in_progress":
            yield from self._close()
            text = text.lstrip("\n") if kind == "reasoning" else text
            begins, part = PARTS[kind]
            item: Item = {"type": kind, "id": begins + uuid.uuid4().hex, "status": "in_progress"}
            item |= OF_TYPE[kind]
            self.items.append(item | {"content": [part | {"text": ""}]})
            yield self._event("response.output_item.added", item=item | {"content": []}, **self._place())
            yield self._event("response.content_part.added", part=part | {"text": ""}, **self._part())
        item = self.items[-1]
        item["content"][0]["text"] += text
        if text:
            yield self._event(f"{self._text(item)}.delta", delta=text, **self._part(), **self._logprobs(item, []))

    def _call(self, stream: AnswerStream, number: int, call: Mapping[str, Any]) -> Iterable[Event]:
        """The events of a call, which comes as a whole."""
        made = chat.tool_call(stream, number, call)
        item = {"type": "function_call", "id": "fc_" + uuid.uuid4().hex, "call_id": made.id, "name": made.function.name}
        item |= {"arguments": made.function.arguments, "status": "in_progress"}
        self.items.append(item)
        place = {"item_id": item["id"], **self._place()}
        yield self._event("response.output_item.added", item=item | {"arguments": ""}, **self._place())
        yield self._event("response.function_call_arguments.delta", delta=item["arguments"], **place)
        said = {name: item[name] for name in ("name", "arguments")}
        yield self._event("response.function_call_arguments.done", **said, **place)
        yield from self._close()

    def _close(self, status: str = "completed") -> Iterable[Event]:
        """The events of the end of the last item, if it has none."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        if "content" in item:
            [part] = item["content"]
            yield self._event(
                f"{self._text(item)}.done",
                text=part["text"],
                **self._part(),
                **self._logprobs(item, part.get("logprobs")),
            )
            yield self._event("response.content_part.done", part=part, **self._part())
        yield self._event("response.output_item.done", item=item, **self._place())

    def _text(self, item: Item) -> str:
        return f"response.{item['content'][0]['type']}"

    def _logprobs(self, item: Item, logprobs: Any) -> dict[str, Any]:
        return {"logprobs": logprobs} if item["type"] == "message" else {}

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _part(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "content_index": 0, **self._place()}

    def _event(self, type: str, **fields: Any) -> Event:
        data = {"type": type, "sequence_number": self.number, **fields}
        self.number += 1
        return {"event": type, "data": json.dumps(data, ensure_ascii=False, separators=(",", ":"))}

    def _ended(self, head: dict[str, Any], call: ApiCall, end: Delta) -> dict[str, Any]:
        """The response at its end, with its usage and the denoising steps of each canvas."""
        assert end.result is not None
        usage = usage_of(call, [end])
        found = self._response(head, "incomplete" if end.finish == "length" else "completed")
        if end.finish == "length":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        found["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details.model_dump() | {"cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
            "denoising_steps": usage.denoising_steps,
            "forwards": usage.forwards,
        }
        return found | {"steps": end.result.steps, "completed_at": int(time.time())}

    def _response(self, head: dict[str, Any], status: str) -> dict[str, Any]:
        """The response so far, with the fields of the request that it answers."""
        body = self.body
        asked = body.model_dump(
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
            **asked,
        }
