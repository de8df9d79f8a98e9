"""uvicorn's HTTP/1.1 protocol with what it lacks: deadlines for receiving a request, and a cap on its head.

A client that sends its headers, or then its body, too slowly is cut off, and so is one that does not take an answer
that is complete. A head that is too large gets 431. Trailers after a chunked body are counted and dropped: they are no
headers. What the parser refuses gets OpenAI's error object like everything else. Knows no route.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.api_errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
BODY_GRACE = 1.2  # the application answers a slow body with 408 first; this is for when nobody reads it
FLUSH_LOOKS = 10  # how often an answer on its way is looked at before its client is cut off


class _QuietFilter(logging.Filter):
    """uvicorn warns of each bad request, and prints a traceback for each task that the end of the server cancels."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return record.levelno >= logging.ERROR and not isinstance(error, asyncio.CancelledError)


LOGGER = logging.getLogger("penstock.connection")
LOGGER.setLevel(logging.ERROR)
LOGGER.addFilter(_QuietFilter())


class GuardedProtocol(HttpToolsProtocol):
    """One connection. The two timeouts are set on a subclass by `guarded_protocol`."""

    receive_timeout_s = 30.0
    stall_timeout_s = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = LOGGER
        self._deadline: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of the head; then of what has come, but is no body, since the last piece of the body
        self._begun = False  # the first byte of a request has come, its last has not
        self._in_head = True  # ... or its headers are not complete
        self._saw_body = False
        self._refused = False
        super().connection_made(transport)
        self._arm(self.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._flush is not None:
            self._flush.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        before = (self._begun, self._in_head)
        self._saw_body = False
        super().data_received(data)
        # a whole piece was head, or trailers; a first piece is counted when the head is complete
        if before[0] and before == (self._begun, self._in_head) and not self._saw_body:
            self._head_bytes += len(data)
            self._check_head()
        if self._deadline is None and not self._refused:  # bytes between two requests begin none by themselves
            self._arm(self.receive_timeout_s)

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_bytes = 0
        self._arm(self.receive_timeout_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which nobody reads, and which must not pass for a header."""
        if self._in_head:
            return super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        self._check_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_head()
        self._check_framing()
        self._head_bytes = 0
        if self._refused:
            return
        self._arm(self.receive_timeout_s * BODY_GRACE)
        self.scope["state"]["abort_connection"] = self.transport.abort
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._saw_body = True
        self._head_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._begun, self._in_head = False, True
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._watch_flush()
        if not self._refused:
            super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch_flush()

    def send_400_response(self, msg: str) -> None:
        """For what the parser refuses."""
        self._refuse(ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _check_head(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            message = f"The request head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers."
            self._refuse(ApiError(431, message, code="request_head_too_large"))

    def _check_framing(self) -> None:
        """What the parser lets pass and others on the way may read differently."""
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            self._refuse(ApiError(400, "The request must have one Host header.", code="invalid_http"))
        elif version == "1.0" and b"transfer-encoding" in names:
            self._refuse(ApiError(400, "HTTP/1.0 has no Transfer-Encoding.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close. A response under way is cut off instead."""
        self._disarm()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        if cycle is not None:  # the application may be waiting for the body: it must neither wait on nor answer
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_raw_response(error))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch_flush()

    def _watch_flush(self, looks: int = 0) -> None:
        """Cut the client off when it has not taken all that was written for it in stall_timeout_s."""
        if looks == 0 and self._flush is not None:
            return  # an earlier answer is on its way still
        self._flush = None
        if self.transport.get_write_buffer_size() == 0:
            return
        if looks >= FLUSH_LOOKS:
            self.transport.abort()
            return
        self._flush = self.loop.call_later(self.stall_timeout_s / FLUSH_LOOKS, self._watch_flush, looks + 1)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self._client_waits_for_us():
            self._arm(self.receive_timeout_s)
        elif self._nothing_asked():
            self._disarm()
            self._close()
        else:
            self._refuse(ApiError(408, "The request did not arrive in time.", code="request_timeout"))

    def _client_waits_for_us(self) -> bool:
        """A pipelined request may be half here while the answer to the one before it goes out."""
        before = self._in_head and self.cycle is not None and not self.cycle.response_complete
        return before or bool(self.pipeline) or self.flow.read_paused

    def _nothing_asked(self) -> bool:
        """No byte of a request came, or the rest of one that has its answer already."""
        return not self._begun or (not self._in_head and self.cycle is not None and self.cycle.response_complete)


def _raw_response(error: ApiError) -> bytes:
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(error.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + error.body


def guarded_protocol(receive_timeout_s: float, stall_timeout_s: float) -> type[GuardedProtocol]:
    """The protocol class with these deadlines; uvicorn makes the objects, so the values travel on the class."""
    attributes: dict[str, Any] = {"receive_timeout_s": receive_timeout_s, "stall_timeout_s": stall_timeout_s}
    return type("GuardedProtocol", (GuardedProtocol,), attributes)
