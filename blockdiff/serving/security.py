"""The guard that every request passes first: it sets the request's id, checks keys and hosts, and bounds the body."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import string
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from starlette.datastructures import MutableHeaders

from blockdiff.errors import BlockdiffError, Full
from blockdiff.serving.limits import HEAD_BYTES, HEADERS, Access, Limits
from blockdiff.serving.metrics import CallMetrics, Metrics
from blockdiff.serving.refusals import HEAD_TOO_LARGE, Refused, error_body, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("blockdiff.serving")
OPEN_PATHS = ("/", "/health", "/ready")  # they need no key, because they reveal nothing about requests
ID_HEADER = "x-request-id"
MOST_PATH = 200  # characters of a path in the log
IDS = re.compile(r"[\w.:-]{1,100}", re.ASCII)


class Left(Exception):
    """The client left before its request was complete."""


class Guard:
    """ASGI middleware: refuses unknown hosts and sites (DNS rebinding), asks for a key, and bounds bodies.

    A request keeps its `x-request-id` or gets a new one; the answer's header, the log and errors have it. Exceptions
    become errors in OpenAI's form. A request's `state` has its `CallMetrics` as `measures`, which are closed at its
    end, and as `owner` the key or the address of its client.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, metrics: Metrics):
        self.app, self.access, self.limits, self.metrics = app, access, limits, metrics
        self._held = 0  # bytes of the bodies of all unanswered requests
        self._most_bytes = min(limits.body_bytes, limits.bodies_bytes)
        self._keys = [key.encode() for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application if it is allowed, and answer it with an error if not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_large = _is_large(scope)
        pairs = [] if is_large else scope["headers"]
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}
        id = headers.get(ID_HEADER, "")
        if IDS.fullmatch(id) is None:
            id = f"req-{uuid.uuid4().hex}"
            others = [(name, value) for name, value in pairs if name.lower() != ID_HEADER.encode()]
            scope["headers"] = [*others, (ID_HEADER.encode(), id.encode())]
        path = quote(scope.get("raw_path") or scope["path"], safe=string.punctuation)[:MOST_PATH]
        measures = scope.setdefault("state", {})["measures"] = CallMetrics(self.metrics, path, id)
        has_begun = False

        async def tagged(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)[ID_HEADER] = id
            await send(message)

        try:
            if is_large:
                raise HEAD_TOO_LARGE
            key = self._check(scope["path"], headers)
            address = scope["client"][0] if scope.get("client") else ""
            scope["state"]["owner"] = _one_client(address) if key is None else f"key {key}"
            async with self._body(receive) as replayed:
                await self.app(scope, replayed, tagged)
        except Left:
            LOG.debug("%s %s left while its body was sent", id, measures.path)
            self.metrics.requests.labels("left").inc()
        except Exception as error:
            if not isinstance(error, BlockdiffError):
                LOG.exception("%s failed", id)
            status, body = error_body(error)
            measures.failed(status, body)
            if has_begun:  # then only the end of the connection can show the error
                raise
            await error_response(error, id)(scope, receive, tagged)
        finally:
            measures.close()

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[Receive]:
        """Read the whole body, and count its bytes until the request ends.

        Yields a `receive` that returns the messages read, and then the ones that follow. Raises Refused if the body is
        too large or too slow, Full if the bodies of all requests are too large together, and Left if the client left.
        """
        read: list[Message] = []
        held, seconds = 0, self.limits.read_seconds

        async def replayed() -> Message:
            return read.pop(0) if read else await receive()

        try:
            try:
                async with asyncio.timeout(seconds):
                    while not read or read[-1].get("more_body"):
                        read.append(await receive())
                        if read[-1]["type"] == "http.disconnect":
                            raise Left
                        size = len(read[-1].get("body", b""))
                        held += size
                        self._held += size
                        if held > self._most_bytes:
                            raise self._too_large()
                        if self._held > self.limits.bodies_bytes:
                            raise Full("the bodies of too many requests are held; ask later")
            except TimeoutError:
                raise Refused(f"the body did not come within {seconds:g} s", 408, "body_too_slow") from None
            yield replayed
        finally:
            self._held -= held

    def _check(self, path: str, headers: dict[str, str]) -> int | None:
        """Check host, origin, key and content-length, and return the index of the request's key.

        None if no key is needed. Raises Refused if the request is not allowed. headers: by lower-case names.
        """
        index: int | None = None
        host, origin, access = headers.get("host", ""), headers.get("origin"), self.access
        if access.hosts is not None and _name(host) not in access.hosts:
            raise Refused(f"the host {host!r:.80} is not one of this server's names", 403, "host_not_allowed")
        is_own = origin in (None, f"http://{host}", f"https://{host}")
        if not is_own and not {origin, "*"} & {*access.origins}:
            raise Refused(f"pages of {origin!r:.80} may not ask this server", 403, "origin_not_allowed")
        if self._keys and path not in OPEN_PATHS:
            kind, _, token = headers.get("authorization", "").partition(" ")
            is_known = [hmac.compare_digest(token.strip().encode("latin-1"), key) for key in self._keys]
            if kind.lower() != "bearer" or not any(is_known):
                asks = "this server asks for an API key: Authorization: Bearer KEY"
                words = f"{asks}; the one that came is none of its keys" if token else asks
                raise Refused(words, 401, "invalid_api_key")
            index = is_known.index(True)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes:
            raise self._too_large()
        return index

    def _too_large(self) -> Refused:
        return Refused(
            f"the body has more than the {self._most_bytes} bytes that this server takes", 413, "body_too_large"
        )


def _is_large(scope: Scope) -> bool:
    """True if a request's head has more than HEAD_BYTES bytes or HEADERS headers."""
    headers = scope["headers"]
    size = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    return len(headers) > HEADERS or size + sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES


def _one_client(address: str) -> str:
    """Return the address of a client; for IPv6 its /64 network, because a client may have all addresses of one."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:  # a Unix socket has none
        return address
    if isinstance(ip, IPv4Address):
        return address
    mapped = ip.ipv4_mapped
    return str(IPv6Network((ip, 64), strict=False)) if mapped is None else str(mapped)


def _name(host: str) -> str:
    """Return the name in a Host header without the port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
