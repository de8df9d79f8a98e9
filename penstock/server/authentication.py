"""The layer that checks the API key, as plain ASGI, and enforces the limits of the key file.

A key is required by default. Only a path that is exactly one of OPEN_PATHS needs no key; paths are compared as the
router compares them.
"""

import base64
import binascii

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import EngineOverloadedError
from penstock.server.api_errors import ApiError, from_exception
from penstock.server.context import Metrics, RequestLog
from penstock.server.keys import Account, KeyRing
from penstock.server.middleware import OPEN_PATHS


class KeyMiddleware:
    """Answers 401 unless the request carries a known key, as a bearer token or, for browsers, as a Basic password.

    The owner of the key is the request's `state.account`. A POST beyond a limit gets 429; other methods are not
    limited.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        sent = Headers(scope=scope).getlist("authorization")
        account = self._keys.find(sent_key(sent[0]) if len(sent) == 1 else b"")
        if account is None:
            return await _wrong_key(scope["path"]).response()(scope, receive, send)
        log: RequestLog = scope["state"]["log"]
        scope["state"]["account"], log.key = account, account.name
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            account.enter()
        except EngineOverloadedError as exc:
            self._metrics.key_refusals.labels(account.name).inc()
            error = from_exception(exc)
            error.code = "rate_limit_exceeded"
            return await error.response()(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._leave(account, log)

    def _leave(self, account: Account, log: RequestLog) -> None:
        account.leave(log.num_prompt_tokens + log.num_completion_tokens)
        if account.name:
            self._metrics.key_requests.labels(account.name).inc()
            self._metrics.key_tokens.labels(account.name, "prompt").inc(log.num_prompt_tokens)
            self._metrics.key_tokens.labels(account.name, "completion").inc(log.num_completion_tokens)


def _wrong_key(path: str) -> ApiError:
    # Basic makes a browser ask its user for the key, which only the web page needs
    challenge = 'Basic realm="penstock: the API key as password"' if path == "/" else "Bearer"
    message = 'The API key is missing or wrong; send it as "Authorization: Bearer KEY".'
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})


def sent_key(header: str) -> bytes:
    """Return the key in an Authorization header, or b"" if it has none."""
    scheme, _, value = header.partition(" ")
    sent = value.strip().encode("latin-1", "replace")
    if scheme.lower() == "bearer":
        return sent
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(sent, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
