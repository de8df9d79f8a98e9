"""The tools of every route: the app's state, the request's log and body, JSON answers, and the app's reports of itself.

Each app has its own ServerContexts, one for each model, which are reached through the request (`context_of`), never
through a global. The load at /status is made from the fields of EngineStats, each of which says under which name it is
reported.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.adapters import Adapter, content_of
from penstock.client.engine_client import EngineClient, EngineStatus
from penstock.client.input_processor import PromptRequest
from penstock.client.model_pool import ModelPool, ServedModel
from penstock.client.turns import Turns
from penstock.errors import InvalidRequestError, ModelLoadError, PenstockError
from penstock.interface.messages import EngineStats, ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.server.accounts import Account
from penstock.server.api_errors import OLLAMA_PATHS, ApiError, not_found, unavailable, until_disconnect
from penstock.server.client_fields import take_ignored
from penstock.server.kept_calls import KeptCalls, Source
from penstock.server.keys import KeyRing
from penstock.server.metrics import Metrics, ModelMetrics
from penstock.server.openai_requests import Body, parse, to_request
from penstock.server.options import ServerOptions
from penstock.server.timelines import RequestLog, TimelineTable, label_text
from penstock.tokenizer.tokenizer import Tokenizer

LARGE_BODY = 2**18  # bytes
SourceOf = Callable[..., Source]
# The flow of the request that the running task answers, for what it waits for on the way to the engine.
FLOW: ContextVar[str | None] = ContextVar("flow", default=None)


@dataclass(slots=True)
class ServerContext:
    """The state of one app, as requests to one of its models see it. What it says of no model, all of them share.

    Attributes:
        models: all models of the app.
        model: the one that this context is about.
        all: the contexts of all models, in the order of `models`.
        kept: the calls that outlive their connection.
        mark_tokens: marks looked up so far -> the token id, or None if the mark is not a single token.
        takes_several_calls: whether the chat template shows several calls of one message; None: not tried yet.
        timelines: where the time of the last calls went.
        sources: kind of kept call -> a function of the context, the call and its generation that makes its Source.
        arriving: how many requests of each flow have arrived but are not with the engine yet. Many may arrive in one
            turn of the event loop; if they were not counted, each would see the queue as it was before the first.
    """

    models: ModelPool
    model: ServedModel
    options: ServerOptions
    metrics: Metrics
    keys: KeyRing
    kept: KeptCalls
    timelines: TimelineTable
    sources: Mapping[str, SourceOf]
    tokenizing: Turns
    reporting: Turns
    beginning: Turns
    arriving: Counter[str | None]
    created: int
    all: "list[ServerContext]"
    mark_tokens: dict[str, int | None] = field(default_factory=dict)
    takes_several_calls: bool | None = None

    @property
    def client(self) -> EngineClient:
        """The model's engine client. EngineDeadError (503) is raised if it has never been loaded."""
        return self.model.client

    @property
    def model_metrics(self) -> ModelMetrics:
        return self.metrics.of(self.model.name)

    def named(self, name: str | None) -> "ServerContext":
        """Find the context of a model, the first one's for None. Raise ApiError (404) for a model that is not served.

        Until the only model's engine is ready, its name may be unknown, and EngineDeadError (503) is raised.
        """
        for context in self.all:
            if name is None or name in context.own_names() or name in context.model_names():
                return context
        names = ", ".join(name for context in self.all for name in context.model_names())
        message = f"The model {ascii(name)[:100]} does not exist; this server has {names}."
        raise not_found(message, "model_not_found", "model")

    def info(self) -> ModelInfo:
        """Find the model. Raise EngineDeadError (503) until the engine has been ready, ApiError (503) if draining."""
        self.check_open()
        return self.known_info()

    def check_open(self) -> None:
        """Raise ApiError (503) while the server is draining."""
        if self.models.draining:
            raise unavailable("the server is shutting down")

    def known_info(self) -> ModelInfo:
        """Find the model, even while draining. Raise ApiError (503) if the engine could not be built."""
        try:
            return self.client.model_info
        except (InvalidRequestError, ModelLoadError):
            raise unavailable("the engine could not be started") from None

    def info_if_loaded(self) -> ModelInfo | None:
        """Find the model; None for one of several that has not been loaded yet."""
        if self.model.name is None:
            return self.known_info()
        try:
            return self.client.model_info
        except PenstockError:
            return None

    def check_started(self) -> None:
        """Raise what `info` raises if the server has one model, or is draining."""
        self.check_open() if self.model.name is not None else self.info()

    async def begin(self, log: RequestLog) -> None:
        """Wait until a request of a key, or a further prompt of it, may begin: one per turn of the event loop."""
        async with self.beginning.turn(log.flow):
            await asyncio.sleep(0)

    def arrive(self, log: RequestLog) -> None:
        """Count a request whose body has arrived. Raise EngineOverloadedError or EngineDeadError if it is refused."""
        self.check_admission(log)
        self.arriving[log.flow] += 1
        log.is_arriving = True

    def check_admission(self, log: RequestLog) -> None:
        """Do what `arrive` does, without counting it."""
        self.client.check_admission(log.flow, num_arriving=self.arriving[log.flow])

    def arrived(self, log: RequestLog) -> None:
        """Stop counting a request: the engine client has it, or it has ended. A second call does nothing."""
        if log.is_arriving:
            log.is_arriving = False
            self.arriving[log.flow] -= 1
            if not self.arriving[log.flow]:
                del self.arriving[log.flow]

    def model_names(self) -> Sequence[str]:
        """List the names of the model, then those of its adapters."""
        loaded = self.model.adapters if self.model.loaded is None else [one.name for one in self.adapters()]
        return (*self.own_names(), *loaded)

    def own_names(self) -> Sequence[str]:
        """List the names of the model without an adapter."""
        if self.model.name is not None:
            return (self.model.name,)
        return self.options.served_model_names or (self.known_info().model,)

    def adapters(self) -> Sequence[Adapter]:
        """List the adapters of the model, if it has been loaded."""
        return () if self.model.loaded is None else self.model.loaded.adapters()

    def adapter_named(self, name: str | None) -> Adapter | None:
        """Find the adapter that a name of the model stands for; None if it stands for the model itself."""
        if name is None or name in self.own_names():
            return None
        return next((one for one in self.adapters() if one.name == name), None)

    def fingerprint(self, adapter_id: str | None) -> str:
        """Name all that can change a bit of an answer: the engine's fingerprint, with the content of the adapter."""
        own = self.known_info().system_fingerprint
        return own if adapter_id is None else f"{own}-{content_of(adapter_id)}"

    def shown_name(self, name: str | None) -> str:
        """Choose the model name for the answer to a request that names this model, or none."""
        return name or self.own_names()[0]

    def tokenizer(self) -> Tokenizer:
        try:
            return self.client.tokenizer
        except ModelLoadError:
            message = "the model has no tokenizer, so texts cannot be used; send token ids"
            raise InvalidRequestError(message, param="prompt", code="no_tokenizer") from None


def context_of(request: Request) -> ServerContext:
    """Find the context of the model that the request asks for; until `model_of` has found it, of the first model."""
    context: ServerContext = getattr(request.state, "context", request.app.state.context)
    return context


async def model_of(request: Request, name: str | None, timeout_s: float | None = None) -> ServerContext:
    """Find the context of the model that the request names, and wait until the model can compute. It can until the
    request has ended, or the call that outlives its connection.

    Args:
        timeout_s: how long the request may take in all; None: as long as any.

    Raises:
        ApiError: there is no such model (404), it cannot be loaded (503), or was not in time (504).
        EngineOverloadedError: others had to be kept awake for so long that it could not be loaded.
        EngineDeadError: the server is shutting down.
    """
    context = request.state.context = context_of(request).named(name)
    context.check_open()
    lease, models = log_of(request).lease, context.models
    assert lease is not None, "only a POST computes"
    if models.is_usable(context.model):
        await models.use(context.model)
    else:
        await until_disconnect(request.receive, _loaded(context, log_of(request), timeout_s))
    lease.until_end(partial(models.release, context.model))
    if (ttl_s := log_of(request).ttl_s) is not None and not context.model.pinned:
        models.keep(context.model, ttl_s)
        log_of(request).ignored.pop("ttl", None)
    context.named(name)  # raises if an adapter was unloaded meanwhile
    adapter = context.adapter_named(name)
    log_of(request).adapter = None if adapter is None else adapter.id
    return context


async def _loaded(context: ServerContext, log: RequestLog, timeout_s: float | None) -> None:
    limits = [limit for limit in (context.options.request_timeout_s, timeout_s) if limit is not None]
    try:
        async with asyncio.timeout(max(0.0, min(limits) - log.age_s()) if limits else None):
            await context.models.use(context.model)
    except TimeoutError:
        raise ApiError(504, f"The model was not loaded within {min(limits):g} s.", code="request_timeout") from None
    except (InvalidRequestError, ModelLoadError):  # its text may name files, which clients should not see
        raise unavailable(f"the model {context.model.name} cannot be loaded; the server's log says why") from None


def log_of(request: Request) -> RequestLog:
    log: RequestLog = request.state.log
    return log


def account_of(request: Request) -> Account:
    """Find the account of the request's API key; without keys, all requests share one."""
    account: Account = request.state.account
    return account


def within_limits(
    request: Request,
    params: SamplingParams,
    prompts: Sequence[PromptRequest],
    *,
    priority: int | None,
    timeout_s: float | None,
) -> SamplingParams:
    """Fit the parameters of a call to the limits of its API key, and reserve the tokens that it may use.

    Its priority and timeout are noted in the log.

    Raises:
        InvalidRequestError: the call asks for more choices or tokens than the key ever allows.
        KeyLimitError: the key does not have so many tokens now.
    """
    log, account = log_of(request), account_of(request)
    log.timeout_s, log.priority = timeout_s, account.allowed_priority(priority)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    params = account.limited(params, len(prompts), sum(lengths))
    if log.lease is not None:
        log.lease.reserve(most_tokens(params, lengths, context_of(request).known_info().max_model_len))
    return params


def most_tokens(params: SamplingParams, lengths: Sequence[int], max_model_len: int) -> int:
    """Compute how many tokens a call can use at most, with prompts of these lengths."""
    most = max_model_len if params.max_tokens is None else params.max_tokens
    return sum(length + params.n * max(0, min(most, max_model_len - length)) for length in lengths)


def is_administrator(request: Request) -> bool:
    """Check for an administrator's rights; every request has them if the server has no keys."""
    return account_of(request).rules.admin


def check_administrator(request: Request) -> None:
    """Raise ApiError (403) if the request's key is not an administrator's."""
    if not is_administrator(request):
        message = "This route is for administrators: keys with admin = true in the file of API keys, and --api-key."
        raise ApiError(403, message, code="not_administrator")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read the JSON body as a `kind` and log its labels. Raise ApiError (415) if a header says it is not JSON."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"Content-Encoding {ascii(encoding)[:40]} is not supported; send the body uncompressed"
        raise ApiError(415, message, code="unsupported_encoding")
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not _may_leave_type_out(request):
        shown = ascii(content_type)[:80] if content_type else "none"
        hint = 'send the header "Content-Type: application/json" (curl: -H "Content-Type: application/json")'
        raise ApiError(415, f"Content-Type is {shown}; {hint}", code="unsupported_media_type")
    content = await request.body()
    if len(content) > LARGE_BODY:  # in a thread, so that others are served between the steps
        return await asyncio.to_thread(_decoded, request, content, kind)
    return _decoded(request, content, kind)


def _may_leave_type_out(request: Request) -> bool:
    """Check whether a body of Ollama's API may have any Content-Type, as it may there.

    The page of another site can send a form or a text without asking, so no request from a page may: browsers send
    Origin with every POST, and Sec-Fetch-Site with every request to this machine.
    """
    is_from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    return request.scope["path"].startswith(OLLAMA_PATHS) and not is_from_page


def _decoded(request: Request, content: bytes, kind: type[Body]) -> Body:
    parsed, log = parse(content, kind), log_of(request)
    log.labels = label_text(parsed)
    if context_of(request).options.unknown_fields == "warn":
        ttl = parsed.get("ttl") if isinstance(parsed, dict) else None
        log.ignored = take_ignored(parsed, kind.place)
        if "ttl" in log.ignored and isinstance(ttl, int | float) and ttl >= 0:
            log.ttl_s = ttl
    return to_request(parsed, kind)


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


# --- /status ----------------------------------------------------------------------------------------------------------


OF_ALL = ("kv_offload", "spec_decode", "preemptions_total", "bytes_received_total")  # only of all engines


def shown_stats(stats: EngineStats) -> dict[str, Any]:
    """Arrange the stats of one engine, or of all of them, as /status shows them."""
    shown: dict[str, Any] = {}
    for item in fields(EngineStats):
        if path := item.metadata["status"]:
            group, _, key = path.rpartition(".")
            (shown.setdefault(group, {}) if group else shown)[key] = getattr(stats, item.name)
    return shown


def shown_process(engine: EngineStatus) -> dict[str, Any]:
    """Describe one engine process, or all of them, for /status."""
    return {
        "pid": engine.pid,
        "state": engine.state.value,
        "restarts": engine.restarts,
        "heartbeat_age_s": engine.heartbeat_age_s,
        "standby": None if engine.standby is None else asdict(engine.standby),
    }


def shown_adapter(adapter: Adapter) -> dict[str, Any]:
    """Describe an adapter for /status. What is not known before an engine has loaded it is null."""
    info = adapter.info
    size, rank = (None, None) if info is None else (info.num_bytes, info.rank)
    return {"name": adapter.name, "sha256": adapter.sha256, "rank": rank, "bytes": size}


def shown_memory(engine: EngineStatus) -> dict[str, Any]:
    return {
        "planned_bytes": sum(engine.planned_memory.values()) or None,
        "peak_bytes": engine.peak_memory_bytes,
        "planned": engine.planned_memory,
    }


def shown_model(model: ServedModel) -> dict[str, Any]:
    """Describe one of several models for /status."""
    return {
        "state": model.state.value,
        "pinned": model.pinned,
        "memory_bytes": model.held,
        "requests": model.num_uses,
        "waiting": model.num_waiting,
        "loads": model.num_loads,
        "expires_at": model.expires_at,
    }


def shown_replica(engine: EngineStatus) -> dict[str, Any]:
    """Describe one of several engines for /status."""
    stats = {name: value for name, value in shown_stats(engine.stats).items() if name not in OF_ALL}
    return {**shown_process(engine), "choices": engine.journal_requests, **stats, "memory": shown_memory(engine)}
