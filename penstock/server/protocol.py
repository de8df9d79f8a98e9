"""uvicorn's HTTP/1.1 protocol, with deadlines for receiving a request and a limit on the size of its head.

A client that sends its headers or its body too slowly is disconnected, and so is a client that does not read its
complete answer. A head that is too large gets 431. Trailers after a chunked body are counted and dropped, so that they
cannot pass for headers. Input that the parser refuses gets OpenAI's error object, like every other failure. This module
knows no routes.

It subclasses a class that uvicorn does not document, because uvicorn's public options cannot express these limits:
Config has no deadline for receiving or for writing, h11_max_incomplete_event_size limits heads for h11 only, and the
application is first called when the head is complete, so no middleware sees a slow or endless head. A separate protocol
in front of uvicorn's would have to parse every byte a second time. The only internals used are the parser's callbacks
and the state of the response (`cycle`); tests/server/test_sockets.py fails if an update of uvicorn changes them.
"""

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.client.turns import Turns
from penstock.server.api_errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_AHEAD = 16  # requests that may wait for the answer before them while the connection is still read
SLICE, MANY_PIECES = 4096, 64  # if the first bytes that arrive together have more pieces of a body, the rest is late
BODY_GRACE = 1.2  # times the receive timeout: the application answers 408 first, unless no route reads the body
FLUSH_CHECKS = 10  # checks per stall timeout of whether the client has read its answer

logger = logging.getLogger("penstock.connection")


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Reject the traceback that uvicorn logs for each task cancelled at shutdown."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


logger.setLevel(logging.ERROR)  # uvicorn logs a warning for each bad request
logger.addFilter(_is_worth_logging)


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        receive_timeout_s: how long the client may take to send its headers, and then again its body.
        stall_timeout_s: how long the client may leave a complete answer unread.
        parsing: its turns parse bodies in very small chunks, which would otherwise hold up everybody else.
        uvicorn: the arguments with which uvicorn constructs its protocols.
    """

    def __init__(self, *, receive_timeout_s: float, stall_timeout_s: float, parsing: Turns, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._parsing = parsing
        self._late: bytearray | None = None  # arrived, and to be parsed slice by slice
        self._parser_task: asyncio.Task[None] | None = None
        self.logger = logger
        self._receive_timeout_s = receive_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # bytes of the head; after it, bytes outside the body since the last piece of body
        self._begun = False  # the first byte of a request has arrived, the last has not
        self._in_head = True  # the request's headers are not complete
        self._saw_body = False
        self._refused = False
        self._num_pieces = 0  # of bodies, in what arrived together
        self._pieces: list[bytes] = []  # of the body, as they arrived together
        self._unanswered: deque[RequestResponseCycle] = deque()  # their requests' heads have arrived; oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since: float | None = self.loop.time()
        self._arm(self._receive_timeout_s)

    @property
    def idle_since(self) -> float | None:
        """When the last answer was complete, or the connection was made; None while a request waits for its answer."""
        return self._idle_since

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._flush is not None:
            self._flush.cancel()
        self._mark_disconnected()  # uvicorn tells only the request that arrived last
        if self._parser_task is not None:
            self._parser_task.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._late is not None:
            self._late += data
            self.transport.pause_reading()
            return
        self._num_pieces = 0
        self._parse(data[:SLICE])
        if self._num_pieces <= MANY_PIECES:
            self._parse(data[SLICE:])
        elif len(data) > SLICE:
            self._late = bytearray(data[SLICE:])
            self.transport.pause_reading()
            self._parser_task = self.loop.create_task(self._parse_late())

    async def _parse_late(self) -> None:
        """Parse what has arrived and arrives meanwhile: one slice of all connections per turn of the event loop."""
        while self._late:
            async with self._parsing.turn(None):
                data = bytes(self._late[:SLICE])
                del self._late[:SLICE]
                self._parse(data)
                await asyncio.sleep(0)
        self._late = None
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if not data or self._refused or self.parser is None:
            return
        before = (self._begun, self._in_head)
        self._saw_body = False
        super().data_received(data)
        self._pass_on()
        # all of `data` was head or trailers; the first piece of a request is counted when its head is complete
        if before[0] and before == (self._begun, self._in_head) and not self._saw_body:
            self._head_bytes += len(data)
            self._check_head()
        if self._deadline is None and not self._refused:  # bytes between two requests do not begin a request
            self._arm(self._receive_timeout_s)

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_bytes = 0
        self._arm(self._receive_timeout_s)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Count a trailer and drop it, so that it cannot pass for a header."""
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
        self._arm(self._receive_timeout_s * BODY_GRACE)
        self.scope["state"]["abort_connection"] = self.transport.abort
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self._idle_since = None
        if len(self._unanswered) <= MAX_AHEAD:  # uvicorn stops reading, and would not notice that the client hangs up
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._saw_body = True
        self._num_pieces += 1
        self._head_bytes = 0
        if not self._refused:
            self._pieces.append(body)

    def _pass_on(self) -> None:
        """Give the pieces of a body to uvicorn at once: for each it copies all that is not read yet."""
        body, self._pieces = b"".join(self._pieces), []
        if body and not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pass_on()
        self._disarm()
        self._begun, self._in_head = False, True
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        if not self._unanswered:
            self._idle_since = self.loop.time()
        self._watch_flush()
        if not self._refused:
            super().on_response_complete()

    def shutdown(self) -> None:
        super().shutdown()
        self._watch_flush()

    def send_400_response(self, msg: str) -> None:
        """Refuse input that the parser cannot read, with OpenAI's error object instead of uvicorn's text."""
        self._refuse(ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _check_head(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            message = f"The request head may have at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers."
            self._refuse(ApiError(431, message, code="request_head_too_large"))

    def _check_framing(self) -> None:
        """Refuse framing that the parser accepts but a proxy in front may interpret differently."""
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
            self._refuse(ApiError(400, "The request must have one Host header.", code="invalid_http"))
        elif version == "1.0" and b"transfer-encoding" in names:
            self._refuse(ApiError(400, "HTTP/1.0 has no Transfer-Encoding.", code="invalid_http"))
        elif version not in ("1.0", "1.1"):  # 0.9 has neither headers nor a status line
            self._refuse(ApiError(400, "The request must be HTTP/1.1 or HTTP/1.0.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Send the error without the application and close; if a response has begun, abort the connection."""
        self._disarm()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if any(cycle.response_started for cycle in self._unanswered):
            self.transport.abort()
            return
        self._mark_disconnected()  # the application may be waiting for a body
        self.transport.write(_raw_response(error))
        self._close()

    def _mark_disconnected(self) -> None:
        """Let every request without a complete answer end as if its client had left."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _close(self) -> None:
        self.transport.close()
        self._watch_flush()

    def _watch_flush(self, checks: int = 0) -> None:
        """Disconnect a client that has not read everything written to it within the stall timeout."""
        if checks == 0 and self._flush is not None:
            return  # an earlier answer is still being watched
        self._flush = None
        if self.transport.get_write_buffer_size() == 0:
            return
        if checks >= FLUSH_CHECKS:
            self.transport.abort()
            return
        self._flush = self.loop.call_later(self._stall_timeout_s / FLUSH_CHECKS, self._watch_flush, checks + 1)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self._answer_is_due():
            self._arm(self._receive_timeout_s)
        elif self._owes_no_answer():
            self._disarm()
            self._close()
        else:
            self._refuse(ApiError(408, "The request did not arrive in time.", code="request_timeout"))

    def _answer_is_due(self) -> bool:
        """Check whether an earlier request still waits for its answer while a pipelined one is arriving."""
        before = self._in_head and self.cycle is not None and not self.cycle.response_complete
        return before or bool(self.pipeline) or self.flow.read_paused

    def _owes_no_answer(self) -> bool:
        """Check that no request has begun, or the one that is arriving has already been answered."""
        return not self._begun or (not self._in_head and self.cycle is not None and self.cycle.response_complete)


def _raw_response(error: ApiError) -> bytes:
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(error.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + error.body
