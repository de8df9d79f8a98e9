"""The figures of a measured run: its steps in two phases, its latencies, and fractions of the machine's limits.

A step that computes prompt tokens belongs to prefill, even if it also decodes; every other step belongs to decode.

    bandwidth_fraction         time to read the weights and caches at the memory's bandwidth / time taken
    compute_fraction           time to multiply at the rate of each type / time taken
    python_overhead_fraction   time outside the kernels / time taken
    python_ms_per_step         the same time in milliseconds: p10, p50 and p90 of the steps

The first two cover the settled stretches between probes, each compared with the limits probed at its time (samples.py).
Without limits (reference kernels have none) the fractions are null, and `reason` says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.interface.step import SchedulerOutput
from penstock_lab.bench.machine import MachineLimits
from penstock_lab.bench.profile import DECODE, PREFILL, Step
from penstock_lab.bench.samples import Sample, settled, spread, summary

FRACTIONS = ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction")
OTHER_PROCESSES = "the kernels of other processes are not timed"
NO_LIMITS = "only native kernels (--kernels cpu) are timed and compared with the machine's limits"


class PromptTokens:
    """Counts the prompt tokens that steps compute."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # prompt lengths of the requests that the executor knows

    def note(self, plan: SchedulerOutput) -> int:
        """Return how many prompt tokens a step computes. Called when the step is submitted."""
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

    def add(self, step: Step) -> None:
        self.seconds += step.seconds
        self.kernel_seconds += step.kernel_seconds
        self.step_seconds.append(step.seconds)
        self.python_seconds.append(step.seconds - step.kernel_seconds)
        self.input_tokens += step.input_tokens

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        steps = len(self.step_seconds)
        overhead = None if limits is None else _rate(1000 * (self.seconds - self.kernel_seconds), steps)
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
            "python_ms_per_step": spread([] if limits is None else [1000 * seconds for seconds in self.python_seconds]),
            **self.fractions(limits),
        }

    def fractions(self, limits: MachineLimits | None) -> dict[str, Any]:
        """Return the fractions and, under `stretches`, the spread of the shares of single stretches."""
        if limits is None or not self.samples:
            return {**dict.fromkeys(FRACTIONS), "stretches": None}
        read, compute = fractions_of(self.samples)
        values = (read, compute, 1 - self.kernel_seconds / self.seconds)
        return {**dict(zip(FRACTIONS, values, strict=True)), "stretches": summary(self.samples, limits.best)}


def fractions_of(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the shares of reading and of multiplying that the settled samples reach together."""
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
        """Return the latencies and fractions of the whole run, and the figures of each phase."""
        whole = Phase(self.seconds, sum(phase.kernel_seconds for phase in self.phases.values()))
        whole.samples = [sample for phase in self.phases.values() for sample in phase.samples]
        return {
            "ttft_ms": _percentiles(list(self.first_token.values())),
            "itl_ms": _percentiles(self.gaps),
            **whole.fractions(limits),
            "reason": dict.fromkeys(FRACTIONS, reason) if limits is None else {},
            "machine": None if limits is None else limits.figures(),
            **{name: phase.figures(limits) for name, phase in self.phases.items()},
        }


def _rate(count: float, total: float) -> float | None:
    """Return count / total; None if the total is 0."""
    return count / total if total else None


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Return p50 and p99 in milliseconds, by nearest rank; None if there are no values."""
    ranked, count = sorted(seconds), len(seconds)
    return {f"p{q}": 1000 * ranked[-(-count * q // 100) - 1] if ranked else None for q in (50, 99)}
