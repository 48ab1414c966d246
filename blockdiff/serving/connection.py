"""Connections of the server, with bounds on unread bytes and on waiting.

The bounds hold for both of uvicorn's protocols: httptools if it is installed, else h11. `Guard` has the bounds that
hold under any ASGI server.
"""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from blockdiff.serving.limits import HEAD_BYTES
from blockdiff.serving.refusals import HEAD_TOO_LARGE, error_body

HEAD_SECONDS = 20.0  # from the start of a connection, or the last answer on it, to the end of a request's head
MOST_IDLE = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)  # connections that wait for their clients


class Connection(asyncio.Protocol):
    """A connection that reads about 64 KiB at most in addition to bodies.

    If data arrives while an answer is due or unread, it is dropped, and the connection closes after that answer. It
    also closes if no request arrives within HEAD_SECONDS. If more than MOST_IDLE connections wait for their clients
    (for a request, the rest of a body or the reading of an answer), the oldest is aborted.
    """

    waiting: ClassVar[dict[Connection, asyncio.TimerHandle | None]] = {}  # the oldest first; the timer that closes it

    cycle: Any  # the last request and its answer
    flow: Any
    transport: Any
    loop: asyncio.AbstractEventLoop
    _is_over = False  # further data is dropped
    _unread = 0  # bytes of answers that were unread at the last check
    _body = _framing = 0  # bytes of the request's body so far, and its other bytes (heads of chunks)

    def connection_made(self, transport: Any) -> None:
        """Open the connection, and wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse data in pieces of at most HEAD_BYTES, unless it has to be dropped."""
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
        """Stop writing until the client has read more of the answer."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Continue writing."""
        super().resume_writing()
        self._watch()

    def on_response_complete(self) -> None:
        """Finish an answer, and wait for the next request."""
        super().on_response_complete()  # type: ignore[misc]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the closed connection."""
        self._is_over = True
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 for data that is no HTTP. If another answer has begun, close after it instead."""
        if self.cycle is not None and self.cycle.response_started:
            self._end_behind_answer()
        elif not self._is_over:
            super().send_400_response(msg)  # type: ignore[misc]

    def _feed(self, data: bytes) -> None:
        super().data_received(data)

    def _count(self, size: int, before: int) -> None:
        """Refuse a chunked body whose framing is larger than its content, because each chunk costs time.

        size: bytes that arrived; before: bytes of the body before them.
        """
        if self.cycle is None or not self.cycle.more_body or self.cycle.response_complete or self._is_over:
            return
        grown = len(self.cycle.body) - before
        self._body, self._framing = self._body + grown, self._framing + size - grown
        if self._framing > 2 * HEAD_BYTES + self._body:
            self._refuse_head()

    @property
    def _is_ahead(self) -> bool:
        """True if new data would follow a complete request whose answer is due or unread."""
        if self.cycle is None or self.cycle.more_body:
            return False
        return not self.cycle.response_complete or self.transport.get_write_buffer_size() > 0

    def _end_behind_answer(self) -> None:
        self._is_over, self.cycle.keep_alive = True, False
        if self.cycle.response_complete:
            self.transport.close()

    def _refuse_head(self) -> None:
        """Answer 431, end writing and drop further data. If another answer has begun, abort instead."""
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
        """Close the connection, unless the client has read more of an answer since the last check."""
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
    """A connection parsed by h11, which bounds heads and trailers by uvicorn's `h11_max_incomplete_event_size`."""

    def send_400_response(self, msg: str) -> None:
        """Answer 431 if the head is too large, else 400 for data that is no HTTP."""
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
        """A connection parsed by httptools, which has no bounds of its own."""

        _others = 0  # bytes since the last part of a body, or the last request

        def _feed(self, data: bytes) -> None:
            self._others += len(data)
            super()._feed(data)
            if self._others > HEAD_BYTES and not self._is_over:
                self._refuse_head()

        def on_message_begin(self) -> None:
            """Begin a request. If the last answer is due or unread, raise ValueError and close after that answer."""
            if self._is_ahead:
                self._end_behind_answer()
                raise ValueError("a request before the answer to the last")  # it ends the parser
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            """Keep a header, unless it is a trailer."""
            if self.cycle is None or self.cycle.scope is not self.scope:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Start the application on the request."""
            self._others = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            """Pass a part of a body to the application."""
            self._others = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            """Finish reading a request."""
            self._others = 0
            super().on_message_complete()

    PROTOCOL = HttpToolsConnection
