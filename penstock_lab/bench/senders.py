"""Clients of an HTTP server that take almost no processor time: one epoll loop over plain sockets.

A client that shares the machine with the server must not distort the measurement. So the bytes of requests are made
beforehand, answers are searched instead of parsed, and each request notes how late it was sent.
"""

import contextlib
import heapq
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

END_OF_STREAM, END_OF_CHUNKS = b"data: [DONE]", b"0\r\n\r\n"
FIRST_TOKEN = b"data: {"
RETRY_AFTER_MS = re.compile(rb"retry-after-ms: (\d+)", re.IGNORECASE)
CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
TAIL = 32  # bytes of a stream that are kept to find its end in


@dataclass(slots=True)
class Request:
    """A request as its client saw it. Times are in seconds since the phase began.

    Attributes:
        due_at: when it was to be sent; sent_at: when it was sent.
        body: the index of the body that was sent.
        status: 0 if no answer came.
        answered_at: when the status line came.
        ended_at: when the answer was complete.
        retry_after_s: the pause that a refusal asked for.
    """

    due_at: float
    sent_at: float = 0.0
    body: int = 0
    status: int = 0
    answered_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    retry_after_s: float = 0.0


class Senders:
    """Sends requests when they are due, and notes what becomes of them.

    Args:
        bodies: requests with their heads, sent in turn; with "Connection: close" unless `keep_alive`.
        again: called with each request that has ended, whole or not; returns when its client sends the next one, in
            seconds since the phase began, or None. The client then keeps its connection if `keep_alive`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        bodies: list[bytes],
        again: Callable[[Request], float | None] = lambda request: None,
        *,
        keep_alive: bool = False,
    ) -> None:
        self._address, self._bodies, self._again, self._keep_alive = address, bodies, again, keep_alive
        self._epoll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._due: list[tuple[float, int, _Connection | None]] = []
        self._began = time.perf_counter()
        self._next_body = 0
        self.requests: list[Request] = []

    def now(self) -> float:
        return time.perf_counter() - self._began

    def send_at(self, due_at: float, connection: "_Connection | None" = None) -> None:
        """Plan a request."""
        heapq.heappush(self._due, (due_at, len(self.requests), connection))
        self.requests.append(Request(due_at))

    def run(self, until: float) -> None:
        """Send and receive until nothing is planned or open, or until this time."""
        self._began = time.perf_counter()
        while (self._due or self._open) and (now := self.now()) < until:
            while self._due and self._due[0][0] <= now:
                _, index, connection = heapq.heappop(self._due)
                self._send(self.requests[index], connection)
            wait_s = max(0.0, self._due[0][0] - self.now()) if self._due else until - now
            for number, _ in self._epoll.poll(min(wait_s, until - now)):
                self._receive(self._open[number])
        for connection in list(self._open.values()):
            self._close(connection)
        for _, _, waiting in self._due:
            if waiting is not None:
                waiting.sock.close()
        self._epoll.close()

    def _send(self, request: Request, connection: "_Connection | None") -> None:
        request.sent_at = self.now()
        request.body, self._next_body = self._next_body, (self._next_body + 1) % len(self._bodies)
        data = self._bodies[request.body]
        if connection is None:
            connection = _Connection(socket.socket(), request)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.setblocking(False)
            connection.sock.connect_ex(self._address)
        connection.restart(request, data)
        self._open[connection.sock.fileno()] = connection
        if self._flush(connection):
            self._epoll.register(connection.sock, select.EPOLLIN)
        else:
            self._epoll.register(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: "_Connection") -> bool:
        """Send the rest of a request. Return whether all of it is sent."""
        with contextlib.suppress(BlockingIOError, OSError):
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        return not connection.unsent

    def _receive(self, connection: "_Connection") -> None:
        if connection.unsent and self._flush(connection):
            self._epoll.modify(connection.sock, select.EPOLLIN)
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.take(data, self.now()):
            self._end(connection, is_open=bool(data) and self._keep_alive)
        elif not data and connection.is_stale:
            self._close(connection)
            self._send(connection.request, None)
        elif not data:
            self._end(connection, is_open=False)

    def _end(self, connection: "_Connection", *, is_open: bool) -> None:
        due_at = self._again(connection.request)
        if is_open and due_at is not None:
            del self._open[connection.sock.fileno()]
            self._epoll.unregister(connection.sock)
            self.send_at(due_at, connection)
            return
        self._close(connection)
        if due_at is not None:
            self.send_at(due_at)

    def _close(self, connection: "_Connection") -> None:
        del self._open[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.sock.close()


@dataclass(slots=True)
class _Connection:
    """A connection and the request on it."""

    sock: socket.socket
    request: Request
    unsent: bytes = b""
    received: bytes = b""  # the whole of a refusal; the end of a stream
    num_sent: int = 0  # number of requests on this connection

    @property
    def is_stale(self) -> bool:
        """Whether the server closed the connection between two requests. A client then sends the second one again."""
        return self.num_sent > 1 and not self.received

    def restart(self, request: Request, data: bytes) -> None:
        self.request, self.unsent, self.received = request, data, b""
        self.num_sent += 1

    def take(self, data: bytes, now: float) -> bool:
        """Note what came. Return whether the answer is complete."""
        request = self.request
        received = self.received + data
        if not request.status and len(received) > 12:
            request.status, request.answered_at = int(received[9:12]), now
        if request.status != 200:
            self.received = received
            return self._take_refusal(now)
        if request.first_token_at is None and FIRST_TOKEN in received:
            request.first_token_at = now
        if END_OF_STREAM in received[-2 * TAIL :] and received.endswith(END_OF_CHUNKS):
            request.ended_at = now
            return True
        self.received = received[-TAIL:]
        return False

    def _take_refusal(self, now: float) -> bool:
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = CONTENT_LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return False
        retry = RETRY_AFTER_MS.search(head)
        self.request.retry_after_s = int(retry[1]) / 1000 if retry else 0.0
        self.request.ended_at = now
        return True
