"""`POST /v1/read`: the probabilities of the holes of a template, from a few denoising steps instead of an answer."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import LEFT, Server, unless_left
from blockdiff.serving.chat import template_fields
from blockdiff.serving.content import check_parts
from blockdiff.serving.mapping import check_size
from blockdiff.serving.protocol import Body

PATH = "/v1/read"


class ReadRequest(Body):
    """The body: a prompt or messages, a template with named holes, and the choices of each (a free hole has none)."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    template: str
    choices: dict[str, list[str]] = Field(default_factory=dict)
    steps: int = Field(1, ge=1)
    draws: int = Field(4, ge=1)
    seed: int = 0


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def read(body: ReadRequest, http: HttpRequest) -> Response:
        server.check_model(body.model)
        limits = server.limits
        check_size("draws", body.draws, limits.draws)
        check_size("steps", body.steps, limits.steps)
        size = len(body.template) + sum(len(text) for texts in body.choices.values() for text in texts)
        check_size("the characters of template and choices", size, limits.form_characters)
        check_parts(body.messages or (), limits)
        request = Request(
            uuid.uuid4().hex,
            prompt=body.prompt if isinstance(body.prompt, str) else None,
            tokens=body.prompt if isinstance(body.prompt, list) else None,
            messages=body.messages,
            seed=body.seed,
            **template_fields(body.chat_template_kwargs),
        )
        with server.account(PATH) as account:
            work = server.engine.read(request, body.template, body.choices, body.steps, body.draws)
            found = await unless_left(http, work)
            if found is None:
                return Response(status_code=LEFT)
            account.outcome = "read"
        holes = {
            name: {"probabilities": found.probabilities[name], "spread": found.spread[name]}
            for name in found.probabilities
        }
        head = {"object": "read", "created": int(time.time()), "model": body.model or server.names[0]}
        return JSONResponse({**head, "holes": holes})

    return routes
