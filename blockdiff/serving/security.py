"""The check of who may ask, and how large a body may be: checked before anything of a request is read."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from blockdiff.serving.limits import Access, Limits

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health", "/ready")  # what needs no key: it says nothing about anybody's requests


class Guard:
    """ASGI middleware: refuses other hosts and sites (DNS rebinding), asks for a key, and bounds bodies."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits):
        self.app, self.access, self.limits = app, access, limits
        self._keys = [key.encode() for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may come in, and answer the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _send_error(send, *refusal)
            return
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                read = await self._body(receive)
        except TimeoutError:
            words = f"the body did not come within {self.limits.read_seconds:g} s"
            await _send_error(send, 408, "body_too_slow", words)
            return
        if read is None:
            await _send_error(send, *self._too_large())
            return

        async def replayed() -> Message:
            return read.pop(0) if read else await receive()

        await self.app(scope, replayed, send)

    async def _body(self, receive: Receive) -> list[Message] | None:
        """The messages of a body; None for one that is too large."""
        read, left = [await receive()], self.limits.body_bytes
        while True:
            left -= len(read[-1].get("body", b""))
            if left < 0:
                return None
            if not read[-1].get("more_body"):
                return read
            read.append(await receive())

    def _refusal(self, path: str, headers: dict[str, str]) -> tuple[int, str, str] | None:
        """The status, the code and the message with which a request is refused; None for one that may come in."""
        host, origin, access = headers.get("host", ""), headers.get("origin"), self.access
        if access.hosts is not None and _name(host) not in access.hosts:
            return 403, "host_not_allowed", f"the host {host!r:.80} is not one of this server's names"
        if origin is not None and origin not in (*access.origins, f"http://{host}", f"https://{host}"):
            return 403, "origin_not_allowed", f"pages of {origin!r:.80} may not ask this server"
        if self._keys and path not in OPEN_PATHS:
            kind, _, given = headers.get("authorization", "").partition(" ")
            is_known = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
            if kind.lower() != "bearer" or not any(is_known):
                asks = "this server asks for an API key: Authorization: Bearer KEY"
                return 401, "invalid_api_key", f"{asks}; the one that came is none of its keys" if given else asks
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> tuple[int, str, str]:
        return (
            413,
            "body_too_large",
            f"the body has more than the {self.limits.body_bytes} bytes that this server takes",
        )


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def _send_error(send: Send, status: int, code: str, message: str) -> None:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = [(b"content-type", b"application/json")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})
