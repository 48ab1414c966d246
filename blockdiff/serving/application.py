"""The server as an ASGI application, which any ASGI server can run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blockdiff import __version__
from blockdiff.sampling.sampler import Sampler
from blockdiff.serving import chat, completions, decisions, operations, page, reads, responses
from blockdiff.serving.answering import Server
from blockdiff.serving.async_engine import AsyncEngine
from blockdiff.serving.limits import Access, Limits
from blockdiff.serving.refusals import error_body, error_response
from blockdiff.serving.security import Guard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.models.model import BlockDiffusionModel

# Each is a function of the Server, in a file of its own.
ROUTERS = (
    *(chat.router, completions.router, responses.router, reads.router, decisions.router),
    *(operations.router, page.router),
)


def app(
    model: BlockDiffusionModel | Sampler | AsyncEngine,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    names: tuple[str, ...] = ("blockdiff",),
    limits: Limits | None = None,
    access: Access | None = None,
    **options: Any,
) -> FastAPI:
    """Return an ASGI application that answers OpenAI's protocol with a model.

    model: a model with its `tokenizer`, a `Sampler`, or an `AsyncEngine`; names: names by which requests may call it;
    options: arguments of `AsyncEngine`, such as max_rows, unless `model` is one. The engine starts and ends with the
    application.
    """
    limits, access = limits or Limits(), access or Access()
    if isinstance(model, AsyncEngine):
        engine = model
    else:
        bounds = dict(prepare_seconds=limits.prepare_seconds, max_of_owner=limits.answers_each)
        bounds |= dict(max_image_bytes=limits.images_bytes)
        options = dict(max_prompt_tokens=limits.prompt_tokens) | bounds | options
        engine = AsyncEngine(model, tokenizer, **options)
    server = Server(engine, names, limits)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    application = FastAPI(title="blockdiff", version=__version__, lifespan=running, docs_url=None, redoc_url=None)
    application.state.server = server
    application.add_middleware(Guard, access=access, limits=limits, metrics=server.metrics)
    if access.origins:  # pages of these sites may read the answers, too
        application.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"]
        )
    application.add_exception_handler(HTTPException, _unknown)
    for router in ROUTERS:
        application.include_router(router(server))
    return application


async def _unknown(http: HttpRequest, error: Exception) -> JSONResponse:
    """Answer a request for a path or method that does not exist."""
    assert isinstance(error, HTTPException)
    error.detail = f"{http.method} {http.url.path}: {error.detail}"
    status, body = error_body(error)
    http.state.measures.failed(status, body)
    return error_response(error, http.state.measures.id)
