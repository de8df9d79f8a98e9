"""What every route needs: the engine client, the options, the metrics, and the few things that outlive a request.

One ServerContext belongs to one app; it is reached through the request (`context_of`), never through a global.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from penstock.client.engine_client import EngineClient
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.messages import ModelInfo
from penstock.server.api_errors import ApiError, not_found, unavailable
from penstock.server.decoding import Body, decode
from penstock.server.metrics import Metrics
from penstock.server.options import ServerOptions
from penstock.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters (or ids) above which tokenising leaves the event loop's thread


@dataclass(slots=True)
class ServerContext:
    """The state of one app. `draining` is set once, when the server stops taking requests."""

    client: EngineClient
    options: ServerOptions
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    tokenizing: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizing = asyncio.Semaphore(self.options.max_parallel_tokenizations)

    def info(self) -> ModelInfo:
        """The model, or EngineDeadError (503) until the engine has been ready once; 503 too while draining."""
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.known_info()

    def known_info(self) -> ModelInfo:
        """The model, also while draining. An engine that could not be built is nothing the request did wrong."""
        try:
            return self.client.model_info
        except (InvalidRequestError, ModelLoadError):
            raise unavailable("the engine could not be started") from None

    def model_names(self) -> Sequence[str]:
        return self.options.served_model_names or (self.known_info().model,)

    def now(self) -> int:
        """Unix time, for `created`."""
        return int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name the answer carries, or 404 for a model that is not served."""
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
        """Ids of a text; a long one, or one of a call with many, is tokenised in a thread, so that other streams go on.

        Args:
            total: characters of all the call's texts.
        """
        encode = self.tokenizer().encode
        if max(len(text), total) <= LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        async with self.tokenizing:
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        decode = self.tokenizer().decode
        if len(ids) <= LONG_TEXT:
            return decode(ids, skip_special_tokens=skip_special_tokens)
        async with self.tokenizing:
            return await asyncio.to_thread(decode, ids, skip_special_tokens=skip_special_tokens)


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The JSON body as a `kind`. 415 where the request says that its body is something else."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415, f"Content-Encoding {ascii(encoding)[:40]}: only identity is taken", code="unsupported_encoding"
        )
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        shown = ascii(content_type)[:80] if content_type else "none"
        hint = 'send the header "Content-Type: application/json" (curl: -H "Content-Type: application/json")'
        raise ApiError(415, f"Content-Type is {shown}; {hint}", code="unsupported_media_type")
    return decode(await request.body(), kind)
