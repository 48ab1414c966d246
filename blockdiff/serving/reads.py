"""`POST /v1/read`: the probabilities of the holes of a template, from a few denoising steps instead of an answer."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from annotated_types import MaxLen
from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import LEFT, Server, unless_left
from blockdiff.serving.async_engine import Terms
from blockdiff.serving.bodies import read_body
from blockdiff.serving.chat import template_fields
from blockdiff.serving.content import served_messages
from blockdiff.serving.mapping import check_size
from blockdiff.serving.protocol import MOST_MESSAGES, MOST_TEXTS, Body, Items, Short

PATH = "/v1/read"


def _few(choices: Any) -> Any:
    """The choices as they came; ValueError for more than any template has holes, before each of them is looked at."""
    if isinstance(choices, dict) and len(choices) > MOST_TEXTS:
        raise ValueError(f"choices has {len(choices)} holes, and {MOST_TEXTS} are the most; give fewer")
    return choices


class ReadRequest(Body):
    """The body: a prompt or messages, a template with named holes, and the choices of each (a free hole has none)."""

    model: Short | None = None
    prompt: str | Items[int] | None = None
    messages: Annotated[Items[dict[str, Any]], MaxLen(MOST_MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    template: str
    choices: Annotated[dict[str, Annotated[Items[str], MaxLen(MOST_TEXTS)]], BeforeValidator(_few)] = Field(
        default_factory=dict
    )
    steps: int = Field(1, ge=1)
    draws: int = Field(4, ge=1)
    seed: int = 0
    timeout: float | None = Field(None, gt=0)


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def read(http: HttpRequest) -> Response:
        body = await read_body(http, ReadRequest)
        adapter = server.adapter_of(body.model)
        limits = server.limits
        check_size("draws", body.draws, limits.draws)
        check_size("steps", body.steps, limits.steps)
        size = len(body.template) + sum(len(text) for texts in body.choices.values() for text in texts)
        check_size("the characters of template and choices", size, limits.form_characters)
        request = Request(
            uuid.uuid4().hex,
            prompt=body.prompt if isinstance(body.prompt, str) else None,
            tokens=body.prompt if isinstance(body.prompt, list) else None,
            messages=None if body.messages is None else served_messages(body.messages, limits),
            seed=body.seed,
            **template_fields(body.chat_template_kwargs),
        )
        measures = http.state.measures
        measures.outcome, measures.owner = "left", http.state.owner
        terms = Terms(measures.began, measures.owner, limits.seconds(body.timeout), adapter)
        work = server.engine.read(request, body.template, body.choices, body.steps, body.draws, terms)
        found = await unless_left(http, work)
        if found is None:
            return Response(status_code=LEFT)
        measures.outcome = "read"
        holes = {
            name: {"probabilities": found.probabilities[name], "spread": found.spread[name]}
            for name in found.probabilities
        }
        head = {"object": "read", "created": int(time.time()), "model": body.model or server.names[0]}
        return JSONResponse({**head, "holes": holes})

    return routes
