"""The server as a process of its own: its socket, its log, and its end."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from blockdiff.errors import BlockdiffError
from blockdiff.serving.async_engine import AsyncEngine

BACKLOG = 128  # connections that are taken at a time
KEEP_SECONDS = 20  # an idle connection: longer than httpx (5 s) and aiohttp (15 s), so none closes as it is used
HEAD_SECONDS = 20.0  # from a connection, or the last answer on it, to the end of a request's head
MOST_IDLE = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # connections without a request
CLOSE_SECONDS = 5  # for what is written after the last answer


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """A connection that ends where no request comes on it for a time; of too many such ones the oldest end."""

    idle: ClassVar[dict[Any, asyncio.TimerHandle]] = {}  # those without a request, the oldest first, and their ends

    def connection_made(self, transport: Any) -> None:
        """Begin, and wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take data, of a request that begins, goes on or ends."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request:
            self._forget()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            if len(self.idle) > MOST_IDLE:
                oldest = next(iter(self.idle))
                oldest._forget()
                oldest.transport.abort()

    def _forget(self) -> None:
        if (end := self.idle.pop(self, None)) is not None:
            end.cancel()


class Process(uvicorn.Server):
    """Answers until a signal ends it, and then goes on for as long as answers are under way, but at most for a time.

    Meanwhile it listens, so that `/ready` can say that it drains.
    """

    def __init__(self, asgi: Any, engine: AsyncEngine, drain_seconds: float):
        options: dict[str, Any] = dict(log_level="warning", access_log=False, lifespan="on", http=Connection)
        super().__init__(
            uvicorn.Config(
                asgi,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                timeout_keep_alive=KEEP_SECONDS,
                backlog=BACKLOG,
                **options,
            )
        )
        self._engine, self._drain_seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end, and close all connections; a second Ctrl-C ends the waiting."""
        await self._engine.drain(self._drain_seconds, lambda: self.force_exit)
        await super().shutdown(sockets)


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens; BlockdiffError where the address is taken, or is none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)  # now: two sockets may be bound to one address, but only one of them can listen
    except OSError as error:
        words = f"cannot be listened on ({error.strerror}); choose another --port or --host"
        raise BlockdiffError(f"{host}:{port}: {words}") from None
    return found


def log_to_stderr() -> None:
    """Write the server's log lines on stderr, once."""
    log = logging.getLogger("blockdiff.serving")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
