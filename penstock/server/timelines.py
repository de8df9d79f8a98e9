"""The log of each request, and the timelines of the last calls, which show where their time went.

They are shown in answers, at /status/requests, in metrics and in traces. A call has one timeline per choice. Each
timeline divides the whole wall time of the call, from the first byte of the request to the last byte of the answer,
into intervals. No text and no tokens are kept. A call that has ended can be sent to an OpenTelemetry collector as
spans.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from penstock.errors import invalid, missing, shown
from penstock.interface.outputs import RequestOutput
from penstock.interface.timeline import Arrivals, Interval, IntervalKind, RequestMetrics, Timeline
from penstock.server.accounts import Lease
from penstock.server.api_errors import ApiError
from penstock.server.client_fields import Ignored

MAX_LABEL = 64  # characters of a label in the log
MAX_LABEL_ITEMS = 6  # items kept of an object or a list, one more than `shown` prints
LABELS = ("user", "metadata", "safety_identifier", "session_id", "request_id", "prompt_cache_key")
MAX_CALLS = 1000
MAX_CHOICES = 16  # timelines are kept for this many choices of a call, the first ones
MAX_KEPT_INTERVALS = 100_000  # in all calls that have ended, about 20 MiB


@dataclass(slots=True)
class RequestLog:
    """The data of one HTTP request for its log line and metrics. The middleware creates it, the routes fill it.

    Attributes:
        request_id: the caller's X-Request-Id or a new one, for the log and the answer's header only.
        labels: the body's labels (`user`, ...), ready to print.
        key: the name of the API key, "" if it has no name.
        priority, timeout_s: the request's priority, and how long it may take.
        adapter: the id of the LoRA adapter that computes it (client/adapters.py); None: the base model.
        traceparent, tracestate: the W3C headers that identify the caller's span.
        timeline: of the call, set when its generation begins.
        error: what the client was told went wrong.
        ignored: the fields of the body that were ignored, by name.
        ttl_s: the body's ttl, which is ignored unless its model is one of several that may sleep.
        is_arriving: whether the request is counted in ServerContext.arriving.
        lease: what the request holds of its key's account; None: it computes nothing.
    """

    request_id: str
    started: float = field(default_factory=time.monotonic)
    labels: str = ""
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None
    adapter: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    timeline: "CallTimeline | None" = None
    error: ApiError | None = None
    ignored: dict[str, Ignored] = field(default_factory=dict)
    ttl_s: float | None = None
    is_arriving: bool = False
    lease: Lease | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def flow(self) -> str | None:
        """The flow under which the request is scheduled: one per named key. None: the request alone."""
        return f"key {self.key}" if self.key else None

    def age_s(self) -> float:
        return time.monotonic() - self.started

    def count(self, *, prompt: int = 0, completion: int = 0) -> None:
        """Count tokens as soon as they are used."""
        self.num_prompt_tokens += prompt
        self.num_completion_tokens += completion
        for kind, number in (("prompt", prompt), ("completion", completion)):
            if number and self.lease is not None:
                self.lease.use(kind, number)

    def tokens(self) -> str:
        """Write the token counts as part of a log line; "" if the request has no prompt tokens."""
        if not self.num_prompt_tokens:
            return ""
        return (
            f"prompt={self.num_prompt_tokens} cached={self.num_cached_tokens} completion={self.num_completion_tokens}"
        )


def error_text(error: ApiError) -> str:
    """Write the code and the field of an error as part of a log line. The field is named as the client spelt it."""
    return f"code={error.code}" + (f" param={_label(error.param)}" if error.param else "")


def label_text(parsed: Any) -> str:
    """Write the labels of a parsed body as part of a log line: printable, short and on one line."""
    given = [(name, parsed[name]) for name in LABELS if name in parsed] if isinstance(parsed, dict) else []
    return " ".join(f"{name}={_label(value)}" for name, value in given if value is not None)


def _label(value: Any) -> str:
    return shown(_first_items(value)).encode("ascii", "backslashreplace").decode()[:MAX_LABEL]


def _first_items(value: Any, depth: int = 2) -> Any:
    """Cut a JSON value to its first items, so that megabytes of labels do not delay other requests."""
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return "..."
    if isinstance(value, list):
        return [_first_items(item, depth - 1) for item in value[:MAX_LABEL_ITEMS]]
    return {key: _first_items(item, depth - 1) for key, item in islice(value.items(), MAX_LABEL_ITEMS)}


Finished = Callable[["CallTimeline"], None]


class TimelineTable:
    """The last calls, including open ones; limited in number and in size.

    Args:
        listeners: called with each call that has ended.
    """

    def __init__(self, listeners: Sequence[Finished] = ()) -> None:
        self.listeners: list[Finished] = list(listeners)
        self._calls: dict[str, CallTimeline] = {}  # by the answer's id, oldest first
        self._num_intervals = 0

    def add(self, call: "CallTimeline") -> None:
        self._drop(self._calls.pop(call.id, None))  # a call from the journal that is computed again
        self._calls[call.id] = call
        self._make_room()

    def finish(self, call: "CallTimeline") -> None:
        """Count a call that has ended, and pass it to the listeners."""
        if self._calls.get(call.id) is call:
            self._num_intervals += call.num_intervals
            self._make_room()
        for listener in self.listeners:
            listener(call)

    def visible_to(self, key: str | None) -> "list[CallTimeline]":
        """List the calls of a key, newest first; None: the calls of all keys."""
        return [call for call in reversed(self._calls.values()) if key is None or call.log.key == key]

    def _make_room(self) -> None:
        while len(self._calls) > MAX_CALLS or (self._num_intervals > MAX_KEPT_INTERVALS and len(self._calls) > 1):
            self._drop(self._calls.pop(next(iter(self._calls))))

    def _drop(self, call: "CallTimeline | None") -> None:
        if call is not None and call.ended is not None:
            self._num_intervals -= call.num_intervals


@dataclass(slots=True)
class CallTimeline:
    """One call. It has ended when both its computation and its connection have ended.

    Attributes:
        arrived_at: when its first byte arrived, in seconds since 1970.
        begun: time.monotonic() when preparing it was finished and the engine client took it over.
        timelines: of its choices, set when it has ended.
        arrivals: of the tokens of its choices, and prompt_lengths, set then too.
    """

    table: TimelineTable
    id: str
    log: RequestLog
    model: str
    num_choices: int = 1
    begun: float = 0.0
    arrived_at: float = 0.0
    ended: float | None = None
    status: int | None = None
    timelines: list[Timeline] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    arrivals: list[Arrivals] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    _latest: dict[int, RequestOutput] = field(default_factory=dict)
    _is_computed: bool = False
    _is_answered: bool = False

    @property
    def num_intervals(self) -> int:
        return sum(len(line.intervals) for line in self.timelines)

    def begin(self, now: float) -> None:
        """Add the call to the table; its prompt is known now."""
        self.begun = now
        self.arrived_at = time.time() - (now - self.log.started)
        self.log.timeline = self
        self.table.add(self)

    def follow(self, index: int, output: RequestOutput) -> None:
        """Keep the newest output of a prompt, which has the timelines of its choices."""
        self._latest[index] = output

    def computed(self) -> None:
        """Record that the engine has nothing more to send."""
        self._is_computed = True
        self._end_if_done()

    def answered(self, status: int) -> None:
        """Record that the connection has ended, with an HTTP status."""
        self.status, self._is_answered = status, True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.ended is None and self._is_computed and self._is_answered:
            now = time.monotonic()
            self.metrics = RequestMetrics.of([line for output in self._latest.values() for line in output.timelines])
            self.timelines = self._divided(now)
            arrivals = [tokens for output in self._latest.values() for tokens in output.arrivals]
            self.arrivals = [tokens for tokens in arrivals if tokens.last is not None]
            self.prompt_lengths = [len(output.prompt_token_ids) for output in self._latest.values()]
            self._count_drafts()
            self.ended = now
            self._latest.clear()
            self.table.finish(self)
            self.arrivals.clear()

    def _count_drafts(self) -> None:
        if self._latest:
            self.num_accepted_tokens = sum(output.num_accepted_tokens for output in self._latest.values())
            self.num_rejected_tokens = sum(output.num_rejected_tokens for output in self._latest.values())

    def _divided(self, at: float) -> list[Timeline]:
        """Make a timeline of each choice that covers the call's time up to `at`."""
        known = [line for _, output in sorted(self._latest.items()) for line in output.timelines]
        lines = known[:MAX_CHOICES] or [Timeline(self.begun)]
        last = max((line.end for line in known if line.state is IntervalKind.DELIVERY), default=at)
        return [self._whole(line, last, at) for line in lines]

    def _whole(self, line: Timeline, last: float, at: float) -> Timeline:
        """Extend a choice's timeline from the request's first byte to `at`. The call's last choice ended at `last`."""
        whole = Timeline(self.log.started, IntervalKind.PREPARING)
        whole.advance(line.start)
        whole.state = IntervalKind.QUEUED
        whole.extend(line.intervals)
        whole.state = line.state
        if line.state is IntervalKind.DELIVERY:
            whole.enter(IntervalKind.OTHERS, line.end)
            whole.enter(IntervalKind.DELIVERY, last)
        whole.advance(at)
        return whole

    def shown(self) -> dict[str, Any]:
        """Describe the call's timelines in JSON: the intervals of each choice up to now, or up to the end."""
        at, lines = self._so_far()
        choices = [
            {"index": index, "largest": _largest(line), "parts": [_part(item, line.start) for item in line.intervals]}
            for index, line in enumerate(lines)
        ]
        return {**self._facts(at), "choices": choices, "choices_left_out": self.num_choices - len(choices)}

    def summary(self) -> dict[str, Any]:
        at, lines = self._so_far()
        return {**self._facts(at), "largest": _largest(lines[0])}

    def _so_far(self) -> tuple[float, list[Timeline]]:
        """Find the time of the call's end, or now, and its timelines up to then."""
        if self.ended is not None:
            return self.ended, self.timelines
        now = time.monotonic()
        return now, self._divided(now)

    def _facts(self, at: float) -> dict[str, Any]:
        log = self.log
        self._count_drafts()
        return {
            "id": self.id,
            "request_id": log.request_id,
            "model": self.model,
            "state": "open" if self.ended is None else "ended",
            "status": self.status,
            "arrived_at": self.arrived_at,
            "wall_s": at - log.started,
            "prompt_tokens": log.num_prompt_tokens,
            "cached_tokens": log.num_cached_tokens,
            "completion_tokens": log.num_completion_tokens,
            "accepted_prediction_tokens": self.num_accepted_tokens,
            "rejected_prediction_tokens": self.num_rejected_tokens,
        }


def _largest(line: Timeline) -> str | None:
    """Find the kind of interval that took the most time."""
    kinds = {interval.kind for interval in line.intervals}
    return max(sorted(kinds), key=line.seconds).value if kinds else None


def _part(interval: Interval, start: float) -> dict[str, Any]:
    """Describe an interval in JSON. Counts that are 0 are left out."""
    part: dict[str, Any] = {
        "kind": interval.kind.value,
        "at_s": interval.start - start,
        "duration_s": interval.duration,
    }
    return part | counts_of(interval)


def counts_of(interval: Interval) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if interval.steps:
        found |= {"steps": interval.steps, "step_s": interval.step_s}
        found["mean_sequences"] = interval.sequences / interval.steps
    return found | {name: value for name in COUNTS if (value := getattr(interval, name))}


COUNTS = (
    "computed_tokens", "generated_tokens", "waiting_before", "running_before", "no_row_s", "no_blocks_s", "merged",
)  # fmt: skip


# --- traces -----------------------------------------------------------------------------------------------------------


EXPORT_TIMEOUT_S = 3.0
MAX_QUEUED_SPANS = 8192
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
LOGGER = logging.getLogger("penstock")


class _Once(logging.Filter):
    """Drops the exporter's log lines, one per failed batch, and logs only the first failure as a server warning."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and not self._said:
            self._said = True
            LOGGER.warning("traces cannot be sent to %s, and are dropped: %s", self._endpoint, record.getMessage())
        return False


class Tracing:
    """Sends the calls that have ended to an OTLP/HTTP collector: a span for each call, and one for each interval.

    A separate thread sends them from a queue of bounded length, so a collector that is slow or down loses spans but
    delays no request. The caller's `traceparent` is the parent.

    Raises InvalidRequestError if the extra `otel` is not installed or the endpoint is not a URL.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise invalid("otlp_traces_endpoint", f"must be an http:// or https:// URL, not {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise invalid("otlp_traces_endpoint", missing("it", "opentelemetry")) from None
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").addFilter(_Once(endpoint))
        name = os.environ.get("OTEL_SERVICE_NAME", "penstock")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()

    def export(self, call: CallTimeline) -> None:
        """Queue the spans of a call that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        to_epoch = time.time() - time.monotonic()
        headers = {"traceparent": call.log.traceparent, "tracestate": call.log.tracestate}
        parent = self._propagator.extract({name: value for name, value in headers.items() if value})
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, _attributes(call), start_time=_ns(call.log.started + to_epoch)
        )
        if call.status is None or call.status >= 400:
            span.set_status(Status(StatusCode.ERROR, f"HTTP status {call.status}"))
        inside = set_span_in_context(span)
        for index, line in enumerate(call.timelines):
            for part in line.intervals:
                about = {"penstock.choice": index} | {
                    f"penstock.{key}": value for key, value in counts_of(part).items()
                }
                child = self._tracer.start_span(
                    part.kind.value, inside, attributes=about, start_time=_ns(part.start + to_epoch)
                )
                child.end(_ns(part.end + to_epoch))
        span.end(_ns((call.ended or call.log.started) + to_epoch))

    def close(self) -> None:
        """Send the queued spans, taking EXPORT_TIMEOUT_S at most."""
        self._provider.shutdown()


def _attributes(call: CallTimeline) -> dict[str, Any]:
    """Collect the attributes that OpenTelemetry defines for generative AI, and latencies under vLLM's names."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if call.id.startswith("cmpl") else "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.id,
        "gen_ai.request.id": call.log.request_id,
        "gen_ai.usage.input_tokens": call.log.num_prompt_tokens,
        "gen_ai.usage.output_tokens": call.log.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.log.num_cached_tokens,
        "gen_ai.latency.e2e": (call.ended or call.log.started) - call.log.started,
    }
    metrics = call.metrics
    if metrics is not None and metrics.time_in_queue is not None:
        found["gen_ai.latency.time_in_queue"] = metrics.time_in_queue
    if metrics is not None and metrics.first_token_time is not None:
        found["gen_ai.latency.time_to_first_token"] = metrics.first_token_time - call.log.started
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
