"""Server-sent events: `data:` lines out, a comment while there is silence, an end when nobody reads. Knows no shapes.

The first event is waited for before the status line goes out, so a request that fails at once gets its real status.
What waits longer than the keep-alive interval gets its 200 then, and a later failure comes as `data: {"error": ...}`.
At most one event is held here: while the client does not read, the generation's outputs are not taken either.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.server.api_errors import ApiError, ClientGoneError, from_exception
from penstock.server.disconnect import until_disconnect

Events = AsyncGenerator[msgspec.Struct | None, None]  # None: nothing happened for a while

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = ((b"content-type", CONTENT_TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_END = msgspec.UNSET


def data(body: bytes) -> bytes:
    """One event. JSON has no line breaks, so one `data:` line holds it."""
    return b"data: " + body + b"\n\n"


class EventStream(Response):
    """A response that streams events and cancels their source when the client goes away."""

    def __init__(self, events: Events, *, stall_timeout_s: float) -> None:
        super().__init__()
        self._events = events
        self._stall_timeout_s = stall_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, _END)
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await self._send_all(events, first, send)
            except (PenstockError, ApiError) as exc:
                await self._send(send, data(from_exception(exc).body))
            else:
                await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, events: Events, first: msgspec.Struct | msgspec.UnsetType | None, send: Send) -> None:
        encode = msgspec.json.Encoder().encode
        event = first
        while event is not _END:
            await self._send(send, KEEP_ALIVE if event is None else data(encode(event)))
            event = await anext(events, _END)

    async def _send(self, send: Send, body: bytes) -> None:
        """Hand over one piece; the server makes this wait while the client does not read."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientGoneError("the client stopped reading") from None
