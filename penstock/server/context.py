"""The tools of every route: the app's state, the request's log and body, JSON answers, and the app's reports of itself.

Each app has its own ServerContext, which is reached through the request (`context_of`), never through a global. Each
app also has its own metrics registry, so that two servers in one process do not share counts. The metrics at /metrics
and the load at /status are made from the fields of EngineStats, each of which says under which names it is reported.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.engine_client import EngineClient, EngineState, EngineStatus
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.messages import EngineStats, ModelInfo
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.timeline import IntervalKind
from penstock.server.api_errors import ApiError, not_found, unavailable
from penstock.server.kept_calls import KeptCalls, Source
from penstock.server.keys import Account, KeyRing
from penstock.server.openai_requests import Body, parse, to_request
from penstock.server.options import ServerOptions
from penstock.server.timelines import CallTimeline, RequestLog, TimelineTable, label_text
from penstock.tokenizer.tokenizer import Tokenizer

SourceOf = Callable[..., Source]


@dataclass(slots=True)
class ServerContext:
    """The state of one app.

    Attributes:
        draining: set once, when the server stops accepting requests.
        kept: the calls that outlive their connection.
        mark_tokens: marks looked up so far -> the token id, or None if the mark is not a single token.
        timelines: where the time of the last calls went.
        sources: kind of kept call -> a function of the context, the call and its generation that makes its Source.
        num_arriving: requests that have arrived but are not with the engine yet. Many may arrive in one turn of the
            event loop; if they were not counted, each of them would see the queue as it was before the first.
    """

    client: EngineClient
    options: ServerOptions
    metrics: "Metrics"
    keys: KeyRing
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    kept: KeptCalls = field(default_factory=KeptCalls)
    timelines: TimelineTable = field(default_factory=TimelineTable)
    sources: Mapping[str, SourceOf] = field(default_factory=dict)
    mark_tokens: dict[str, int | None] = field(default_factory=dict)
    num_arriving: int = 0
    tokenizing: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizing = asyncio.Semaphore(self.options.max_parallel_tokenizations)

    def info(self) -> ModelInfo:
        """Find the model. Raise EngineDeadError (503) until the engine has been ready, ApiError (503) if draining."""
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.known_info()

    def known_info(self) -> ModelInfo:
        """Find the model, even while draining. Raise ApiError (503) if the engine could not be built."""
        try:
            return self.client.model_info
        except (InvalidRequestError, ModelLoadError):
            raise unavailable("the engine could not be started") from None

    def arrive(self, log: RequestLog) -> None:
        """Count a request whose body has arrived. Raise EngineOverloadedError or EngineDeadError if it is refused."""
        self.client.check_admission(log.flow, num_arriving=self.num_arriving)
        self.num_arriving += 1
        log.is_arriving = True

    def arrived(self, log: RequestLog) -> None:
        """Stop counting a request: the engine client has it, or it has ended. A second call does nothing."""
        self.num_arriving -= log.is_arriving
        log.is_arriving = False

    def model_names(self) -> Sequence[str]:
        return self.options.served_model_names or (self.known_info().model,)

    def check_model(self, name: str | None) -> str:
        """Choose the model name for the answer. Raise ApiError (404) for a model that is not served."""
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


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def log_of(request: Request) -> RequestLog:
    log: RequestLog = request.state.log
    return log


def account_of(request: Request) -> Account | None:
    """Find the owner of the request's API key; None if the server has no keys."""
    account: Account | None = getattr(request.state, "account", None)
    return account


def within_limits(
    request: Request, params: SamplingParams, num_prompts: int, *, priority: int | None, timeout_s: float | None
) -> SamplingParams:
    """Fit the parameters of a call to the limits of its API key, and note its priority and timeout in the log.

    Raises:
        InvalidRequestError: the call asks for more choices or tokens than the key allows.
    """
    log, account = log_of(request), account_of(request)
    log.timeout_s, log.priority = timeout_s, priority or 0
    if account is None:
        return params
    log.priority = account.allowed_priority(priority)
    return account.limited(params, num_prompts)


def is_administrator(request: Request) -> bool:
    """Check for an administrator's rights; every request has them if the server has no keys."""
    account = account_of(request)
    return account is None or account.rules.admin


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
    if content_type != "application/json":
        shown = ascii(content_type)[:80] if content_type else "none"
        hint = 'send the header "Content-Type: application/json" (curl: -H "Content-Type: application/json")'
        raise ApiError(415, f"Content-Type is {shown}; {hint}", code="unsupported_media_type")
    parsed = parse(await request.body(), kind)
    log_of(request).labels = label_text(parsed)
    return to_request(parsed, kind)


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


# --- metrics ----------------------------------------------------------------------------------------------------------


FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
OF_ALL = ("kv_offload", "spec_decode", "preemptions_total", "bytes_received_total")  # /status: only of all engines


class Metrics:
    """The metrics of one server."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(client))
        self.requests = Counter(
            "penstock_http_requests",
            "HTTP requests by route and status; 499: the client disconnected",
            ("route", "status"),
            registry=self.registry,
        )
        self.key_requests = self._by_key("requests", "Requests of a named API key that were admitted")
        self.key_refusals = self._by_key("refusals", "Requests of a named API key that exceeded one of its limits")
        self.key_tokens = self._by_key("tokens", "Tokens of a named API key", "kind")
        self.outcomes = Counter(
            "penstock_choices", "Finished choices by finish reason", ("finish_reason",), registry=self.registry
        )
        self.first_token = self._histogram(
            "time_to_first_token", "Time from request to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram("inter_token_latency", "Time between two tokens of a stream", TOKEN_BUCKETS)
        self.queue_time = self._histogram("request_queue_time", "Time until the first step", REQUEST_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time", "Time to compute the prompt", REQUEST_BUCKETS)
        self.decode_time = self._histogram("request_decode_time", "Time from first to last token", REQUEST_BUCKETS)
        self.request = self._histogram(
            "e2e_request_latency", "Time from request to the end of the answer", REQUEST_BUCKETS
        )

    def note_timeline(self, call: CallTimeline) -> None:
        """Observe where the time of a call's first choice went."""
        if call.timelines:
            line = call.timelines[0]
            self.queue_time.observe(line.seconds(IntervalKind.QUEUED))
            self.prefill_time.observe(line.seconds(IntervalKind.PREFILL))
            self.decode_time.observe(line.seconds(IntervalKind.DECODE))

    def _by_key(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"penstock_key_{name}", text, ("key", *more), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"penstock_{name}_seconds"
        return Histogram(full_name, f"{text}, in seconds", buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Reads the engines' statistics at each scrape. Counters continue when an engine is replaced."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> Iterable[Metric]:
        return []  # registering the collector must not query the engine

    def collect(self) -> Iterable[Metric]:
        status = self._client.status()
        yield from _of_engines(status.replicas if len(status.replicas) > 1 else (status,))
        aborted = status.num_aborted_total
        yield CounterMetricFamily("penstock_aborted_requests", "Requests whose client disconnected", value=aborted)
        yield GaugeMetricFamily(
            "penstock_journal_tokens", "Tokens in the journal of open requests", value=status.journal_tokens
        )
        pins = CounterMetricFamily("penstock_pinned_prefix_hits", "Requests that found a pinned prefix", labels=["pin"])
        for use in self._client.pinned_prefixes():
            pins.add_metric([use.name or ""], use.hits)
        yield pins
        yield GaugeMetricFamily("penstock_healthy", "1 while an engine makes progress", value=status.making_progress)


def _of_engines(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    """Yield the metrics of each engine. If there are several engines, the label `engine` is the index."""
    labels: list[list[str]] = [[str(index)] for index in range(len(engines))] if len(engines) > 1 else [[]]
    names = ["engine"] if len(engines) > 1 else []

    def metric(family: Family, name: str, text: str, values: Sequence[float]) -> Metric:
        made = family(name, text, labels=names)
        for label, value in zip(labels, values, strict=True):
            made.add_metric(label, value)
        return made

    for item in fields(EngineStats):
        is_counter = item.name.startswith("num_") and item.name.endswith("_total")
        values = [getattr(engine.stats, item.name) for engine in engines]
        for name, text in item.metadata["metrics"].items():
            yield metric(CounterMetricFamily if is_counter else GaugeMetricFamily, name, text, values)
    planned = [sum(engine.planned_memory.values()) for engine in engines]
    yield metric(GaugeMetricFamily, "penstock_planned_memory_bytes", "Memory that the engine may take", planned)
    peaks = [engine.peak_memory_bytes or 0 for engine in engines]
    yield metric(GaugeMetricFamily, "penstock_peak_memory_bytes", "Peak memory of the engine", peaks)
    restarts = [engine.restarts for engine in engines]
    text = "Engine processes restarted after a failure"
    yield metric(CounterMetricFamily, "penstock_engine_restarts", text, restarts)
    name, text = "penstock_spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position"
    by_position = CounterMetricFamily(name, text, labels=[*names, "position"])
    states = GaugeMetricFamily("penstock_engine_state", "1 for the engine's current state", labels=[*names, "state"])
    for label, engine in zip(labels, engines, strict=True):
        for position, count in enumerate(engine.stats.num_accepted_tokens_per_pos_total):
            by_position.add_metric([*label, str(position)], count)
        for state in EngineState:
            states.add_metric([*label, state.value], float(state == engine.state))
    yield by_position
    yield states


# --- /status ----------------------------------------------------------------------------------------------------------


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


def shown_memory(engine: EngineStatus) -> dict[str, Any]:
    return {
        "planned_bytes": sum(engine.planned_memory.values()) or None,
        "peak_bytes": engine.peak_memory_bytes,
        "planned": engine.planned_memory,
    }


def shown_replica(engine: EngineStatus) -> dict[str, Any]:
    """Describe one of several engines for /status."""
    stats = {name: value for name, value in shown_stats(engine.stats).items() if name not in OF_ALL}
    return {**shown_process(engine), "choices": engine.journal_requests, **stats, "memory": shown_memory(engine)}
