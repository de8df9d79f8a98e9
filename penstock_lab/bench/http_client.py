"""An HTTP client that costs little, because it shares the machine with the server that it measures.

It notes the arrival of each part of a response at once, not when a task is next scheduled, and parses the parts only
when the response is whole. General clients spend about as long on a token as a small model does.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from penstock.errors import invalid


@dataclass(slots=True)
class HttpResponse:
    """The response to a request. Times are those of `time.perf_counter`, in seconds."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # arrival time of each part
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class _Connection(asyncio.Protocol):
    """A connection, which carries one request after the other. httptools calls the methods on_*."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = HttpResponse()
        self._done: asyncio.Future[None] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end()

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError):  # AttributeError: data before the first request
            self.close()

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._response.parts.append(body)
        self._response.arrivals.append(self._now)

    def on_message_complete(self) -> None:
        self._response.is_whole = True
        if not self._parser.should_keep_alive():
            self.close()
        self._end()

    async def request(self, data: bytes) -> HttpResponse:
        """Send the bytes of a request and return the response, which is not whole if the connection ends early."""
        self._response = HttpResponse()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(data)
        await self._done
        return self._response

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """Sends requests to one server, with one connection per request under way. Idle connections are reused.

    Args:
        base_url: http:// or https://, a host, optionally a port, and optionally a path before all routes.
        headers: sent with every request.

    Raises:
        InvalidRequestError: base_url is no such URL.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError:
            url, port = urlsplit(""), None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise invalid("base_url", f"{base_url!r} is not a URL like http://127.0.0.1:8000")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._address = url.hostname, port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/")
        named = {"Host": url.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        if any("\r" in text or "\n" in text for item in named.items() for text in item):
            raise invalid("header", "a header is one line")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode()
        self._idle: list[_Connection] = []

    async def request(self, method: str, route: str, body: bytes = b"") -> HttpResponse:
        """Send a request, and wait for its response.

        Raises:
            OSError: the server cannot be reached.
        """
        connection = await self._connect()
        try:
            line = f"{method} {self._path}{route} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
            response = await connection.request(line + self._head + b"\r\n" + body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, *self._address, ssl=self._tls))[1]
