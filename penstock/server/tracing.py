"""Timelines as OpenTelemetry traces: a span for each call, and one for each interval of its choices.

The spans of a call are made from its timeline when it has ended. A separate thread sends them from a queue of bounded
length, so a collector that is slow or down loses spans but delays no request. The caller's `traceparent` is the parent.
"""

import logging
import os
import time
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.server.timelines import CallTimeline, counts_of

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
    """Sends the calls that have ended to an OTLP/HTTP collector.

    Raises InvalidRequestError if the extra `otel` is not installed or the endpoint is not a URL.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            message = f"otlp_traces_endpoint: must be an http:// or https:// URL, not {endpoint!r}"
            raise InvalidRequestError(message, param="otlp_traces_endpoint")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            message = "otlp_traces_endpoint: traces need two more packages: pip install 'penstock[otel]'"
            raise InvalidRequestError(message, param="otlp_traces_endpoint") from None
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
    """Return the attributes that OpenTelemetry defines for generative AI, and latencies under vLLM's names."""
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
