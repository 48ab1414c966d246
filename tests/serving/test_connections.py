"""Bounds of a connection, over sockets and with both of uvicorn's readers of HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import httpx
import pytest

from blockdiff.serving import app
from blockdiff.serving.connection import H11Connection, HttpToolsConnection
from blockdiff.serving.process import Process, listener
from tests.support.asking import answering

pytestmark = pytest.mark.quick

GET = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
MIB = 1 << 20


class Running:
    """A server in a thread, and raw connections to it."""

    def __init__(self, process: Process, port: int):
        self.process, self.port = process, port

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def answer(self, *parts: bytes) -> bytes:
        """Send some parts and read until the connection ends."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    connection.sendall(part)
            return read_all(connection)

    @property
    def connections(self) -> set:
        """The connections of the server."""
        return self.process.server_state.connections


def read_all(connection: socket.socket) -> bytes:
    """Read until the connection ends, or is silent for a second after its first bytes."""
    connection.settimeout(30)  # a slow processor takes a while over a long head
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while part := connection.recv(1 << 16):
            answer += part
            connection.settimeout(1)
    return answer


@contextlib.contextmanager
def running(protocol=HttpToolsConnection):
    asgi = app(answering("an answer"))
    with listener("127.0.0.1", 0) as listening:
        process = Process(asgi, asgi.state.server.engine, 5, protocol)
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Running(process, listening.getsockname()[1])
        finally:
            process.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module", params=[HttpToolsConnection, H11Connection])
def server(request):
    with running(request.param) as found:
        yield found


ENDLESS = {
    "headers": [GET, b"x: y\r\n" * 101, b"\r\n"],
    "headers without end": [GET, b"x: y\r\n" * MIB],
    "a header without end": [GET, b"x: ", b"y" * MIB],
    "a long header": [GET, b"x: ", b"y" * 70_000, b"\r\n\r\n"],
    "an address": [b"GET /", b"x" * MIB],
    "trailers": [CHUNKED, b"2\r\n{}\r\n0\r\n", b"x: y\r\n" * MIB],
    "a trailer": [CHUNKED, b"2\r\n{}\r\n0\r\nx: ", b"y" * MIB],
    "the size of a chunk": [CHUNKED, b"2;", b"x" * MIB],
    "chunks of a byte": [CHUNKED, b"1\r\n \r\n" * 200_000],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_head_without_end_is_refused_and_its_connection_ends(server, name):
    """Heads, and as well trailers and the sizes of chunks, which no bound on bodies counts."""
    answer = server.answer(*ENDLESS[name])
    assert answer.startswith(b"HTTP/1.1 431") and answer.count(b"HTTP/1.1") == 1 and b"head_too_large" in answer


def test_a_head_of_a_hundred_headers_is_answered(server):
    answer = server.answer(GET + b"x: %s\r\n" % (b"y" * 600) * 98 + b"connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_in_chunks_that_hold_more_than_they_cost_is_read(server):
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    answer = server.answer(head, b"10\r\n                \r\n" * 30_000, b"2\r\n{}\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b"prompt" in answer


def test_nothing_is_read_ahead_of_an_answer(server):
    """A second request that comes before the first is answered is dropped with all behind it."""
    answer = server.answer((GET + b"\r\n") * 100_000)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert server.answer(GET + b"connection: close\r\n\r\n" + b"more").count(b"HTTP/1.1") == 1


def test_a_request_behind_an_answer_that_was_read_is_answered(server):
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(GET + b"\r\n")
            assert b"alive" in connection.recv(1 << 16)


def test_what_comes_while_an_answer_is_denoised_is_dropped(server):
    body = b'{"prompt": "a", "stream": true}'
    head = POST + b"content-length: %d\r\n\r\n" % len(body)
    more = (GET + b"\r\n") * 1000  # some in the first packet, so that a short answer is not over before they come
    answer = server.answer(head + body + more, *[more] * 19)
    assert answer.count(b"HTTP/1.1") == 1 and b"[DONE]" in answer


def test_trailers_do_not_become_headers(server):
    body = b"2\r\n{}\r\n0\r\nx-request-id: late\r\n\r\n"
    answer = server.answer(CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + body)
    assert answer.startswith(b"HTTP/1.1 400") and b"late" not in answer


def test_half_sent_heads_bodies_and_idle_connections_neither_fill_the_server_nor_stay(monkeypatch):
    """400 of them, where a process may have 300 files open and so 75 connections that wait for their client."""
    monkeypatch.setattr("blockdiff.serving.connection.MOST_IDLE", 75)
    monkeypatch.setattr("blockdiff.serving.connection.HEAD_SECONDS", 1.0)
    with running() as server:
        halves = []
        for n in range(400):
            halves.append(server.connect())
            halves[-1].sendall([GET, GET + b"\r\n", POST + b"content-length: 100\r\n\r\n{"][n % 3])
        assert server.process.config.timeout_keep_alive > 15  # what aiohttp keeps (httpx: 5 s); else both ends race
        health = httpx.get(f"http://127.0.0.1:{server.port}/health", trust_env=False, timeout=5)
        held = len(server.connections)
        for each in halves[2::3]:
            each.close()
        end = time.monotonic() + 10
        while server.connections and time.monotonic() < end:
            time.sleep(0.05)
        left = len(server.connections)
        for each in halves:
            each.close()
    assert health.status_code == 200 and held <= 80 and left == 0
