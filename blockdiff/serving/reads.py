"""`POST /v1/read`: the probabilities of texts in a template's holes, from a few denoising steps without an answer."""

from __future__ import annotations

import time
import uuid
from functools import partial

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import LEFT, Server, unless_left
from blockdiff.serving.bodies import read_body
from blockdiff.serving.chat import template_fields
from blockdiff.serving.content import served_messages
from blockdiff.serving.mapping import check_size
from blockdiff.serving.protocol import ReadRequest

PATH = "/v1/read"


def router(server: Server) -> APIRouter:
    """Return a router that serves `POST /v1/read`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def read(http: HttpRequest) -> Response:
        body = await read_body(http, ReadRequest)
        terms, limits = server.terms(http, body), server.limits
        check_size("draws", body.draws, limits.draws)
        check_size("steps", body.steps, limits.steps)
        size = len(body.template) + sum(len(text) for texts in body.choices.values() for text in texts)
        check_size("the characters of template and choices", size, limits.form_characters)
        messages = None
        if body.messages is not None:  # in a thread, because they may have images
            messages = await server.engine.prepared(partial(served_messages, body.messages, limits), "plain", terms)
        request = Request(
            uuid.uuid4().hex,
            prompt=body.prompt if isinstance(body.prompt, str) else None,
            tokens=body.prompt if isinstance(body.prompt, list) else None,
            messages=messages,
            seed=body.seed,
            **template_fields(body.chat_template_kwargs),
        )
        measures = http.state.measures
        measures.outcome = "left"
        work = server.engine.read(request, body.template, body.choices, body.steps, body.draws, terms)
        reading = await unless_left(http, work)
        if reading is None:
            return Response(status_code=LEFT)
        measures.outcome = "read"
        holes = {
            name: {"probabilities": reading.probabilities[name], "spread": reading.spread[name]}
            for name in reading.probabilities
        }
        head = {"object": "read", "created": int(time.time()), "model": body.model or server.names[0]}
        return JSONResponse({**head, "holes": holes})

    return routes
