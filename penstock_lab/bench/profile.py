"""The profile of a run, also as a Chrome trace (chrome://tracing, Perfetto).

For each operation, the profile has its calls, time, work and share of the machine's limits, with prefill and decode
apart. The native library records when each of its calls ran; costs.py knows which operations they were and how much
work they had to do. The rest of a step's time is spent in Python and torch: in the runner between submitting and
collecting a step, otherwise in the engine.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock import EngineError
from penstock_lab.bench.costs import Cost
from penstock_lab.bench.pipeline import StageTime
from penstock_lab.bench.samples import READ, Rates, Sample, Work

PREFILL, DECODE = "prefill", "decode"
ENGINE, RUNNER = "engine (Python)", "runner (Python)"
FIRST_STAGE = 2  # the trace row of a pipeline's first stage; row 1 is the engine
EXPERTS = "experts"  # operation whose work is known only after the call


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
class Step:
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
    steps: list[Step] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)


class Profile:
    """Collects the stretches and steps of a run."""

    def __init__(self, *, shows_operations: bool = True) -> None:
        """shows_operations: whether figures are wanted as well as a trace."""
        self.shows_operations = shows_operations
        self._phases: dict[str, _Phase] = {}
        self._events: list[dict[str, Any]] = []
        self._rows = {1: "engine"}

    def add_step(self, step: Step) -> None:
        self._phases.setdefault(step.phase, _Phase()).steps.append(step)
        _, submit, collect, end = step.edges
        begin = self.add_outline(step)
        self._event("schedule", "engine", begin, submit, {})
        self._event("execute", "engine", submit, collect, {})
        self._event("commit", "engine", collect, end, {})

    def add_outline(self, step: Step) -> float:
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
        """Return {phase: steps, seconds and operations}. Operations are sorted by time, with Python last."""
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
