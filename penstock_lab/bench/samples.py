"""Samples of work, each with the machine's limits at the same time. No torch.

The speed of a shared machine changes within seconds, by a factor of two and more. So the limits are probed right before
and right after every sample, and the sample's share is taken against the mean of the two:

    share of reading = time to read the sample's bytes at the mean rate of its two probes / time taken

One limit binds a sample: of reading and each kind of multiplying, the one that its work needs the most time for. By
that limit the sample is

- *unsettled* if its two probes differ by more than a factor of UNSETTLED, so that the limit in between is unknown.
  Unsettled samples are counted, but left out of medians unless all samples are unsettled;
- *fast* if the mean of its two probes is at least FAST_SHARE of the best rate seen, otherwise *slow*.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNSETTLED = 1.25  # ratio of two neighbouring probes
FAST_SHARE = 0.75  # share of the best rate seen
READ = "read"

Rates = Mapping[str, float]  # READ in GB/s, and the kinds that multiply in 10^9 operations per second


@dataclass(slots=True)
class Work:
    """Bytes read, and operations by the type that multiplies (bench.machine.KINDS)."""

    read_bytes: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Work") -> None:
        self.read_bytes += other.read_bytes
        self.operations.update(other.operations)

    def times(self, rows: int) -> "Work":
        """Multiply by a number of rows. Weights are read once for any number of rows, and not at all for 0."""
        operations = Counter({kind: count * rows for kind, count in self.operations.items()})
        return Work(self.read_bytes if rows else 0, operations)

    def least_seconds(self, rates: Rates) -> dict[str, float]:
        """Compute the time to read the bytes at these rates, and the time of the operations of each kind."""
        multiply = {kind: count / 1e9 / rates[kind] for kind, count in self.operations.items()}
        return {READ: self.read_bytes / 1e9 / rates[READ], **multiply}


@dataclass(frozen=True, slots=True)
class Sample:
    """Work that took `seconds`, between two probes of the limits."""

    seconds: float
    work: Work
    before: Rates
    after: Rates

    @property
    def rates(self) -> dict[str, float]:
        """The mean of the two probes."""
        return {name: (rate + self.after[name]) / 2 for name, rate in self.before.items()}

    @property
    def least_seconds(self) -> dict[str, float]:
        """The time that each part of the work takes at the mean of the two probes."""
        return self.work.least_seconds(self.rates)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the limits of reading and of multiplying."""
        least = self.least_seconds
        return least[READ] / self.seconds, (sum(least.values()) - least[READ]) / self.seconds

    @property
    def bound(self) -> str:
        """The limit that binds the work."""
        least = self.least_seconds
        return max(least, key=lambda name: least[name])

    @property
    def settled(self) -> bool:
        """True if both probes agree about the limit that binds the work."""
        return 1 / UNSETTLED <= self.before[self.bound] / self.after[self.bound] <= UNSETTLED

    def is_fast(self, best: Rates) -> bool:
        """True if the limit that binds the work was near the best rate seen."""
        return self.rates[self.bound] >= FAST_SHARE * best[self.bound]


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Choose the settled samples, or all samples if none is settled."""
    return [sample for sample in samples if sample.settled] or list(samples)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Compute p10, p50 and p90, interpolated; p50 is the median."""
    if not values:
        return {"p10": None, "p50": None, "p90": None}
    ranked = sorted(values)
    return {f"p{percent}": _at(ranked, (len(ranked) - 1) * percent / 100) for percent in (10, 50, 90)}


def _at(ranked: Sequence[float], place: float) -> float:
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def summary(samples: Sequence[Sample], best: Rates) -> dict[str, Any]:
    """Count the samples, and compute their spread, and their median shares in each state of the machine."""
    kept = settled(samples)
    shares = [sample.shares for sample in kept]
    figures: dict[str, Any] = {
        "samples": len(samples),
        "unsettled": sum(not sample.settled for sample in samples),
        "spread": {
            "seconds": spread([sample.seconds for sample in kept]),
            "bw_fraction": spread([read for read, _ in shares]),
            "flop_fraction": spread([multiply for _, multiply in shares]),
        },
    }
    for state, wanted in (("fast", True), ("slow", False)):
        some = [share for sample, share in zip(kept, shares, strict=True) if sample.is_fast(best) is wanted]
        reads, multiplies = zip(*some, strict=True) if some else ((), ())
        figures[state] = {
            "samples": len(some),
            "bw_fraction": spread(reads)["p50"],
            "flop_fraction": spread(multiplies)["p50"],
        }
    return figures
