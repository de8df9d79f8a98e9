"""What every route uses: the app's state and metrics, the request's log, its body, and JSON answers.

Each app has its own ServerContext, which is reached through the request (`context_of`), never through a global. Each
app also has its own metrics registry, so that two servers in one process do not share counts.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from penstock.client.engine_client import EngineClient, EngineState, EngineStatus
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.interface.messages import ModelInfo
from penstock.interface.timeline import IntervalKind
from penstock.server.api_errors import ApiError, not_found, unavailable
from penstock.server.kept_calls import KeptCalls, Source
from penstock.server.keys import Account, KeyRing
from penstock.server.openai_requests import Body, label_text, parse, to_request
from penstock.server.options import ServerOptions
from penstock.server.timelines import CallTimeline, TimelineTable
from penstock.tokenizer.tokenizer import Tokenizer

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# name, help, attribute of EngineStats
GAUGES = (
    ("penstock_requests_running", "Sequences in the current batch", "num_running"),
    ("penstock_requests_waiting", "Sequences waiting for their first step or for blocks", "num_waiting"),
    ("penstock_requests_prefilling", "Running sequences whose prompt is being computed", "num_prefilling"),
    ("penstock_requests_preempted", "Waiting sequences that have run before", "num_preempted"),
    ("penstock_slots", "Sequences that can run at once", "num_slots"),
    ("penstock_kv_blocks", "Blocks of the key/value cache", "kv_blocks_total"),
    ("penstock_kv_blocks_free", "Free blocks, including those with cached content", "kv_blocks_free"),
    ("penstock_kv_blocks_cached", "Free blocks with cached content", "kv_blocks_cached"),
    ("penstock_kv_blocks_pinned", "Blocks that pinned prefixes hold", "kv_blocks_pinned"),
)
COUNTERS = (
    ("penstock_steps", "Steps of the engine", "num_steps_total"),
    ("penstock_failed_steps", "Steps that failed", "num_failed_steps_total"),
    (
        "penstock_rank_bytes_received",
        "Bytes that rank 0 of each stage received from others",
        "num_bytes_received_total",
    ),
    ("penstock_prompt_tokens", "Prompt tokens received", "num_prompt_tokens_total"),
    ("penstock_cached_tokens", "Prompt tokens found in the cache", "num_cached_tokens_total"),
    ("penstock_prefix_cache_queries", "Prompt tokens that were looked up in the cache", "num_prefix_queries_total"),
    ("penstock_prefix_cache_hits", "Prompt tokens found in the cache, as vLLM names it", "num_cached_tokens_total"),
    ("penstock_generation_tokens", "Tokens generated", "num_generated_tokens_total"),
    ("penstock_kv_offload_saved_blocks", "Blocks saved beyond the cache", "num_saved_blocks_total"),
    ("penstock_kv_offload_loaded_blocks", "Blocks loaded back into the cache", "num_loaded_blocks_total"),
    ("penstock_kv_offload_unsaved_blocks", "Blocks that could not be saved", "num_unsaved_blocks_total"),
    (
        "penstock_kv_offload_unreadable_blocks",
        "Block files that were damaged or unreadable",
        "num_unreadable_blocks_total",
    ),
    ("penstock_preemptions", "Sequences preempted for lack of blocks", "num_preemptions_total"),
    ("penstock_spec_decode_num_drafts", "Drafts, counted per sequence and step", "num_drafts_total"),
    ("penstock_spec_decode_num_draft_tokens", "Draft tokens computed", "num_draft_tokens_total"),
    ("penstock_spec_decode_num_accepted_tokens", "Draft tokens accepted", "num_accepted_tokens_total"),
    ("penstock_invalid_frames", "Messages to the engine process that it dropped", "num_invalid_frames_total"),
)


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
        """Return the model. Raise EngineDeadError (503) until the engine has been ready, ApiError (503) if draining."""
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.known_info()

    def known_info(self) -> ModelInfo:
        """Return the model, even while draining. Raise ApiError (503) if the engine could not be built."""
        try:
            return self.client.model_info
        except (InvalidRequestError, ModelLoadError):
            raise unavailable("the engine could not be started") from None

    def arrive(self, log: "RequestLog") -> None:
        """Count a request whose body has arrived. Raise EngineOverloadedError or EngineDeadError if it is refused."""
        self.client.check_admission(log.flow, num_arriving=self.num_arriving)
        self.num_arriving += 1
        log.is_arriving = True

    def arrived(self, log: "RequestLog") -> None:
        """Stop counting a request: the engine client has it, or it has ended. A second call does nothing."""
        self.num_arriving -= log.is_arriving
        log.is_arriving = False

    def model_names(self) -> Sequence[str]:
        return self.options.served_model_names or (self.known_info().model,)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer. Raise ApiError (404) for a model that is not served."""
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


@dataclass(slots=True)
class RequestLog:
    """The data of one HTTP request for its log line and metrics. The middleware creates it, the routes fill it.

    Attributes:
        request_id: the caller's X-Request-Id or a new one, for the log and the answer's header only.
        labels: the body's labels (`user`, ...), ready to print.
        key: the name of the API key, "" if it has no name.
        priority, timeout_s: the request's priority, and how long it may take.
        traceparent, tracestate: the W3C headers that identify the caller's span.
        timeline: of the call, set when its generation begins.
        is_arriving: whether the request is counted in ServerContext.num_arriving.
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    labels: str = ""
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    timeline: CallTimeline | None = None
    is_arriving: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def flow(self) -> str | None:
        """Return the flow under which the request is scheduled: one per named key. None: the request alone."""
        return f"key {self.key}" if self.key else None

    def age_s(self) -> float:
        return time.monotonic() - self.started

    def tokens(self) -> str:
        """Return the token counts as part of a log line, or "" if the request has no prompt tokens."""
        if not self.num_prompt_tokens:
            return ""
        return (
            f"prompt={self.num_prompt_tokens} cached={self.num_cached_tokens} completion={self.num_completion_tokens}"
        )


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
    stats = [engine.stats for engine in engines]
    gauges = [(name, text, [getattr(one, attribute) for one in stats]) for name, text, attribute in GAUGES]
    planned = [sum(engine.planned_memory.values()) for engine in engines]
    peaks = [engine.peak_memory_bytes or 0 for engine in engines]
    gauges.append(("penstock_planned_memory_bytes", "Memory that the engine may take", planned))
    gauges.append(("penstock_peak_memory_bytes", "Peak memory of the engine", peaks))
    counters = [(name, text, [getattr(one, attribute) for one in stats]) for name, text, attribute in COUNTERS]
    restarts = [engine.restarts for engine in engines]
    counters.append(("penstock_engine_restarts", "Engine processes restarted after a failure", restarts))
    for family, found in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, values in found:
            metric = family(name, text, labels=names)
            for label, value in zip(labels, values, strict=True):
                metric.add_metric(label, value)
            yield metric
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


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


def log_of(request: Request) -> RequestLog:
    log: RequestLog = request.state.log
    return log


def account_of(request: Request) -> Account | None:
    """Return the owner of the request's API key; None if the server has no keys."""
    account: Account | None = getattr(request.state, "account", None)
    return account


def is_administrator(request: Request) -> bool:
    """Return whether the request has an administrator's rights; every request has them if the server has no keys."""
    account = account_of(request)
    return account is None or account.rules.admin


def check_administrator(request: Request) -> None:
    """Raise ApiError (403) if the request's key is not an administrator's."""
    if not is_administrator(request):
        message = "This route is for administrators: keys with admin = true in the file of API keys, and --api-key."
        raise ApiError(403, message, code="not_administrator")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Return the JSON body as a `kind` and log its labels. Raise ApiError (415) if a header says it is not JSON."""
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
