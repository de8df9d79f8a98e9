"""What an app reports about itself and its engines: the metrics at /metrics, and the load that /status shows.

Both are made from the fields of EngineStats, each of which says under which names it is reported. Knows no routes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.client.engine_client import EngineClient, EngineState, EngineStatus
from penstock.interface.messages import EngineStats
from penstock.interface.timeline import IntervalKind
from penstock.server.timelines import CallTimeline

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
    """Return what /status reports of the stats of one engine, or of all of them."""
    shown: dict[str, Any] = {}
    for item in fields(EngineStats):
        if path := item.metadata["status"]:
            group, _, key = path.rpartition(".")
            (shown.setdefault(group, {}) if group else shown)[key] = getattr(stats, item.name)
    return shown


def shown_process(engine: EngineStatus) -> dict[str, Any]:
    """Return what /status reports about one engine process, or about all of them."""
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
    """Return what /status reports about one of several engines."""
    stats = {name: value for name, value in shown_stats(engine.stats).items() if name not in OF_ALL}
    return {**shown_process(engine), "choices": engine.journal_requests, **stats, "memory": shown_memory(engine)}
