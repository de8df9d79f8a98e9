"""The metrics at /metrics: those of the server, counted here, and those of the engines, read from EngineStats.

Each app has its own registry, so that two servers in one process do not share counts. `exposition` gives every metric
the label model_name and, on request, vLLM's names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.client.engine_client import EngineState, EngineStatus
from penstock.client.model_pool import ServedModel
from penstock.interface.messages import EngineStats
from penstock.interface.timeline import IntervalKind
from penstock.server.timelines import CallTimeline

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
VLLM_NAMES = {  # ours -> vLLM's, where more than the prefix differs
    "penstock_requests_running": "vllm:num_requests_running",
    "penstock_requests_waiting": "vllm:num_requests_waiting",
    "penstock_kv_cache_usage": "vllm:kv_cache_usage_perc",
    "penstock_preemptions": "vllm:num_preemptions",
    "penstock_choices": "vllm:request_success",
}
VLLM_NAMES |= {
    f"penstock_{name}": f"vllm:{name}"
    for name in (
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_prompt_tokens",
        "request_generation_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    )
}
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class ModelMetrics:
    """The metrics of one model of a server, in a registry of their own."""

    def __init__(self, model: ServedModel) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model))
        self.outcomes = Counter(
            "penstock_choices", "Finished choices by finish reason", ("finish_reason",), registry=self.registry
        )
        self.first_token = self._histogram(
            "time_to_first_token", "Time from request to first token", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram("inter_token_latency", "Time between two tokens of a choice", TOKEN_BUCKETS)
        self.time_per_token = self._histogram(
            "request_time_per_output_token", "Mean time between the tokens of a choice", TOKEN_BUCKETS
        )
        self.prompt_tokens = self._lengths("prompt", "Tokens of a prompt")
        self.generation_tokens = self._lengths("generation", "Tokens of a choice")
        self.queue_time = self._histogram("request_queue_time", "Time until the first step", REQUEST_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time", "Time to compute the prompt", REQUEST_BUCKETS)
        self.decode_time = self._histogram("request_decode_time", "Time from first to last token", REQUEST_BUCKETS)
        self.request = self._histogram(
            "e2e_request_latency", "Time from request to the end of the answer", REQUEST_BUCKETS
        )

    def note_timeline(self, call: CallTimeline) -> None:
        """Observe where the time of a call's first choice went, and when the tokens of all its choices came."""
        if call.timelines:
            line = call.timelines[0]
            self.queue_time.observe(line.seconds(IntervalKind.QUEUED))
            self.prefill_time.observe(line.seconds(IntervalKind.PREFILL))
            if line.num_generated:  # an embedding has no tokens
                self.decode_time.observe(line.seconds(IntervalKind.DECODE))
        for length in call.prompt_lengths:
            self.prompt_tokens.observe(length)
        if call.arrivals:
            self.first_token.observe(min(tokens.first for tokens in call.arrivals) - call.log.started)
        for tokens in call.arrivals:
            self.generation_tokens.observe(len(tokens.gaps) + 1)
            for gap in tokens.gaps:
                self.inter_token.observe(gap)
            if tokens.gaps:
                self.time_per_token.observe(sum(tokens.gaps) / len(tokens.gaps))

    def _lengths(self, name: str, text: str) -> Histogram:
        return Histogram(f"penstock_request_{name}_tokens", text, buckets=LENGTH_BUCKETS, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"penstock_{name}_seconds"
        return Histogram(full_name, f"{text}, in seconds", buckets=buckets, registry=self.registry)


class Metrics:
    """The metrics of one server: its own, and those of each of its models."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: ModelMetrics(model) for model in models}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "penstock_http_requests",
            "HTTP requests by route and status; 499: the client disconnected",
            ("route", "status"),
            registry=self.registry,
        )
        self.errors = Counter(
            "penstock_http_errors", "Errors that clients got, by code", ("code",), registry=self.registry
        )
        for code in ("engine_overloaded", "rate_limit_exceeded"):  # from 0 on, so that a first increase is seen
            self.errors.labels(code)
        self.key_requests = self._by_key("requests", "Requests of a named API key that were admitted")
        self.key_refusals = self._by_key("refusals", "Requests of a named API key that exceeded one of its limits")
        self.key_tokens = self._by_key("tokens", "Tokens of a named API key", "kind")
        self.adapter_requests = Counter(
            "penstock_adapter_requests", "Calls computed by a LoRA adapter", ("adapter",), registry=self.registry
        )

    def of(self, model: str | None) -> ModelMetrics:
        """Find the metrics of a model by its name; if there is one model, it has any name."""
        return self._models.get(model) or self._models[None]

    def note_timeline(self, call: CallTimeline) -> None:
        """Observe a call that has ended among those of its model."""
        self.of(call.model).note_timeline(call)

    def note_use(self, key: str, kind: str, amount: int) -> None:
        """Count tokens that a named key has used, or a refusal of one of its requests."""
        (self.key_refusals.labels(key) if kind == "refusal" else self.key_tokens.labels(key, kind)).inc(amount)

    def exposition(self, model: str, names: str, reader: str | None = None) -> bytes:
        """Write the metrics in the Prometheus text format.

        Args:
            model: the label model_name of every metric, if there is one model; otherwise those about a model have it.
            names: with "vllm", it uses vLLM's names, and its labels, for the metrics that it has too.
            reader: the name of a key, which sees neither pins nor the use of other keys; None: everything is shown.
        """
        registry = CollectorRegistry()
        parts = [({"model_name": name or model}, one.registry) for name, one in self._models.items()]
        parts.append(({"model_name": model} if None in self._models else {}, self.registry))
        registry.register(_Shown(parts, VLLM_NAMES if names == "vllm" else {}, reader))
        return generate_latest(registry)

    def _by_key(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"penstock_key_{name}", text, ("key", *more), registry=self.registry)


class _Shown(Collector):
    """The metrics of other registries that a reader may see, with labels, without the times of their making."""

    def __init__(
        self, parts: Sequence[tuple[dict[str, str], CollectorRegistry]], names: Mapping[str, str], reader: str | None
    ) -> None:
        self._parts, self._names, self._reader = parts, names, reader

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}  # several models have the same ones
        for labels, metric in ((labels, metric) for labels, part in self._parts for metric in part.collect()):
            name = self._names.get(metric.name, metric.name)
            shown = families.setdefault(name, Metric(name, metric.documentation, metric.type))
            more = labels | ({} if name == metric.name else {"engine": "0"})
            for sample in metric.samples:
                own = more | sample.labels
                if name == "vllm:request_success":
                    own["finished_reason"] = own.pop("finish_reason")
                if not sample.name.endswith("_created") and self._may_see(sample.labels):
                    shown.add_sample(name + sample.name.removeprefix(metric.name), own, sample.value)
        return families.values()

    def _may_see(self, labels: Mapping[str, str]) -> bool:
        return self._reader is None or ("pin" not in labels and labels.get("key", self._reader) == self._reader)


class _EngineCollector(Collector):
    """Reads the engines' statistics at each scrape. Counters continue when an engine is replaced."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def describe(self) -> Iterable[Metric]:
        return []  # registering the collector must not query the engine

    def collect(self) -> Iterable[Metric]:
        status, client = self._model.status(), self._model.loaded
        yield from _of_engines(status.replicas if len(status.replicas) > 1 else (status,))
        aborted = status.num_aborted_total
        yield CounterMetricFamily("penstock_aborted_requests", "Requests whose client disconnected", value=aborted)
        yield GaugeMetricFamily(
            "penstock_journal_tokens", "Tokens in the journal of open requests", value=status.journal_tokens
        )
        yield GaugeMetricFamily(
            "penstock_unread_tokens",
            "Tokens and log-probabilities of streams that wait for their readers",
            value=status.unread_tokens,
        )
        remote = status.remote_prefill
        yield GaugeMetricFamily(
            "penstock_requests_transferring",
            "Prompts that wait for blocks that another server computes or sends",
            value=0 if remote is None else remote.num_transferring,
        )
        pins = CounterMetricFamily("penstock_pinned_prefix_hits", "Requests that found a pinned prefix", labels=["pin"])
        for use in () if client is None else client.pinned_prefixes():
            pins.add_metric([use.name or ""], use.hits)
        yield pins
        yield GaugeMetricFamily("penstock_healthy", "1 while an engine makes progress", value=status.making_progress)
        if self._model.name is not None:  # one of several
            text = "Memory that the model holds of the common budget"
            yield GaugeMetricFamily("penstock_model_memory_bytes", text, value=self._model.held)
            text = "Requests that wait for the model to be loaded"
            yield GaugeMetricFamily("penstock_model_waiting_requests", text, value=self._model.num_waiting)
            text = "How often the model was loaded, or woken up"
            yield CounterMetricFamily("penstock_model_loads", text, value=self._model.num_loads)


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
    used = [1 - engine.stats.kv_blocks_free / max(1, engine.stats.kv_blocks_total) for engine in engines]
    text = "Blocks of the key/value cache in use, of all of them; 1 means all"
    yield metric(GaugeMetricFamily, "penstock_kv_cache_usage", text, used)
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
    local = [engine.pid if engine.peak_memory_bytes else None for engine in engines]  # the others are elsewhere
    yield from _of_processes([dict(zip(names, label, strict=True)) for label in labels], local)


def _of_processes(labels: Sequence[dict[str, str]], pids: Sequence[int | None]) -> Iterable[Metric]:
    """Make the metrics of ProcessCollector for engine processes of this machine."""
    found: dict[str, Metric] = {}
    for label, pid in zip(labels, pids, strict=True):
        if pid is None:
            continue
        for metric in ProcessCollector("penstock_engine", partial(int, pid), registry=None).collect():
            kept = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                kept.add_sample(sample.name, label, sample.value)
    return found.values()
