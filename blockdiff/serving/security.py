"""The guard that every request passes first: its id, who may ask, and how large a body may be."""

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
OPEN_PATHS = ("/", "/health", "/ready")  # what needs no key: it says nothing about anybody's requests
ID_HEADER = "x-request-id"
MOST_PATH = 200  # characters in the log
IDS = re.compile(r"[\w.:-]{1,100}", re.ASCII)


class Left(Exception):
    """The client left before its request was whole."""


class Guard:
    """ASGI middleware: refuses other hosts and sites (DNS rebinding), asks for a key, and bounds bodies.

    A request has an id, its own or a new one, which is in the header of the answer, in the log and in errors. What it
    raises becomes an error in OpenAI's form. Its `CallMetrics` are `request.state.measures`, and are closed at its end.
    """

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, metrics: Metrics):
        self.app, self.access, self.limits, self.metrics = app, access, limits, metrics
        self._held = 0  # bytes of bodies, of requests that are not answered
        self._most_bytes = min(limits.body_bytes, limits.bodies_bytes)
        self._keys = [key.encode() for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may come in, and answer the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_large = _is_large(scope)
        given = [] if is_large else scope["headers"]
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in given}
        id = headers.get(ID_HEADER, "")
        if IDS.fullmatch(id) is None:
            id = f"req-{uuid.uuid4().hex}"
            own = [(name, value) for name, value in given if name.lower() != ID_HEADER.encode()]
            scope["headers"] = [*own, (ID_HEADER.encode(), id.encode())]
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
            if has_begun:  # the connection has to end
                raise
            await error_response(error, id)(scope, receive, tagged)
        finally:
            measures.close()

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[Receive]:
        """Read the body, and count it until the request ends, for what is made of it is as large.

        The value gives its messages once, and then those that follow. Raises Refused for a body that is too large or
        slow, Full for one beside too many others, and Left.
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
        """The number of the key that was given, if any is asked for; Refused for a request that may not come in."""
        found: int | None = None
        host, origin, access = headers.get("host", ""), headers.get("origin"), self.access
        if access.hosts is not None and _name(host) not in access.hosts:
            raise Refused(f"the host {host!r:.80} is not one of this server's names", 403, "host_not_allowed")
        is_own = origin in (None, f"http://{host}", f"https://{host}")
        if not is_own and not {origin, "*"} & {*access.origins}:
            raise Refused(f"pages of {origin!r:.80} may not ask this server", 403, "origin_not_allowed")
        if self._keys and path not in OPEN_PATHS:
            kind, _, given = headers.get("authorization", "").partition(" ")
            is_known = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
            if kind.lower() != "bearer" or not any(is_known):
                asks = "this server asks for an API key: Authorization: Bearer KEY"
                words = f"{asks}; the one that came is none of its keys" if given else asks
                raise Refused(words, 401, "invalid_api_key")
            found = is_known.index(True)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes:
            raise self._too_large()
        return found

    def _too_large(self) -> Refused:
        return Refused(
            f"the body has more than the {self._most_bytes} bytes that this server takes", 413, "body_too_large"
        )


def _is_large(scope: Scope) -> bool:
    """True for a head of more bytes or headers than any that is taken."""
    headers = scope["headers"]
    size = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    return len(headers) > HEADERS or size + sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES


def _one_client(address: str) -> str:
    """The address of a client, or the network of 64 bits of one in IPv6, which has as many addresses as it likes."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:  # of a socket that is a file
        return address
    if isinstance(found, IPv4Address):
        return address
    mapped = found.ipv4_mapped
    return str(IPv6Network((found, 64), strict=False)) if mapped is None else str(mapped)


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
