"""OpenAI's error object, Anthropic's and Ollama's on the routes of their APIs, and the HTTP status of every exception.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
{"type": "error", "error": {"type": ..., "message": ..., "details": {"error_code": ..., "param": ...}}, ...}
{"error": ..., "code": ..., "param": ...}
"""

import asyncio
import math
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from penstock import errors

T = TypeVar("T")
MAX_MESSAGE = 500  # characters of an error message that are sent; the rest is cut off
MAX_PARAM = 100
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_PATHS = "/v1/messages"  # the beginning of the paths of its API
OLLAMA_PATHS = "/api/"
ANTHROPIC_TYPES = {
    **ERROR_TYPES, 403: "permission_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


@dataclass(eq=False)
class ApiError(Exception):
    """A failure as the client sees it.

    Attributes:
        beside: the fields that the body has next to the error object.
        request_id: given if the body is Anthropic's, which has the request's id.
        is_line: whether the body is Ollama's, a line of its own in a stream; otherwise it is OpenAI's.
    """

    status: int
    message: str
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)
    beside: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    request_id: str | None = field(default=None, kw_only=True)
    is_line: bool = field(default=False, kw_only=True)

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        param = self.param and self.param[:MAX_PARAM]
        if self.request_id is not None:
            kind = ANTHROPIC_TYPES.get(self.status, kind)
            details = {"error_code": self.code, "param": param}
            shown = {"type": kind, "message": self.message[:MAX_MESSAGE], "details": details}
            return msgspec.json.encode({"type": "error", "error": shown, "request_id": self.request_id})
        if self.is_line:
            return msgspec.json.encode({"error": self.message[:MAX_MESSAGE], "code": self.code, "param": param})
        error = {"message": self.message[:MAX_MESSAGE], "type": kind, "param": param, "code": self.code}
        return msgspec.json.encode({**self.beside, "error": error})

    def noted(self, scope: Scope) -> "ApiError":
        """Note the error in the request's log, and return it, in the shape of the request's API."""
        log = scope["state"]["log"]
        log.error = self
        if scope["path"].startswith(ANTHROPIC_PATHS):
            self.request_id = log.request_id
        self.is_line = scope["path"].startswith(OLLAMA_PATHS)
        return self

    @property
    def event(self) -> bytes:
        """The error as a server-sent event, of which Anthropic's have names, or as a line."""
        if self.is_line:
            return self.body + b"\n"
        name = b"" if self.request_id is None else b"event: error\n"
        return name + b"data: " + self.body + b"\n\n"  # encoded JSON has no line breaks

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


class ClientGoneError(Exception):
    """The client disconnected or stopped reading; no answer can be sent."""


def not_found(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def unavailable(message: str, **beside: str) -> ApiError:
    """Make a 503: the request is valid, and may succeed later."""
    return ApiError(503, message, code="engine_unavailable", headers={"Retry-After": "1"}, beside=beside)


def internal_error() -> ApiError:
    """Make a 500 without internal details; the log has the traceback."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def from_exception(exc: Exception, path: str = "") -> ApiError:
    """Convert an exception to the error that the client gets. An unexpected exception shows no details. `path` of the
    request matters only if there is no such route."""
    first_line = str(exc).partition("\n")[0]
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, HTTPException):
        return _from_http(exc, path)
    if isinstance(exc, errors.InvalidRequestError):
        return ApiError(400, exc.message, param=exc.param, code=exc.code or "invalid_value")
    if isinstance(exc, errors.EngineOverloadedError):
        seconds = max(exc.retry_after_s, 0.001)
        headers = {"Retry-After": str(math.ceil(seconds)), "Retry-After-Ms": str(math.ceil(seconds * 1000))}
        return ApiError(429, first_line, code=exc.code, headers=headers)
    if isinstance(exc, errors.EngineDeadError):
        return unavailable(first_line or "the engine is not available")
    if isinstance(exc, errors.RequestFailedError):
        return ApiError(500, first_line or "the computation of this request failed", code="request_failed")
    return internal_error()


def _from_http(exc: HTTPException, path: str) -> ApiError:
    if exc.status_code == 404:
        advice = "GET /openapi.json lists the routes"
        if path.startswith("/v1/v1/"):
            advice = "the path has /v1 twice: a client adds what follows its base URL"
        elif not path.startswith("/v1/"):
            advice = "the routes of OpenAI's API begin with /v1, so a client's base URL ends in /v1"
        return not_found(f"There is no such route; {advice}.", "unknown_url")
    if exc.status_code == 405:
        return ApiError(405, "This route does not support that method.", code="method_not_allowed", headers=exc.headers)
    code = HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_")
    return ApiError(exc.status_code, exc.detail, code=code, headers=exc.headers)


async def handle(request: Request, exc: Exception) -> Response:
    """Answer an exception that no route has handled; Starlette calls this."""
    return from_exception(exc, request.scope["path"]).noted(request.scope).response()


# --- a caller who leaves --------------------------------------------------------------------------------------------


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. If the client disconnects, cancel it, wait for its end and raise ClientGoneError.

    Starlette cancels nothing by itself, so a plain handler would run on. The request's body must have been read, so
    that the only message left to receive is the disconnect.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client disconnected")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
        del task, watcher  # an exception refers to this frame, and its task to the exception: a cycle


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
