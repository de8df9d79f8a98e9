"""The profile of a run, also as a Chrome trace (chrome://tracing, Perfetto).

For each operation, the profile has its calls, time, work and share of the machine's limits, with prefill and decode
apart. The native library records when each of its calls ran; costs.py knows which operations they were and how much
work they had to do. The rest of a step's time is spent in Python and torch: in the runner between submitting and
collecting a step, otherwise in the engine.

A step that computes prompt tokens belongs to prefill, even if it also decodes; every other step belongs to decode. The
figures of a run (`Run`) are its latencies and those of both phases:

    bandwidth_fraction         time to read the weights and caches at the memory's bandwidth / time taken
    compute_fraction           time to multiply at the rate of each type / time taken
    python_overhead_fraction   time outside the kernels / time taken
    python_ms_per_step         the same time in milliseconds: p10, p50 and p90 of the steps

The first two cover the settled stretches between probes, each compared with the limits probed at its time (samples.py).
The time outside the kernels is known on the CPU only. What is not known is null, and `reason` says why.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock import EngineError
from penstock.interface.step import SchedulerOutput
from penstock_lab.bench.costs import Cost
from penstock_lab.bench.machine import MachineLimits
from penstock_lab.bench.pipeline import StageTime
from penstock_lab.bench.samples import READ, Rates, Sample, Work, settled, spread, summary

PREFILL, DECODE = "prefill", "decode"
ENGINE, RUNNER = "engine (Python)", "runner (Python)"
FIRST_STAGE = 2  # the trace row of a pipeline's first stage; row 1 is the engine
EXPERTS = "experts"  # operation whose work is known only after the call
FRACTIONS = ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction")
OTHER_PROCESSES = "the kernels of other processes are not timed"
NO_LIMITS = "only native kernels (--kernels cpu) are timed; they and GPUs are compared with limits"


class Span(NamedTuple):
    """The time at which a native call ran, in nanoseconds of time.perf_counter_ns."""

    function: str
    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


@dataclass(frozen=True, slots=True)
class Stretch:
    """The calls between two probes, all in steps of one phase.

    Attributes:
        costs: of its native calls, in order.
        experts: work of the experts that its calls chose.
    """

    phase: str
    sample: Sample
    costs: list[Cost]
    experts: Work


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A measured step. The durations leave out the time that measuring took.

    Attributes:
        edges: time.perf_counter when the step began, was submitted, had been collected, and ended.
        seconds: duration of the whole step.
        execution_seconds: between submitting and collecting.
        kernel_seconds: in native calls.
    """

    phase: str
    input_tokens: int
    tokens: int
    edges: tuple[float, float, float, float]
    seconds: float
    execution_seconds: float
    kernel_seconds: float


@dataclass(slots=True)
class Operation:
    """All calls of one operation in one phase, and the minimum time that their work takes at the limits."""

    calls: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
    read_seconds: float = 0.0
    multiply_seconds: float = 0.0

    def add(self, work: Work, rates: Rates) -> None:
        least = work.least_seconds(rates)
        self.work.add(work)
        self.read_seconds += least[READ]
        self.multiply_seconds += sum(least.values()) - least[READ]

    def figures(self, phase_seconds: float) -> dict[str, Any]:
        operations = sum(self.work.operations.values())
        return {
            "calls": self.calls,
            "seconds": self.seconds,
            "share": self.seconds / phase_seconds,
            "read_bytes": self.work.read_bytes,
            "operations": dict(self.work.operations),
            "gb_s": self.work.read_bytes / self.seconds / 1e9 if self.work.read_bytes else None,
            "gop_s": operations / self.seconds / 1e9 if operations else None,
            "bw_fraction": self.read_seconds / self.seconds if self.work.read_bytes else None,
            "flop_fraction": self.multiply_seconds / self.seconds if operations else None,
        }


@dataclass(slots=True)
class _Phase:
    steps: list[ProfiledStep] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)


class Profile:
    """Collects the stretches and steps of a run."""

    def __init__(self, *, shows_operations: bool = True) -> None:
        """shows_operations: whether figures are wanted as well as a trace."""
        self.shows_operations = shows_operations
        self._phases: dict[str, _Phase] = {}
        self._events: list[dict[str, Any]] = []
        self._rows = {1: "engine"}

    def add_step(self, step: ProfiledStep) -> None:
        self._phases.setdefault(step.phase, _Phase()).steps.append(step)
        _, submit, collect, end = step.edges
        begin = self.add_outline(step)
        self._event("schedule", "engine", begin, submit, {})
        self._event("execute", "engine", submit, collect, {})
        self._event("commit", "engine", collect, end, {})

    def add_outline(self, step: ProfiledStep) -> float:
        """Draw a step without its parts. Return when it began."""
        begin, *_, end = step.edges
        self._event(f"{step.phase} step", "step", begin, end, {"tokens": step.tokens})
        return begin

    def add_stretch(self, stretch: Stretch, spans: Sequence[Span]) -> None:
        """Add what ran between two probes. spans: all native calls since the last stretch, including probes.

        Raises:
            EngineError: a call of the stretch has no span.
        """
        operations = self._phases.setdefault(stretch.phase, _Phase()).operations
        rates = stretch.sample.rates
        for cost, span in _matched(stretch.costs, spans):
            operation = operations.setdefault(cost.operation, Operation())
            operation.calls += 1
            operation.seconds += span.seconds
            operation.add(cost.work, rates)
            self._event(cost.operation, "kernel", span.begin / 1e9, span.end / 1e9, _arguments(cost))
        if stretch.experts.read_bytes:
            operations.setdefault(EXPERTS, Operation()).add(stretch.experts, rates)
        for span in spans:
            if span.function.startswith("penstock_limit"):
                self._event("probe of the limits", "probe", span.begin / 1e9, span.end / 1e9, {})
        if spans:
            self._counters(spans[-1].end / 1e9, stretch.sample.after)

    def add_stages(self, spans: Iterable[StageTime]) -> None:
        """Add a trace row for each stage of a pipeline, with a block for each micro-batch."""
        for span in spans:
            self._rows[FIRST_STAGE + span.stage] = f"stage {span.stage}"
            arguments = {"rows": span.num_rows, "tokens": span.num_tokens}
            times = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
            names = {"name": f"step {span.step_id}", "cat": "stage"}
            self._events.append(
                {"ph": "X", "pid": 1, "tid": FIRST_STAGE + span.stage, **names, **times, "args": arguments}
            )

    @property
    def events(self) -> Sequence[dict[str, Any]]:
        """The events in Chrome's trace format."""
        return self._events

    def figures(self) -> dict[str, Any]:
        """List {phase: steps, seconds and operations}. Operations are sorted by time, with Python last."""
        return {name: _phase_figures(phase) for name, phase in self._phases.items() if phase.steps}

    def write_trace(self, path: Path) -> None:
        names = {"ph": "M", "pid": 1, "tid": 1}
        named = [{**names, "name": "process_name", "args": {"name": "penstock bench offline"}}]
        for row, name in sorted(self._rows.items()):
            named.append({**names, "tid": row, "name": "thread_name", "args": {"name": name}})
        events = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        text = json.dumps({"traceEvents": [*named, *events], "displayTimeUnit": "ms"})
        path.write_text(text + "\n", encoding="utf-8")

    def _event(self, name: str, category: str, begin: float, end: float, arguments: dict[str, Any]) -> None:
        times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        self._events.append({"ph": "X", "pid": 1, "tid": 1, "name": name, "cat": category, **times, "args": arguments})

    def _counters(self, at: float, rates: Rates) -> None:
        for name, rate in rates.items():
            title = "limit: reading, GB/s" if name == READ else f"limit: multiplying {name}, 10^9 operations/s"
            self._events.append({"ph": "C", "pid": 1, "tid": 1, "name": title, "ts": at * 1e6, "args": {"rate": rate}})


def _matched(costs: Sequence[Cost], spans: Sequence[Span]) -> Iterator[tuple[Cost, Span]]:
    """Yield each call with its span. Other spans, such as those of probes, are skipped."""
    rest = iter(spans)
    for cost in costs:
        span = next((span for span in rest if span.function == cost.function), None)
        if span is None:
            raise EngineError(f"a call of {cost.function} has no time, so the profile is incomplete")
        yield cost, span


def _arguments(cost: Cost) -> dict[str, Any]:
    return {"read_bytes": cost.work.read_bytes, "operations": dict(cost.work.operations)}


def _phase_figures(phase: _Phase) -> dict[str, Any]:
    seconds = sum(step.seconds for step in phase.steps)
    executing = sum(step.execution_seconds for step in phase.steps)
    kernels = sum(operation.seconds for operation in phase.operations.values())
    ranked = sorted(phase.operations.items(), key=lambda item: -item[1].seconds)
    python = ((RUNNER, executing - kernels), (ENGINE, seconds - executing))
    rows = [{"operation": name, **operation.figures(seconds)} for name, operation in ranked]
    rows += [{"operation": name, **Operation(len(phase.steps), part).figures(seconds)} for name, part in python]
    return {"steps": len(phase.steps), "seconds": seconds, "operations": rows}


class PromptTokens:
    """Counts the prompt tokens that steps compute."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # prompt lengths of the requests that the executor knows

    def note(self, plan: SchedulerOutput) -> int:
        """Count the prompt tokens that a step computes. Called when the step is submitted."""
        for request_id in plan.removed_request_ids:
            self._lengths.pop(request_id, None)
        self._lengths |= {new.request_id: new.num_prompt_tokens for new in plan.new_requests}
        pairs = ((item, self._lengths[item.request_id] - item.num_computed_tokens) for item in plan.scheduled)
        return sum(max(0, min(item.num_new_tokens, left)) for item, left in pairs)


@dataclass(slots=True)
class Phase:
    """The time, tokens and samples of the steps of one phase."""

    seconds: float = 0.0
    kernel_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    python_seconds: list[float] = field(default_factory=list)  # per step, outside the kernels
    input_tokens: int = 0
    output_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)

    def add(self, step: ProfiledStep) -> None:
        self.seconds += step.seconds
        self.kernel_seconds += step.kernel_seconds
        self.step_seconds.append(step.seconds)
        self.python_seconds.append(step.seconds - step.kernel_seconds)
        self.input_tokens += step.input_tokens

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        steps = len(self.step_seconds)
        is_timed = limits is not None and self.kernel_seconds > 0  # the kernels of a GPU are not
        overhead = _rate(1000 * (self.seconds - self.kernel_seconds), steps) if is_timed else None
        return {
            "steps": steps,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": _rate(self.output_tokens, self.seconds),
            "total_tokens_per_s": _rate(self.input_tokens + self.output_tokens, self.seconds),
            "step_ms": _rate(1000 * self.seconds, steps),
            "step_ms_spread": spread([1000 * seconds for seconds in self.step_seconds]),
            "python_overhead_ms": overhead,
            "python_ms_per_step": spread([1000 * seconds for seconds in self.python_seconds] if is_timed else []),
            **self.fractions(limits),
        }

    def fractions(self, limits: MachineLimits | None) -> dict[str, Any]:
        """Compute the fractions and, under `stretches`, the spread of the shares of single stretches."""
        if limits is None or not self.samples:
            return {**dict.fromkeys(FRACTIONS), "stretches": None}
        read, compute = fractions_of(self.samples)
        values = (read, compute, 1 - self.kernel_seconds / self.seconds if self.kernel_seconds else None)
        return {**dict(zip(FRACTIONS, values, strict=True)), "stretches": summary(self.samples, limits.best)}


def fractions_of(samples: Sequence[Sample]) -> tuple[float, float]:
    """Compute the shares of reading and of multiplying that the settled samples reach together."""
    kept = settled(samples)
    taken = sum(sample.seconds for sample in kept)
    reads, multiplies = zip(*(sample.shares for sample in kept), strict=True)
    read = sum(share * sample.seconds for share, sample in zip(reads, kept, strict=True))
    multiply = sum(share * sample.seconds for share, sample in zip(multiplies, kept, strict=True))
    return read / taken, multiply / taken


@dataclass(slots=True)
class Run:
    """The observations of one run. Times of tokens are seconds since its start, by request id."""

    phases: dict[str, Phase] = field(default_factory=lambda: {PREFILL: Phase(), DECODE: Phase()})
    seconds: float = 0.0
    first_token: dict[str, float] = field(default_factory=dict)
    last_token: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # between tokens of the same request

    def add_token(self, request_id: str, at: float) -> None:
        if request_id in self.last_token:
            self.gaps.append(at - self.last_token[request_id])
        else:
            self.first_token[request_id] = at
        self.last_token[request_id] = at

    def figures(self, limits: MachineLimits | None, reason: str = NO_LIMITS) -> dict[str, Any]:
        """Compute the latencies and fractions of the whole run, and the figures of each phase."""
        whole = Phase(self.seconds, sum(phase.kernel_seconds for phase in self.phases.values()))
        whole.samples = [sample for phase in self.phases.values() for sample in phase.samples]
        return {
            "ttft_ms": _percentiles(list(self.first_token.values())),
            "itl_ms": _percentiles(self.gaps),
            **(fractions := whole.fractions(limits)),
            "reason": {name: reason for name in FRACTIONS if fractions[name] is None},
            "machine": None if limits is None else limits.figures(),
            **{name: phase.figures(limits) for name, phase in self.phases.items()},
        }


def _rate(count: float, total: float) -> float | None:
    return count / total if total else None


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Compute p50 and p99 in milliseconds, by nearest rank; None if there are no values."""
    ranked, count = sorted(seconds), len(seconds)
    return {f"p{q}": 1000 * ranked[-(-count * q // 100) - 1] if ranked else None for q in (50, 99)}
