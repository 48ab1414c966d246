"""The server as replicas on Ray Serve: `serve run recipes/launch/ray_serve.yaml`, described in docs/serving.md.

A request whose replica dies before its answer has begun is passed to another one; an answer that has begun ends with
an error.
"""

import asyncio
import json
from collections.abc import AsyncGenerator

from ray import exceptions, serve
from ray.serve.context import _get_global_client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from blockdiff.checkpoint.opening import require_as_written
from blockdiff.errors import BlockdiffError, EngineError, Full
from blockdiff.sampling.sampler import Sampler
from blockdiff.serving import Access, application, operations
from blockdiff.serving.metrics import Metrics
from blockdiff.serving.process import log_to_stderr
from blockdiff.serving.refusals import error_body
from blockdiff.serving.security import Guard
from blockdiff.serving.settings import ServeSettings

TRIES = 3  # replicas that may die over one request: the request itself may be the reason
SENT = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")


class Settings(ServeSettings):
    """The keys of serve.yaml, and the model: the arguments of the application in Ray's YAML."""

    model: str


@serve.deployment(max_ongoing_requests=64, max_queued_requests=1000, graceful_shutdown_timeout_s=120)
class Replica:
    """One engine with the server's application around it."""

    def __init__(self, given: Settings):
        options = dict(names=given.names(given.model), limits=given.limits, **given.engine_options())
        require_as_written(given.model, given.adapter, given.draft_model, *given.adapters.values())
        sampler = Sampler.from_pretrained(given.model, **given.model_options())
        options["adapters"] = {
            name: Sampler.from_pretrained(given.model, adapter=directory, over=sampler.model)
            for name, directory in given.adapters.items()
        }
        log_to_stderr()
        self._app = application.app(sampler, access=Access(hosts=None), **options)  # the front checks who asks
        # Ray sends nothing before it is warm, and does not ask for its health.
        self._app.state.server.engine.thread.wait_until_warm()

    def check_health(self) -> None:
        """Raise EngineError where requests would not be answered; Ray then starts another replica."""
        if (reason := operations.obstacle(self._app.state.server)) is not None:
            raise EngineError(reason)

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """The ASGI messages of an answer. Ray cancels this call when the client goes away."""
        given, messages = [body], asyncio.Queue[Message | None]()

        async def receive() -> Message:
            return {"type": "http.request", "body": given.pop()} if given else await asyncio.Future()

        work = asyncio.create_task(self._app(scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            work.cancel()


@serve.deployment(max_ongoing_requests=10_000)
@serve.ingress()
class Front:
    """Checks who asks, and passes requests on."""

    def __init__(self, given: Settings, replicas: serve.handle.DeploymentHandle):
        self._given, self._replicas = at_its_address(given), replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> Starlette:
        log_to_stderr()
        return Starlette(routes=[Mount("/", Guard(self._pass_on, self._given.access(), self._given.limits, Metrics()))])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages of a replica, the first of them with the first part of the body: until then it may die."""
        body, has_begun = await Request(scope, receive).body(), False
        for _ in range(TRIES):
            held = list[Message]()
            try:
                sent = {name: scope[name] for name in SENT} | {"client": (scope["state"]["owner"], 0)}  # it takes turns
                async for message in self._replicas.answer.remote(sent, body):
                    held.append(message)
                    while held and message["type"] != "http.response.start":
                        has_begun = True
                        await send(held.pop(0))
                return
            except exceptions.RayActorError:
                if has_begun:
                    break
            except serve.exceptions.BackPressureError:
                raise Full("too many requests wait for a replica; ask later") from None
        died = EngineError("the replica that answered died; ask again")
        if not has_begun:
            raise died
        if message.get("more_body"):
            told = json.dumps(error_body(died, scope["state"]["measures"].id)[1]).encode()
            await send({"type": "http.response.body", "body": b"data: %s\n\n" % told})


def at_its_address(given: Settings) -> Settings:
    """The settings with the host on which Ray listens; BlockdiffError where others reach it and no key is asked for."""
    found = given.model_copy(update={"host": _get_global_client().http_config.host})
    if not (found.is_local or found.access().keys):
        raise BlockdiffError(f"Ray's http_options let other machines ask on {found.host}; give api_key_file in args")
    return found


def build(given: Settings) -> serve.Application:
    """The application for Ray Serve; BlockdiffError where other machines may ask without a key."""
    if not given.is_local and given.api_key_file is None:
        raise BlockdiffError(f"host {given.host} lets other machines ask; give api_key_file, too")
    return Front.bind(given, Replica.bind(given))  # type: ignore[attr-defined]
