"""The figures of a measured run: its steps in two phases, its latencies, and fractions of the machine's limits.

A step belongs to prefill if it computed prompt tokens, perhaps beside decodes; otherwise to decode.

    bandwidth_fraction         time to read the weights and caches at the memory's bandwidth / time taken
    compute_fraction           time to multiply at the rate of each type / time taken
    python_overhead_fraction   time outside the kernels / time taken

Without limits (reference kernels have none) the fractions are null, and `reason` says why.
"""

from dataclasses import dataclass, field
from typing import Any

from penstock.bench.costs import Work
from penstock.bench.machine import MachineLimits

FRACTIONS = ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction")
NO_LIMITS = "only native kernels (--kernels cpu) are timed and compared with the machine's limits"


@dataclass(slots=True)
class Phase:
    """Time, tokens and work of a kind of steps."""

    seconds: float = 0.0
    kernel_seconds: float = 0.0
    steps: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    work: Work = field(default_factory=Work)

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        overhead = None if limits is None else _rate(1000 * (self.seconds - self.kernel_seconds), self.steps)
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": _rate(self.output_tokens, self.seconds),
            "total_tokens_per_s": _rate(self.input_tokens + self.output_tokens, self.seconds),
            "step_ms": _rate(1000 * self.seconds, self.steps),
            "python_overhead_ms": overhead,
            **self.fractions(limits),
        }

    def fractions(self, limits: MachineLimits | None) -> dict[str, float | None]:
        if limits is None or not self.seconds:
            return dict.fromkeys(FRACTIONS)
        compute_s = sum(count / 1e9 / limits.multiply_gop_s[kind] for kind, count in self.work.operations.items())
        read_s = self.work.read_bytes / 1e9 / limits.read_gb_s
        values = (read_s / self.seconds, compute_s / self.seconds, 1 - self.kernel_seconds / self.seconds)
        return dict(zip(FRACTIONS, values, strict=True))


@dataclass(slots=True)
class Run:
    """The observations of one run; times of tokens are seconds since its start, by request id."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
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

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        """Return the latencies and fractions of the whole run, and the figures of each phase."""
        whole = Phase(self.seconds, self.prefill.kernel_seconds + self.decode.kernel_seconds)
        whole.work.add(self.prefill.work)
        whole.work.add(self.decode.work)
        return {
            "ttft_ms": _percentiles(list(self.first_token.values())),
            "itl_ms": _percentiles(self.gaps),
            **whole.fractions(limits),
            "reason": dict.fromkeys(FRACTIONS, NO_LIMITS) if limits is None else {},
            "machine": None if limits is None else limits.figures(),
            "prefill": self.prefill.figures(limits),
            "decode": self.decode.figures(limits),
        }


def _rate(count: float, total: float) -> float | None:
    """Return count / total; None if the total is 0."""
    return count / total if total else None


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Return p50 and p99 in milliseconds, by nearest rank; None if there are no values."""
    ranked, count = sorted(seconds), len(seconds)
    return {f"p{q}": 1000 * ranked[-(-count * q // 100) - 1] if ranked else None for q in (50, 99)}
