"""A connection of the server: how much of it is read before a request is whole and answered, and when it ends.

The bounds hold for both of uvicorn's protocols, httptools where it is installed and h11 elsewhere. `Guard` has those
that hold under any ASGI server.
"""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from blockdiff.serving.limits import HEAD_BYTES
from blockdiff.serving.refusals import HEAD_TOO_LARGE, error_body

HEAD_SECONDS = 20.0  # from a connection, or the last answer on it, to the end of a request's head
MOST_IDLE = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # connections that wait for their client


class Connection(asyncio.Protocol):
    """A connection of which at most some 64 KiB are read that are no body.

    While an answer is due, or is not read, what comes is dropped, and the connection ends behind that answer. It also
    ends if no request comes on it for a time. Of too many connections that wait for their client, for a request, the
    rest of a body or a reader of the answer, the oldest end.
    """

    waiting: ClassVar[dict[Connection, asyncio.TimerHandle | None]] = {}  # the oldest first, and their ends

    cycle: Any  # the last request and its answer
    flow: Any
    transport: Any
    loop: asyncio.AbstractEventLoop
    _is_over = False  # what comes is dropped
    _unread = 0  # bytes of answers at the last look
    _body = _framing = 0  # bytes of the request's body so far, and what came beside them

    def connection_made(self, transport: Any) -> None:
        """Begin, and wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read data, of a request that begins, goes on or ends."""
        for start in range(0, len(data), HEAD_BYTES):
            if self._is_ahead:
                self._end_behind_answer()
            if self._is_over or self.transport.is_closing():
                break
            part, cycle = data[start : start + HEAD_BYTES], self.cycle
            before = 0 if cycle is None else len(cycle.body)
            self._feed(part)
            if self.cycle is not cycle:
                before = self._body = self._framing = 0
            self._count(len(part), before)
        self._watch()

    def pause_writing(self) -> None:
        """Wait until the client has read some."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()  # type: ignore[misc]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._is_over = True
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer that what came is no HTTP, unless another answer has begun."""
        if self.cycle is not None and self.cycle.response_started:
            self._end_behind_answer()
        elif not self._is_over:
            super().send_400_response(msg)  # type: ignore[misc]

    def _feed(self, data: bytes) -> None:
        super().data_received(data)

    def _count(self, size: int, before: int) -> None:
        """Refuse a body in chunks so small that they are more than what they hold, of which each costs time."""
        if self.cycle is None or not self.cycle.more_body or self.cycle.response_complete or self._is_over:
            return
        grown = len(self.cycle.body) - before
        self._body, self._framing = self._body + grown, self._framing + size - grown
        if self._framing > 2 * HEAD_BYTES + self._body:
            self._refuse_head()

    @property
    def _is_ahead(self) -> bool:
        """True if what comes now is behind a whole request whose answer is due, or is not read."""
        if self.cycle is None or self.cycle.more_body:
            return False
        return not self.cycle.response_complete or self.transport.get_write_buffer_size() > 0

    def _end_behind_answer(self) -> None:
        self._is_over, self.cycle.keep_alive = True, False
        if self.cycle.response_complete:
            self.transport.close()

    def _refuse_head(self) -> None:
        """Answer 431, and drop what still comes until the client has read that."""
        status, body = error_body(HEAD_TOO_LARGE)
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # for the application, which waits for the rest of the body
            self.cycle.message_event.set()
        self._is_over = True
        self.transport.write(head.encode() + content)
        self.transport.write_eof()

    def _watch(self) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete or self.cycle.disconnected
        if not is_answered:
            self._forget()
            if not (self.cycle.more_body or self.flow.write_paused):
                return
        if self not in self.waiting:
            self.waiting[self] = self.loop.call_later(HEAD_SECONDS, self._expire) if is_answered else None
            if len(self.waiting) > MOST_IDLE:
                oldest = next(iter(self.waiting))
                oldest._forget()
                oldest.transport.abort()

    def _expire(self) -> None:
        """End, unless more of an answer has been read since the last look."""
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread not in (0, before):
            self.waiting[self] = self.loop.call_later(HEAD_SECONDS, self._expire)
        elif self._unread:
            self.transport.abort()
        else:
            self.transport.close()

    def _forget(self) -> None:
        if (end := self.waiting.pop(self, None)) is not None:
            end.cancel()


class H11Connection(Connection, H11Protocol):
    """A connection that h11 reads, which bounds heads and trailers by uvicorn's `h11_max_incomplete_event_size`."""

    def send_400_response(self, msg: str) -> None:
        """Answer that what came is no HTTP, or has too large a head."""
        if len(self.conn.trailing_data[0]) > HEAD_BYTES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _feed(self, data: bytes) -> None:
        super()._feed(data)
        if self._is_ahead and self.conn.trailing_data[0]:
            self._end_behind_answer()


PROTOCOL: type[Connection] = H11Connection

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    pass
else:

    class HttpToolsConnection(Connection, HttpToolsProtocol):
        """A connection that httptools reads, which has no bounds of its own."""

        _others = 0  # bytes since the last ones of a body, or the last request

        def _feed(self, data: bytes) -> None:
            self._others += len(data)
            super()._feed(data)
            if self._others > HEAD_BYTES and not self._is_over:
                self._refuse_head()

        def on_message_begin(self) -> None:
            """Begin a request, unless it is ahead of an answer."""
            if self._is_ahead:
                self._end_behind_answer()
                raise ValueError("a request before the answer to the last")  # which ends the parser
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Keep a header; those behind a body are dropped."""
            if self.cycle is None or self.cycle.scope is not self.scope:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Begin to answer."""
            self._others = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            """Keep a part of a body for the application."""
            self._others = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            """End a request."""
            self._others = 0
            super().on_message_complete()

    PROTOCOL = HttpToolsConnection
