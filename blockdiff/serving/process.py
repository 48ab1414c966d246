"""The server as a process: its socket, its log, and its shutdown."""

from __future__ import annotations

import logging
import socket
from typing import Any

import uvicorn

from blockdiff.errors import BlockdiffError
from blockdiff.serving.async_engine import AsyncEngine
from blockdiff.serving.connection import PROTOCOL, Connection
from blockdiff.serving.limits import HEAD_BYTES

BACKLOG = 128  # connections that may wait to be accepted
KEEP_SECONDS = 20  # an idle connection: longer than httpx (5 s) and aiohttp (15 s), so none closes as it is used
CLOSE_SECONDS = 5  # to finish writing after the last answer


class Process(uvicorn.Server):
    """A uvicorn server that, after a signal, lets answers under way end for up to `drain_seconds`.

    Meanwhile it still listens, so that `/ready` can report that it drains.
    """

    def __init__(
        self, asgi: Any, engine: AsyncEngine, drain_seconds: float, protocol: type[Connection] = PROTOCOL
    ) -> None:
        options: dict[str, Any] = dict(log_level="warning", access_log=False, lifespan="on", http=protocol, ws="none")
        options |= dict(timeout_graceful_shutdown=CLOSE_SECONDS, timeout_keep_alive=KEEP_SECONDS, backlog=BACKLOG)
        super().__init__(uvicorn.Config(asgi, h11_max_incomplete_event_size=HEAD_BYTES, **options))
        self._engine, self._drain_seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end for up to `drain_seconds`, or until a second Ctrl-C, then close all connections."""
        await self._engine.drain(self._drain_seconds, lambda: self.force_exit)
        await super().shutdown(sockets)


def listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises BlockdiffError if the address is taken or does not belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # now: two sockets may be bound to one address, but only one of them can listen
    except OSError as error:
        words = f"cannot be listened on ({error.strerror}); choose another --port or --host"
        raise BlockdiffError(f"{host}:{port}: {words}") from None
    return listening


def log_to_stderr() -> None:
    """Send the log of `blockdiff.serving` to stderr, from level INFO on. Further calls add no second handler."""
    log = logging.getLogger("blockdiff.serving")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
