"""The server as replicas on Ray Serve: `serve run recipes/launch/ray_serve.yaml`, described in docs/serving.md.

If a replica dies before an answer has begun, the request goes to another replica. An answer that has begun ends with
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

TRIES = 3  # replicas to which one request is passed; it may itself be why they die
SENT = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")


class Settings(ServeSettings):
    """The arguments of the application in Ray's YAML: the keys of serve.yaml, and the model."""

    model: str


@serve.deployment(max_ongoing_requests=64, max_queued_requests=1000, graceful_shutdown_timeout_s=120)
class Replica:
    """A replica: one engine with the server's application around it."""

    def __init__(self, given: Settings):
        options = dict(names=given.names(given.model), limits=given.limits, **given.engine_options())
        require_as_written(given.model, given.adapter, given.draft_model, *given.adapters.values())
        sampler = Sampler.from_pretrained(given.model, **given.model_options())
        options["adapters"] = {
            name: Sampler.from_pretrained(given.model, adapter=directory, over=sampler.model)
            for name, directory in given.adapters.items()
        }
        log_to_stderr()
        self._app = application.app(sampler, access=Access(hosts=None), **options)  # `Front` checks keys and hosts
        # Ray sends no requests and checks no health before this constructor returns.
        self._app.state.server.engine.thread.wait_until_warm()

    def check_health(self) -> None:
        """Raise EngineError if requests would not be answered; Ray then starts another replica."""
        if (reason := operations.obstacle(self._app.state.server)) is not None:
            raise EngineError(reason)

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the answer to a request. Ray cancels this call when the client leaves."""
        bodies, messages = [body], asyncio.Queue[Message | None]()

        async def receive() -> Message:
            return {"type": "http.request", "body": bodies.pop()} if bodies else await asyncio.Future()

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
    """The ingress: checks keys and hosts (`Guard`), and passes requests to replicas."""

    def __init__(self, given: Settings, replicas: serve.handle.DeploymentHandle):
        self._given, self._replicas = at_its_address(given), replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> Starlette:
        log_to_stderr()
        return Starlette(routes=[Mount("/", Guard(self._pass_on, self._given.access(), self._given.limits, Metrics()))])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages of a replica's answer.

        The start of the response is held back until the first part of its body: if the replica dies before, another
        one answers. Raises Full if too many requests wait, and EngineError if TRIES replicas die.
        """
        body, has_begun = await Request(scope, receive).body(), False
        for _ in range(TRIES):
            held = list[Message]()
            try:
                fields = {name: scope[name] for name in SENT} | {"client": (scope["state"]["owner"], 0)}  # for turns
                async for message in self._replicas.answer.remote(fields, body):
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
    """Return the settings with the host on which Ray listens.

    Raises BlockdiffError if other machines reach that host and no key is needed.
    """
    settings = given.model_copy(update={"host": _get_global_client().http_config.host})
    if not (settings.is_local or settings.access().keys):
        raise BlockdiffError(f"Ray's http_options let other machines ask on {settings.host}; give api_key_file in args")
    return settings


def build(given: Settings) -> serve.Application:
    """Return the application for Ray Serve. Raises BlockdiffError if other machines may ask without a key."""
    if not given.is_local and given.api_key_file is None:
        raise BlockdiffError(f"host {given.host} lets other machines ask; give api_key_file, too")
    return Front.bind(given, Replica.bind(given))  # type: ignore[attr-defined]
