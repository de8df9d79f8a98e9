"""Layers that every request passes, as plain ASGI.

From the outside in: the boundary (id, log line, unexpected errors), the site check, the key check, the refusal of
requests while the server is overloaded, and the body limits.

No decision depends on a URL built from the Host header.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection
from email.utils import formatdate
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import EngineOverloadedError, PenstockError
from penstock.server.accounts import KeyLimitError, Stock
from penstock.server.api_errors import (
    ANTHROPIC_PATHS,
    OLLAMA_PATHS,
    ApiError,
    ClientGoneError,
    from_exception,
    internal_error,
)
from penstock.server.context import FLOW, ServerContext
from penstock.server.generation import EVENT_STREAM, NDJSON
from penstock.server.keys import KeyRing
from penstock.server.metrics import Metrics
from penstock.server.options import ServerOptions
from penstock.server.page import PAGE_PATHS
from penstock.server.timelines import RequestLog, error_text

HEALTH_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})  # for orchestrators, which know no host name
OPEN_PATHS = HEALTH_PATHS | PAGE_PATHS | {"/docs", "/openapi.json"}  # need no key, and show nothing of this server
QUIET_PATHS = HEALTH_PATHS | PAGE_PATHS | {"/status", "/metrics"}  # polled continuously: logged only when they fail
MAX_REQUEST_ID = 128
HOST = re.compile(r"(?P<name>\[[^]]*\]|[^:]*)(:\d*)?")
FREE_BODY_BYTES = 64 * 1024  # bytes of each body that are not counted against the common budget
KEY_IN_PATH = re.compile(r"(?i)\bsk-|bearer|api[-_]?key")  # of a client that puts its key in the URL: it is not logged
MAX_REFUSAL_LINES = 10  # lines about refused requests in the access log, per second
TOO_MANY = 429
CLIENT_GONE = 499  # never sent, only logged

access_logger = logging.getLogger("penstock.access")
logger = logging.getLogger("penstock.server")


class _SentResponse:
    """A `send` that adds common headers and records the status, whether the response streams and whether it ended."""

    def __init__(self, send: Send, log: RequestLog, path: str) -> None:
        self._send = send
        self._log = log
        self._media = NDJSON if path.startswith(OLLAMA_PATHS) else EVENT_STREAM
        self._names_id = path.startswith(ANTHROPIC_PATHS)  # whose clients look for another header
        self.status: int | None = None
        self.streams = False
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Date"] = formatdate(usegmt=True)
            headers["X-Request-Id"] = self._log.request_id
            if self._names_id:
                headers["Request-Id"] = self._log.request_id
            if self._log.ignored:
                headers["X-Ignored-Fields"] = ", ".join(self._log.ignored)
            headers["X-Content-Type-Options"] = "nosniff"
            self.status = message["status"]
            self.streams = headers.get("content-type") == self._media.decode()
        elif not message.get("more_body", False):
            self.ended = True
        await self._send(message)


class BoundaryMiddleware:
    """The outermost layer: gives the request an id, answers unexpected exceptions and writes the log line."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions, metrics: Metrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        self._refusals = _RefusalLines()
        self._ignored: set[str] = set()  # fields of bodies that were ignored and logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return
        self._strip_root(scope)
        headers = Headers(scope=scope)
        log = RequestLog(visible_request_id(headers.get("x-request-id")))
        log.traceparent, log.tracestate = headers.get("traceparent"), headers.get("tracestate")
        scope.setdefault("state", {})["log"] = log
        sent = _SentResponse(send, log, scope["path"])
        status = CLIENT_GONE
        try:
            await self._app(scope, receive, sent)
            status = sent.status or CLIENT_GONE
        except (ClientGoneError, ClientDisconnect):
            if (abort := scope["state"].get("abort_connection")) is not None:
                abort()  # closes the connection at once and discards the output still buffered for the client
        except Exception:
            status = 500
            logger.exception("%s %s failed", scope["method"], ascii(scope["path"])[:200])
            await _report_failure(sent, scope, receive)
        finally:
            self._record(scope, status, log)

    def _strip_root(self, scope: Scope) -> None:
        """Take the prefix out of the path that a proxy has left there, before any decision depends on the path."""
        root, path = self._options.root_path, scope["path"]
        if root and f"{path}/".startswith(f"{root}/"):
            scope["path"] = path[len(root) :] or "/"

    def _record(self, scope: Scope, status: int, log: RequestLog) -> None:
        refused_early = scope["path"] if scope["path"] in GENERATING_PATHS else "other"
        route = getattr(scope.get("route"), "path", refused_early)
        self._metrics.requests.labels(route, str(status)).inc()
        for name in log.ignored.keys() - self._ignored:
            self._ignored.add(name)
            text = "requests have the field %s, which is ignored: it says %s (sent by %s); --unknown-fields refuse"
            logger.warning(text, name, log.ignored[name].about, log.ignored[name].clients)
        if log.error is not None:
            self._metrics.errors.labels(log.error.code or str(log.error.status)).inc()
        if log.timeline is not None:
            log.timeline.answered(status)
        if not self._options.access_log or (status == TOO_MANY and not self._refusals.may_write()):
            return
        shown = "..." if KEY_IN_PATH.search(scope["path"]) else ascii(scope["path"])[1:-1][:200]
        parts = [scope["method"], shown, str(status), f"{log.age_s() * 1000:.0f}ms"]
        key = f"key={log.key}" if log.key else ""
        adapter = f"adapter={ascii(log.adapter)[1:-1]}" if log.adapter else ""
        error = error_text(log.error) if log.error is not None else ""
        parts += [part for part in (error, key, adapter, log.tokens(), log.labels) if part]
        level = logging.DEBUG if status < 400 and scope["path"] in QUIET_PATHS else logging.INFO
        access_logger.log(level, "%s id=%s", " ".join(parts), log.request_id)


class _RefusalLines:
    """Limits the log lines about refusals to a few per second, so that logging does not cost more than refusing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = self._written = self._left_out = 0

    def may_write(self) -> bool:
        """Decide whether another line may be written; log, once a second, how many were left out."""
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                access_logger.info("%d more requests were refused with 429", self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        may = self._written < MAX_REFUSAL_LINES
        self._written += may
        self._left_out += not may
        return may


async def _report_failure(sent: _SentResponse, scope: Scope, receive: Receive) -> None:
    """Report an internal error to the client, unless the response is already complete."""
    if sent.status is None:
        await internal_error().noted(scope).response()(scope, receive, sent)
    elif not sent.ended:
        body = internal_error().noted(scope).event if sent.streams else b""
        await sent({"type": "http.response.body", "body": body, "more_body": False})


def visible_request_id(given: str | None) -> str:
    """Cut the caller's id to MAX_REQUEST_ID characters if it is visible ASCII, or else make a new id."""
    cut = (given or "")[:MAX_REQUEST_ID]
    return cut if cut and all("!" <= char <= "~" for char in cut) else uuid4().hex


class SiteMiddleware:
    """Answers 403 to requests from pages of other web sites, made in the browser of a user who can reach the server.

    Such a site may point its own host name at this machine (DNS rebinding), and then read the answers as its own. So
    the Host header must be a name in `hosts`, and an Origin header must be the same site or one of `origins`.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None if scope["path"] in HEALTH_PATHS else self._problem(Headers(scope=scope))
        if problem is None:
            return await self._app(scope, receive, send)
        await ApiError(403, problem, code="site_not_allowed").noted(scope).response()(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        host = headers.get("host", "").lower()
        split = HOST.fullmatch(host)
        name = host if split is None else split["name"]
        if name not in self._hosts:
            shown = ascii(name)[:100]
            return f"The host {shown} is not allowed; start the server with --allowed-host {shown}."
        origin = headers.get("origin")
        if origin is None or origin in self._origins or origin.partition("://")[2].lower() == host:
            return None
        return f"The origin {ascii(origin)[:100]} is not allowed; start the server with --allowed-origin."


class BodyLimitMiddleware:
    """Answers 413 for a body that is too long, with or without Content-Length, and 408 for one that is too slow.

    The bodies of all open requests share a stock, of which no key may hold more than is left for the others; a request
    beyond that gets 503. The HTTP server drops the rest of a refused body.
    """

    def __init__(self, app: ASGIApp, *, options: ServerOptions) -> None:
        self._app = app
        self.max_bytes = options.max_body_bytes
        self.timeout_s = options.receive_timeout_s
        self._stock = Stock(options.max_inflight_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 18 or int(length) > self.max_bytes:
            return await self.too_large().noted(scope).response()(scope, receive, send)
        log: RequestLog = scope["state"]["log"]
        body = _LimitedBody(receive, self, log.key)
        try:
            await self._app(scope, body, send)
        finally:
            self._stock.take(log.key, -body.charged)

    def charge(self, owner: str, num_bytes: int) -> None:
        """Take bytes from the common stock; they are returned when the request ends."""
        if num_bytes and not self._stock.has(owner, num_bytes):
            message = "The server has too many large requests at the moment; try again later."
            raise ApiError(503, message, code="server_busy", headers={"Retry-After": "1"})
        self._stock.take(owner, num_bytes)

    def too_large(self) -> ApiError:
        return ApiError(413, f"The request body is larger than {self.max_bytes} bytes.", code="request_too_large")


class _LimitedBody:
    """A `receive` that applies the limits until the body is complete, and then passes every message on."""

    def __init__(self, receive: Receive, limits: BodyLimitMiddleware, owner: str) -> None:
        self._receive = receive
        self._limits = limits
        self._owner = owner
        self._size = 0
        self.charged = 0  # bytes taken from the stock
        self._deadline: float | None = None
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
        self._size += len(message.get("body", b""))
        if self._size > self._limits.max_bytes:
            raise self._limits.too_large()
        more = max(0, self._size - FREE_BODY_BYTES - self.charged)
        self._limits.charge(self._owner, more)
        self.charged += more
        self._complete = not message.get("more_body", False)
        return message


# --- keys -------------------------------------------------------------------------------------------------------------


class KeyMiddleware:
    """Answers 401 unless the request carries a known key, and opens a lease on the key's account.

    The key is a bearer token, or comes in X-Api-Key, as clients of Anthropic's API send it. No other scheme is known: a
    browser would add a Basic password by itself, also to requests of other sites' pages.

    Only a path that is exactly one of OPEN_PATHS needs no key; paths are compared as the router compares them. The
    owner of the key is the request's `state.account`. A POST beyond a limit gets 429; other methods, and
    the POST that cancels, are not limited.
    Without keys, all requests share one account without limits.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        account = self._keys.find(sent_key(Headers(scope=scope)))
        if account is None:
            return await _wrong_key().noted(scope).response()(scope, receive, send)
        log: RequestLog = scope["state"]["log"]
        scope["state"]["account"], log.key = account, account.name
        FLOW.set(log.flow)
        if account.name:
            context: ServerContext = scope["app"].state.context
            await context.begin(log)
        if scope["method"] != "POST" or scope["path"].endswith("/cancel"):  # which must work when a limit is reached
            return await self._app(scope, receive, send)
        try:
            log.lease = account.open()
        except KeyLimitError as exc:
            return await from_exception(exc).noted(scope).response()(scope, receive, send)
        if account.name:
            self._metrics.key_requests.labels(account.name).inc()
        try:
            await self._app(scope, receive, send)
        finally:
            log.lease.release()


def _wrong_key() -> ApiError:
    message = 'The API key is missing or wrong; send it as "Authorization: Bearer KEY" or "X-Api-Key: KEY".'
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def sent_key(headers: Headers) -> bytes:
    """Find the key in the only Authorization header, or else in the only X-Api-Key; b"" if there is none."""
    sent, plain = headers.getlist("authorization"), headers.getlist("x-api-key")
    scheme, _, value = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
    if not sent and len(plain) == 1:
        scheme, value = "bearer", plain[0]
    return value.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


# --- overload ---------------------------------------------------------------------------------------------------------


GENERATING_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/chat", "/api/generate", "/completion", "/infill",
     "/chat"}
)  # fmt: skip


class OverloadMiddleware:
    """Answers 429 to a request for tokens while every request of its flow would be refused, whatever its body.

    Under overload most requests are refused, and each refusal takes processor time from the requests that are served.
    Most of that time goes into the body, the parameters and the prompt, none of which is needed to see that the queue
    is full. The route checks again when the body has arrived. A request that continues a stream is not new, and passes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in GENERATING_PATHS:
            return await self._app(scope, receive, send)
        context: ServerContext = scope["app"].state.context
        log: RequestLog = scope["state"]["log"]
        refusal = None if "last-event-id" in Headers(scope=scope) else _refusal(context, log)
        if refusal is not None:
            return await from_exception(refusal).noted(scope).response()(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            scope["state"].get("context", context).arrived(log)


def _refusal(context: ServerContext, log: RequestLog) -> EngineOverloadedError | None:
    refusal = None
    for one in context.all:  # the body says for which
        try:
            one.check_admission(log)
        except EngineOverloadedError as exc:
            refusal = exc
        except PenstockError:  # the route gives a better answer about an engine that is dead or draining
            return None
        else:
            return None
    return refusal
