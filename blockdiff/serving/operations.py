"""The routes for operators of the server: `/health`, `/ready`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from blockdiff.serving.answering import Server
from blockdiff.serving.answers import Model, Models

LOOKS = ["GET", "HEAD"]


async def _obstacle_to_threads() -> str | None:
    """Return why no thread can be started to parse requests; None if one can."""
    try:
        await run_in_threadpool(int)
    except RuntimeError as error:
        return f"{error}; let this user have more processes (ulimit -u)"
    return None


def router(server: Server) -> APIRouter:
    """Return a router that serves `/health`, `/ready`, `/metrics`, `/v1/models` and `/v1/models/NAME`."""
    routes = APIRouter()

    def described(name: str) -> Model:
        _, settings = server.engine.models[server.adapter_of(name)]
        return Model(id=name, created=server.created, max_model_len=settings.positions)

    @routes.api_route("/health", methods=LOOKS)
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @routes.api_route("/ready", methods=LOOKS)
    async def ready() -> Response:
        reason = obstacle(server) or await _obstacle_to_threads()
        body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        return JSONResponse(body, 200 if reason is None else 503)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(await server.metrics.text(server.engine), media_type="text/plain; version=0.0.4")

    @routes.get("/v1/models")
    async def models() -> Models:
        return Models(data=[described(name) for name in server.served])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        return described(name)

    return routes


def obstacle(server: Server) -> str | None:
    """Return why the server would not answer requests now; None if it would."""
    engine, thread = server.engine, server.engine.thread
    if not thread.is_working:
        return "the engine has stopped"
    if engine.is_draining:
        return "the server drains: it takes no more requests"
    if not thread.is_warm:
        return "the engine warms up"
    if thread.step_seconds > server.limits.stall_seconds:
        return f"a step has run for {thread.step_seconds:.0f} s"
    return None
