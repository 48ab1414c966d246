"""`POST /v1/decisions`, as OpenAI's client calls it, and `POST /v1/systemone`: typed questions about one state."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import MaxLen
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from blockdiff.data.messages import BadRow, image_source
from blockdiff.decisions.form import Asking
from blockdiff.decisions.question import Question, json_text, read_questions, read_systemone
from blockdiff.errors import RequestError
from blockdiff.sampling.decide import Answer
from blockdiff.sampling.request import Request
from blockdiff.serving.answering import LEFT, Server, unless_left
from blockdiff.serving.async_engine import Decided
from blockdiff.serving.bodies import read_body
from blockdiff.serving.chat import template_fields
from blockdiff.serving.content import pixels, served_messages
from blockdiff.serving.limits import Limits
from blockdiff.serving.mapping import check_size
from blockdiff.serving.protocol import MOST_MESSAGES, Body, Items, Short
from blockdiff.serving.responses_body import items_as_messages

PATH, SYSTEMONE = "/v1/decisions", "/v1/systemone"


class DecisionBody(Body):
    """The fields that both bodies share; most are no part of their protocols."""

    model: Short | None = None
    joint: bool = False
    steps: int = Field(1, ge=1)
    draws: int = Field(4, ge=1)
    seed: int | None = None
    calibrated: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(None, gt=0)

    # these change no answer
    cache_salt: Short | None = None
    priority: int | None = None
    request_id: Short | None = None


class DecisionsRequest(DecisionBody):
    """The body of `POST /v1/decisions`: an input and a list of questions."""

    form: ClassVar = "decisions"

    input: str | Annotated[Items[dict[str, Any]], MaxLen(MOST_MESSAGES)]
    questions: list[Any]
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def asked(self) -> tuple[Question, ...]:
        """Return the questions. Raises RequestError for a malformed one."""
        return read_questions(self.questions)

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as messages of a chat."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return items_as_messages([_without_json(item, f"input[{index}]") for index, item in enumerate(self.input)])


class SystemoneRequest(DecisionBody):
    """The body of `POST /v1/systemone`: a state, and questions by id."""

    form: ClassVar = "systemone"

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, Any]
    instructions: str | None = None
    images: list[Any] = Field(default_factory=list)

    def asked(self) -> tuple[Question, ...]:
        """Return the questions, named by their ids. Raises RequestError for a malformed one."""
        return read_systemone(self.questions)

    def messages(self) -> list[dict[str, Any]]:
        """Return instructions, state and images as messages of a chat; a state that is no text becomes JSON."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        text = self.state if isinstance(self.state, str) else json_text(self.state, "state")
        images = [{"type": "image_url", "image_url": each} for each in self.images]
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        return [*system, {"role": "user", "content": content}]


def router(server: Server) -> APIRouter:
    """Return a router that serves `POST /v1/decisions` and `POST /v1/systemone`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def decisions(http: HttpRequest) -> Response:
        body = await read_body(http, DecisionsRequest)
        return await _answered(server, http, body, _openai)

    @routes.post(SYSTEMONE)
    async def systemone(http: HttpRequest) -> Response:
        body = await read_body(http, SystemoneRequest)
        return await _answered(server, http, body, _systemone)

    return routes


async def _answered(server: Server, http: HttpRequest, body: Any, written: Any) -> Response:
    terms, limits = server.terms(http, body), server.limits
    check_size("draws", body.draws, limits.draws)
    check_size("steps", body.steps, limits.steps)
    size = len(json.dumps(body.questions, ensure_ascii=False))
    check_size("the characters of the questions", size, limits.form_characters)
    prepare = partial(_prepared, body, limits)
    questions, messages = await server.engine.prepared(prepare, "plain", terms)  # in a thread: there may be images
    fields = template_fields(body.chat_template_kwargs)
    request = Request(uuid.uuid4().hex, messages=messages, seed=body.seed, **fields)
    asking = Asking(body.form, body.joint, body.steps, body.draws)
    measures = http.state.measures
    measures.outcome = "left"
    decided = await unless_left(http, server.engine.decide(request, questions, asking, body.calibrated, terms))
    if decided is None:
        return Response(status_code=LEFT)
    measures.outcome = "read"
    return JSONResponse(written(decided, body.model or server.names[0]))


def _prepared(body: Any, limits: Limits) -> tuple[list[Question], list[dict[str, Any]]]:
    questions = [_with_images(question, f"questions[{index}]") for index, question in enumerate(body.asked())]
    messages = served_messages(body.messages(), limits)
    images = [image for question in questions for image in question.images]
    check_size("the images of questions", len(images), limits.images)
    check_size("the pixels of all images", sum(map(pixels, images)), limits.pixels)
    return questions, messages


def _with_images(question: Question, where: str) -> Question:
    """Return the question with bytes for its images in place of parts with data URIs. where: named in errors."""
    return replace(question, images=tuple(_bytes(part, f"{where}.instructions") for part in question.images))


def _bytes(part: Mapping[str, Any], where: str) -> Any:
    url = part.get("image_url")
    if not isinstance(url, str) or not url.startswith("data:"):
        words = "is no data URI, and no address or file is fetched; write data:image/png;base64,..."
        raise RequestError(f"{where}: the image_url {words}")
    try:
        return image_source(url, where)
    except BadRow as error:
        raise RequestError(str(error)) from None


def _without_json(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an item of the input with JSON parts as text, and with calls of custom tools as function calls."""
    fields = {key: value for key, value in item.items() if key not in ("namespace", "phase")}
    kind = item.get("type")
    if kind == "custom_tool_call":
        fields |= {"type": "function_call", "arguments": json.dumps({"input": fields.pop("input", "")})}
    elif kind == "custom_tool_call_output":
        fields["type"] = "function_call_output"
    for key in ("content", "output"):
        if isinstance(parts := item.get(key), Sequence) and not isinstance(parts, str):
            fields[key] = [_part(part, f"{where}.{key}[{index}]") for index, part in enumerate(parts)]
    return fields


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    fields = {key: value for key, value in part.items() if key not in ("prompt_cache_breakpoint", "detail")}
    if part.get("type") == "input_json":
        return {"type": "input_text", "text": json_text(part.get("data"), f"{where}.data")}
    return fields


def _openai(decided: Decided, model: str) -> dict[str, Any]:
    count, cached = len(decided.answers), decided.cached_tokens
    return {
        "model": model,
        "answers": [answer.to_record() | answer.facts for answer in decided.answers],
        "usage": {
            "input_tokens": decided.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": decided.prompt_tokens - cached,
            },
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": decided.prompt_tokens + count,
        },
    }


def _systemone(decided: Decided, model: str) -> dict[str, Any]:
    answers = {str(answer.question.name): _of_systemone(answer) | answer.facts for answer in decided.answers}
    return {
        "id": f"decision-{uuid.uuid4().hex}",
        "object": "structured_decision",
        "created": int(time.time()),
        "model": model,
        "answers": answers,
        "usage": {"input_tokens": decided.prompt_tokens, "output_tokens": len(answers)},
    }


def _of_systemone(answer: Answer) -> dict[str, Any]:
    question, p = answer.question, answer.probabilities
    texts = [option.text for option in question.options]
    if question.type == "predicate":
        sides = {"yes": p[1], "no": p[0]}
        return {"type": "noul", "noul": p[1], "probabilities": sides, "confidence": answer.confidence}
    if question.type == "choice":
        named = dict(zip(texts, p, strict=True))
        return {"type": "choice", "choice": answer.value, "probabilities": named, "confidence": answer.confidence}
    levels = {"probabilities": list(p), "legend": texts}
    return {"type": "score", "score": answer.score, **levels, "confidence": answer.confidence}
