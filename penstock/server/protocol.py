"""uvicorn's HTTP/1.1 protocol with what it lacks: deadlines for receiving a request, and a cap on its head.

A client that sends its headers, or then its body, too slowly is cut off; a head that is too large gets 431. What the
parser refuses gets OpenAI's error object like everything else. Knows no route.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.server.api_errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
BODY_GRACE = 1.2  # the application answers a slow body with 408 first; this is for when nobody reads it


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `receive_timeout_s` is set on a subclass by `guarded_protocol`."""

    receive_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._begun = False  # the first byte of a request has come, its last has not
        self._in_head = True  # ... or its headers are not complete
        self._refused = False
        super().connection_made(transport)
        self._arm(self.receive_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.parser is None:
            return
        goes_on = self._begun and self._in_head
        super().data_received(data)
        if goes_on and self._begun and self._in_head:  # a whole piece was head; a first piece is counted when complete
            self._head_bytes += len(data)
            self._check_head()
        if self._deadline is None and not self._refused:  # bytes between two requests begin none by themselves
            self._arm(self.receive_timeout_s)

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_bytes = 0
        self._arm(self.receive_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_head()
        if self._refused:
            return
        self._arm(self.receive_timeout_s * BODY_GRACE)
        self.scope["state"]["abort_connection"] = self.transport.abort
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._begun, self._in_head = False, True
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._refused:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """For what the parser refuses."""
        self._refuse(ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _check_head(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            message = f"The request head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers."
            self._refuse(ApiError(431, message, code="request_head_too_large"))

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
        self.transport.close()

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
            self.transport.close()
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


def guarded_protocol(receive_timeout_s: float) -> type[GuardedProtocol]:
    """The protocol class with this deadline; uvicorn makes the objects, so the value travels on the class."""
    attributes: dict[str, Any] = {"receive_timeout_s": receive_timeout_s}
    return type("GuardedProtocol", (GuardedProtocol,), attributes)
