"""What only real connections show: hanging up, slow and rude clients, streaming while the engine works."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.options import ServerOptions
from penstock.server.protocol import SLICE
from penstock_lab.prove.servers import QUICK
from tests.server.fakes import Behaviour, FakeEngineClient, FakeTokenizer
from tests.server.harness import WAIT_S, RunningServer, get, running, send, stream, wait_until

OPTIONS = ServerOptions(port=0, access_log=False, keep_alive_s=0.1, max_body_bytes=100_000)
IMPATIENT = dataclasses.replace(OPTIONS, receive_timeout_s=1.0, stall_timeout_s=0.5)
BODY = {"prompt": "a", "max_tokens": 400}


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(FakeEngineClient(), OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def shared_impatient() -> Iterator[RunningServer]:
    with running(FakeEngineClient(), IMPATIENT) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    """A server whose deadlines no test reaches."""
    shared.client.behaviour = Behaviour()
    shared.client.aborted.clear()
    return shared


@pytest.fixture
def impatient(shared_impatient: RunningServer) -> RunningServer:
    """A server with short deadlines, for tests that wait for them."""
    shared_impatient.client.behaviour = Behaviour()
    shared_impatient.client.aborted.clear()
    return shared_impatient


def raw(server: RunningServer, data: bytes, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", server.port))
    sock.settimeout(WAIT_S)
    sock.sendall(data)
    return sock


def post(body: bytes, headers: str = "") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    with sock:
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(65536):
                parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("hang_at", [0, 3])
def test_hanging_up_aborts(server: RunningServer, stream: bytes, hang_at: int) -> None:
    """Guards against generating for a client that has left: Starlette does not cancel plain handlers."""
    server.client.behaviour = Behaviour(hang_at=hang_at)
    sock = raw(server, post(b'{"prompt": ["a", "b"], "n": 2, "stream": %s}' % stream))
    wait_until(lambda: len(server.client.open) == 2)
    sock.close()
    wait_until(lambda: not server.client.open)
    assert len(server.client.aborted) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_hanging_up_ends_the_wait_for_a_form(server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against forms of clients that have left, for which others wait."""
    waiting: list[bool] = []

    async def check_form(*_: Any) -> None:
        waiting.append(True)
        try:
            await asyncio.sleep(10 * WAIT_S)
        finally:
            waiting.clear()

    monkeypatch.setattr(server.client, "check_form", check_form)
    prompt = b'"input"' if path == "/v1/responses" else b'"prompt"'
    body = b'{%s: "a", "structured_outputs": {"regex": "a"}}' % prompt
    sock = raw(server, post(body).replace(b"/v1/completions", path.encode()))
    wait_until(lambda: bool(waiting))
    sock.close()
    wait_until(lambda: not waiting)


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("at_once", [True, False])
def test_hanging_up_aborts_pipelined_requests(
    server: RunningServer, stream: bytes, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against generating for a client that has left while a second request waited for the first: only the second
    learned of it, and the first wrote into a closed connection, with a traceback in the log."""
    server.client.behaviour = Behaviour(delay_s=0.001, hang_at=20)
    server.client.seen.clear()
    request = post(b'{"prompt": "a", "max_tokens": 400, "stream": %s}' % stream)
    sock = raw(server, request * (3 if at_once else 1))
    wait_until(lambda: len(server.client.open) == 1)
    if not at_once:
        sock.sendall(request * 2)
    sock.close()
    wait_until(lambda: not server.client.open)
    assert get(f"{server.url}/live").status_code == 200  # whatever the hang-up had started has begun by now
    assert (len(server.client.seen), len(server.client.aborted)) == (1, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_hanging_up_while_the_body_is_sent(server: RunningServer) -> None:
    """Guards against a handler that waits indefinitely, or logs an error, for a body that will not come."""
    raw(server, post(b'{"prompt": "a"}')[:-5]).close()
    assert get(f"{server.url}/live").status_code == 200
    assert not server.client.open


def test_many_disconnects_leave_nothing(server: RunningServer) -> None:
    """Guards against a request table that grows with every client that gives up."""
    server.client.behaviour = Behaviour(delay_s=0.001)
    for _ in range(50):
        raw(server, post(b'{"prompt": "a", "max_tokens": 400, "stream": true}')).close()
    wait_until(lambda: not server.client.open)
    server.client.behaviour = Behaviour()
    assert send(f"{server.url}/v1/completions", json=BODY).status_code == 200


def test_stream_arrives_piece_by_piece(server: RunningServer) -> None:
    """Guards against an answer that is collected first and "streamed" at the end."""
    server.client.behaviour = Behaviour(text="abc", hang_at=2)
    with stream("POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        texts = (line for line in response.iter_lines() if '"text"' in line)
        assert ['"text":"a"' in next(texts), '"text":"b"' in next(texts)] == [True, True]


@pytest.mark.parametrize("hang_at", [0, 1])
def test_keep_alive_comments(server: RunningServer, hang_at: int) -> None:
    """Guards against proxies that cut a stream which is silent while it waits: before its first token, or between."""
    server.client.behaviour = Behaviour(hang_at=hang_at)
    with stream("POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
        comments = (line for line in response.iter_lines() if line.startswith(":"))
        assert [next(comments), next(comments)] == [": keep-alive"] * 2


def test_slow_reader_is_cut_off(impatient: RunningServer) -> None:
    """Guards against a client that asks for much, reads nothing, and holds its blocks and buffers indefinitely."""
    body = b'{"prompt": [%s], "n": 8, "max_tokens": 500, "stream": true}' % b",".join([b'"a"'] * 32)
    with raw(impatient, post(body), receive_buffer=4096) as sock:
        wait_until(lambda: bool(impatient.client.aborted) and not impatient.client.open)
        sock.setblocking(True)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 20):
                pass


@pytest.mark.parametrize(
    "start", [b"POST /v1/completions HTTP/1.1\r\nHost:", post(b'{"prompt": "aaa"}')[:-3], post(b"{}" * 99)[:-1]]
)
def test_slow_sender_is_cut_off(impatient: RunningServer, start: bytes) -> None:
    """Guards against slow-loris, in the headers and in the body; uvicorn has no deadline for receiving."""
    begin = time.monotonic()
    answer = read_all(raw(impatient, start))
    assert time.monotonic() - begin < 25  # the default deadline is 30 s
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize("start", [b"", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_idle_connection_is_closed_silently(impatient: RunningServer, start: bytes) -> None:
    """Guards against connections that are opened, or kept, for nothing, and against an answer to no question."""
    with raw(impatient, start) as sock:
        if start:
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
            sock.sendall(b"\r\n")  # which ends uvicorn's own deadline for idle connections
        assert read_all(sock) == b""


def test_half_a_pipelined_request_does_not_end_the_stream_before_it(impatient: RunningServer) -> None:
    """Guards against the deadline of the second request cutting off the answer to the first."""
    impatient.client.behaviour = Behaviour(text="x" * 20, delay_s=0.1)
    first = post(b'{"prompt": "a", "max_tokens": 30, "stream": true}')
    answer = read_all(raw(impatient, first + post(b'{"prompt": "b"}')[:-3]))
    assert b"data: [DONE]\n\n" in answer
    assert b"HTTP/1.1 408 " in answer.partition(b"[DONE]")[2]


def test_trickling_headers_do_not_extend_the_deadline(impatient: RunningServer) -> None:
    """Guards against a deadline that starts again with every byte."""
    sock = raw(impatient, b"GET /live HTTP/1.1\r\n")
    begin = time.monotonic()
    with sock, contextlib.suppress(ConnectionError):
        while time.monotonic() - begin < 25:  # the default deadline is 30 s
            sock.sendall(b"X: y\r\n")
            time.sleep(0.05)
        pytest.fail("the connection was not closed")


def test_idle_keep_alive_connection_is_reused(impatient: RunningServer) -> None:
    """Guards against the receive deadline of one request hitting the next one on the same connection."""
    with httpx.Client(base_url=impatient.url, timeout=WAIT_S, **QUICK) as client:
        for _ in range(3):
            assert client.get("/live").status_code == 200
            time.sleep(0.4)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /live?" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_large_heads_are_refused(server: RunningServer, data: bytes) -> None:
    """Guards against headers without end (CVE-2025-48956)."""
    sock = socket.create_connection(("127.0.0.1", server.port))
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    answer = read_all(sock)
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    assert get(f"{server.url}/live").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x05hello",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost : a\r\n\r\n",
    ],
)
def test_malformed_http_is_refused(server: RunningServer, data: bytes) -> None:
    """Guards against request smuggling, and against a plain-text answer to what the parser refuses."""
    answer = read_all(raw(server, data))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b'{"error":{"message":' in answer
    assert get(f"{server.url}/live").status_code == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://elsewhere/v1/models HTTP/1.1", b"200"),
        (b"GET //v1//models HTTP/1.1", b"404"),
        (b"GET /v1/../metrics HTTP/1.1", b"404"),
        (b"GET * HTTP/1.1", b"4"),
        (b"OPTIONS * HTTP/1.1", b"4"),
        (b"CONNECT a:1 HTTP/1.1", b"4"),
        (b"GET /\xff HTTP/1.1", b"4"),
        (b"GET /%00%ff%0d%0a HTTP/1.1", b"404"),
        (b"GET /v1/models/%ff%00 HTTP/1.1", b"404"),
    ],
)
def test_odd_request_lines(server: RunningServer, line: bytes, status: bytes) -> None:
    """Guards against a request line that crashes the server, or one that is routed as another than it is checked."""
    answer = read_all(raw(server, line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert status == b"200" or b'{"error":{"message":' in answer


def test_large_body_is_refused_before_it_is_sent(server: RunningServer) -> None:
    """Guards against reading a gigabyte to say that it is too much."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with raw(server, head) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_large_body_in_chunks_is_refused(server: RunningServer) -> None:
    """Guards against a body without a length that never ends; the client can read the answer while it sends."""
    pieces = (b" " * 10_000 for _ in range(100))
    response = send(f"{server.url}/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert response.status_code == 413


def test_tiny_pieces_of_a_body_hold_up_nobody(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a body in pieces of one byte, for each of which uvicorn copies all that is not read yet, and which
    is parsed without a break."""
    passed_on = []
    on_body = HttpToolsProtocol.on_body

    def count(protocol: HttpToolsProtocol, body: bytes) -> None:
        passed_on.append(len(body))
        on_body(protocol, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", count)
    text = b'{"prompt": "%s"}' % (b"a" * 60_000)
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + body) as sock:
        assert b"context_length_exceeded" in sock.recv(65536)
    assert sum(passed_on) == len(text)
    assert len(passed_on) < 1000
    assert max(passed_on) < SLICE


def test_large_body_in_one_piece_is_taken(server: RunningServer) -> None:
    """Guards against the cap on heads counting a body that arrives together with its headers."""
    body = b'{"prompt": "a", "user": "%s", "max_tokens": 1}' % (b"x" * 90_000)
    for data in (post(body, "Connection: close\r\n"), post(body) + post(body, "Connection: close\r\n")):
        answer = read_all(raw(server, data))
        assert answer.count(b"HTTP/1.1 200 ") == data.count(b"POST ")


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    """Guards against the deadline or the head cap confusing two requests that arrive in one packet."""
    answer = read_all(raw(server, post(b'{"prompt": "a"}') + post(b'{"prompt": 1}', "Connection: close\r\n")))
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 400")


class SlowTokenizer(FakeTokenizer):
    """Does not finish a long text before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_finish = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        assert self.may_finish.wait(WAIT_S)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_tokenising_a_long_text_delays_no_other_request(server: RunningServer) -> None:
    """Guards against an event loop that stands still while a long prompt is tokenised."""
    slow = SlowTokenizer()
    kept, server.client.tokenizer = server.client.tokenizer, slow
    with raw(server, post(b'{"prompt": "%s"}' % (b"a" * 4100))) as sock:
        assert slow.begun.wait(WAIT_S)
        assert get(f"{server.url}/live").status_code == 200
        slow.may_finish.set()
        assert b"context_length_exceeded" in sock.recv(65536)
    server.client.tokenizer = kept


def test_other_requests_go_on_beside_a_long_stream(server: RunningServer) -> None:
    """Guards against an event loop that one stream, or one large prompt, holds."""
    server.client.behaviour = Behaviour(hang_at=5)
    with stream("POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}):
        assert get(f"{server.url}/health").status_code == 200
