"""OpenAI's error object, and the status of every exception. Knows every failure, no route.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import (
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
)

MAX_MESSAGE = 500  # characters of an error message that are sent
MAX_PARAM = 100
RETRY_AFTER_DEAD_S = 1
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A failure as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.param = param and param[:MAX_PARAM]
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


class ClientGoneError(Exception):
    """The client disconnected or stopped reading; no answer can be sent."""


def not_found(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def unavailable(message: str) -> ApiError:
    """Return a 503: the request is right, and may succeed later."""
    return ApiError(503, message, code="engine_unavailable", headers={"Retry-After": str(RETRY_AFTER_DEAD_S)})


def internal_error() -> ApiError:
    """Return a 500 that shows nothing of the inside; the log has the traceback."""
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def from_exception(exc: Exception) -> ApiError:
    """Return what the client sees of an exception: of an unexpected one, only that it happened."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, HTTPException):
        return _from_http(exc)
    if isinstance(exc, InvalidRequestError):
        return ApiError(400, exc.message, param=exc.param, code=exc.code or "invalid_value")
    if isinstance(exc, EngineOverloadedError):
        return _overloaded(exc)
    if isinstance(exc, EngineDeadError):
        return unavailable(_first_line(exc) or "the engine is not available")
    if isinstance(exc, RequestFailedError):
        return ApiError(500, _first_line(exc) or "the computation of this request failed", code="request_failed")
    return internal_error()


def _overloaded(exc: EngineOverloadedError) -> ApiError:
    seconds = max(exc.retry_after_s, 0.001)
    headers = {"Retry-After": str(math.ceil(seconds)), "Retry-After-Ms": str(math.ceil(seconds * 1000))}
    return ApiError(429, _first_line(exc), code="engine_overloaded", headers=headers)


def _from_http(exc: HTTPException) -> ApiError:
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = {404: "There is no such route.", 405: "This route does not support that method."}.get(exc.status_code)
    code = codes.get(exc.status_code) or HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_")
    return ApiError(exc.status_code, message or exc.detail, code=code, headers=exc.headers)


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


async def handle(request: Request, exc: Exception) -> Response:
    """Answer an exception for Starlette."""
    return from_exception(exc).response()
