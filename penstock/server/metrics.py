"""The metrics of /metrics: counters and histograms that the routes fill, and the engine's own, read at each scrape.

Every app has its own registry, so that two servers in one process do not share counts.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.client.engine_client import EngineClient, EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# name, help, attribute of EngineStats
GAUGES = (
    ("penstock_requests_running", "Sequences in the current batch", "num_running"),
    ("penstock_requests_waiting", "Sequences waiting for their first step or for blocks", "num_waiting"),
    ("penstock_kv_blocks", "Blocks of the key/value cache", "kv_blocks_total"),
    ("penstock_kv_blocks_free", "Free blocks, including those with cached content", "kv_blocks_free"),
    ("penstock_kv_blocks_cached", "Free blocks with cached content", "kv_blocks_cached"),
)
COUNTERS = (
    ("penstock_steps", "Steps of the engine", "num_steps_total"),
    ("penstock_failed_steps", "Steps that failed", "num_failed_steps_total"),
    ("penstock_prompt_tokens", "Prompt tokens received", "num_prompt_tokens_total"),
    ("penstock_cached_tokens", "Prompt tokens found in the cache", "num_cached_tokens_total"),
    ("penstock_generation_tokens", "Tokens generated", "num_generated_tokens_total"),
    ("penstock_preemptions", "Sequences preempted for lack of blocks", "num_preemptions_total"),
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
        self.outcomes = Counter(
            "penstock_choices", "Finished choices by finish reason", ("finish_reason",), registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token", "From request to first token", FIRST_TOKEN_BUCKETS)
        self.inter_token = self._histogram("inter_token_latency", "Between two tokens of a stream", TOKEN_BUCKETS)
        self.request = self._histogram("e2e_request_latency", "From request to the end of the answer", REQUEST_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"penstock_{name}_seconds"
        return Histogram(full_name, f"{text}, in seconds", buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's statistics at each scrape. Counters restart at 0 with a new engine, as Prometheus allows."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not ask the engine

    def collect(self) -> Iterable[Metric]:
        status = self._client.status()
        for name, text, attribute in GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(status.stats, attribute))
        for name, text, attribute in COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(status.stats, attribute))
        yield CounterMetricFamily(
            "penstock_engine_restarts", "Engine processes restarted after a failure", value=status.restarts
        )
        aborted = status.num_aborted_total
        yield CounterMetricFamily("penstock_aborted_requests", "Requests whose client disconnected", value=aborted)
        yield GaugeMetricFamily(
            "penstock_journal_tokens", "Tokens in the journal of open requests", value=status.journal_tokens
        )
        states = GaugeMetricFamily("penstock_engine_state", "1 for the engine's current state", labels=["state"])
        for state in EngineState:
            states.add_metric([state.value], float(state == status.state))
        yield states
        yield GaugeMetricFamily("penstock_healthy", "1 while the engine makes progress", value=status.making_progress)
