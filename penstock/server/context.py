"""What every route needs: the state of the app, the log of the request, its body, and a JSON answer.

One ServerContext belongs to one app and is reached through the request (`context_of`), never through a global.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.engine_client import EngineClient
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.messages import ModelInfo
from penstock.server.api_errors import ApiError, not_found, unavailable
from penstock.server.metrics import Metrics
from penstock.server.openai_requests import Body, label_text, parse, to_request
from penstock.server.options import ServerOptions
from penstock.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters (or ids) above which tokenising leaves the event loop's thread


@dataclass(slots=True)
class ServerContext:
    """The state of one app. `draining` is set once, when the server stops accepting requests."""

    client: EngineClient
    options: ServerOptions
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    tokenizing: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizing = asyncio.Semaphore(self.options.max_parallel_tokenizations)

    def info(self) -> ModelInfo:
        """Return the model; EngineDeadError (503) until the engine has been ready once, 503 too while draining."""
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.known_info()

    def known_info(self) -> ModelInfo:
        """Return the model, also while draining. An engine that could not be built is not the request's fault: 503."""
        try:
            return self.client.model_info
        except (InvalidRequestError, ModelLoadError):
            raise unavailable("the engine could not be started") from None

    def model_names(self) -> Sequence[str]:
        return self.options.served_model_names or (self.known_info().model,)

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer carries; 404 for a model that is not served."""
        names = self.model_names()
        if name is not None and name not in names:
            message = f"The model {ascii(name)[:100]} does not exist; this server has {', '.join(names)}."
            raise not_found(message, "model_not_found", "model")
        return name or names[0]

    def tokenizer(self) -> Tokenizer:
        try:
            return self.client.tokenizer
        except ModelLoadError:
            message = "the model has no tokenizer, so texts cannot be used; send token ids"
            raise InvalidRequestError(message, param="prompt", code="no_tokenizer") from None

    async def encode(self, text: str, *, add_special_tokens: bool, total: int = 0) -> list[int]:
        """Return the ids of a text.

        Long texts, and those of a call with many, are tokenised in a thread, so that other streams go on.

        Args:
            total: characters of all the call's texts.
        """
        encode = self.tokenizer().encode
        if max(len(text), total) <= LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        async with self.tokenizing:
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the ids, decoded in a thread where they are many."""
        decode = self.tokenizer().decode
        if len(ids) <= LONG_TEXT:
            return decode(ids, skip_special_tokens=skip_special_tokens)
        async with self.tokenizing:
            return await asyncio.to_thread(decode, ids, skip_special_tokens=skip_special_tokens)


@dataclass(slots=True)
class RequestLog:
    """What one HTTP request leaves in the log and the metrics. The middleware creates it, the routes fill it.

    Attributes:
        request_id: the caller's X-Request-Id or a new one, for the log and the answer's header only.
        labels: the body's labels (`user`, ...), ready to print.
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    labels: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def age_s(self) -> float:
        return time.monotonic() - self.started

    def tokens(self) -> str:
        """Return the token counts as a piece of a log line; empty where none were counted."""
        if not self.num_prompt_tokens:
            return ""
        return (
            f"prompt={self.num_prompt_tokens} cached={self.num_cached_tokens} completion={self.num_completion_tokens}"
        )


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def log_of(request: Request) -> RequestLog:
    log: RequestLog = request.state.log
    return log


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the JSON body as a `kind` and log its labels; 415 where a header says that it is something else."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {ascii(encoding)[:40]} is not supported; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_encoding")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = ascii(content_type)[:80] if content_type else "none"
        hint = 'send the header "Content-Type: application/json" (curl: -H "Content-Type: application/json")'
        raise ApiError(415, f"Content-Type is {shown}; {hint}", code="unsupported_media_type")
    parsed = parse(await request.body(), kind)
    log_of(request).labels = label_text(parsed)
    return to_request(parsed, kind)


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
