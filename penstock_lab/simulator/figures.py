"""Figures of a simulation, counted as it runs. No request is kept, so millions take no more memory than one.

A time is counted in a bucket 0.5 % wide, so percentiles are accurate to 0.25 %. Figures of several replicas add up.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import invalid, shown

WIDTH = math.log1p(0.005)  # width of a bucket, in the logarithm of the time
MIN_SECONDS = 1e-9  # seconds; a shorter time counts as this
PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "e2e")
COUNTS = ("requests", "rejected", "failed", "good", "output_tokens", "prompt_tokens", "cached_tokens", "preemptions",
          "steps", "busy_s")  # fmt: skip
UNITS = {"ms": 1e-3, "s": 1.0}


class Histogram:
    """Times in seconds, in logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[math.floor(math.log(max(seconds, MIN_SECONDS)) / WIDTH)] += count

    def merge(self, other: "Histogram") -> None:
        self._counts.update(other._counts)

    def percentile(self, share: float) -> float | None:
        """Find the time below which `share` percent lie, interpolated as by numpy; None if there are no times."""
        total = self._counts.total()
        if not total:
            return None
        place = share / 100 * (total - 1)
        low, high = self._ranked(math.floor(place)), self._ranked(math.ceil(place))
        return low + (high - low) * (place - math.floor(place))

    def _ranked(self, rank: int) -> float:
        """Find the middle of the bucket that holds the time with this rank, counted from 0."""
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank < 0:
                return math.exp((bucket + 0.5) * WIDTH)
        raise IndexError(rank)


@dataclass(frozen=True, slots=True)
class Goal:
    """One part of a target: `share` percent of the metric's times must not exceed `seconds`."""

    metric: str  # one of METRICS
    share: float
    seconds: float


def parse_target(text: str) -> tuple[Goal, ...]:
    """Parse the goals of a text like ttft_p99=2s,itl_p99=100ms.

    Raises:
        InvalidRequestError: the text is not a list of goals.
    """
    return tuple(_parse_goal(part.strip()) for part in text.split(","))


def _parse_goal(text: str) -> Goal:
    name, _, value = text.partition("=")
    metric, _, share = name.partition("_p")
    unit = "ms" if value.endswith("ms") else value[-1:]
    try:
        goal = Goal(metric, float(share), float(value.removesuffix(unit)) * UNITS[unit])
    except (ValueError, KeyError):
        goal = Goal("", 0.0, 0.0)
    if goal.metric not in METRICS or not (0 < goal.share <= 100 and 0 < goal.seconds < math.inf):
        raise invalid("target", f"{shown(text)} must be like ttft_p99=2s or itl_p50=80ms, of {', '.join(METRICS)}")
    return goal


@dataclass(slots=True)
class RequestTimes:
    """The times of a request while it is open, in seconds.

    Attributes:
        sent_at: when it came to its replica.
        last_at: when its last token came; None before the first.
        gaps, late: the number of gaps between its tokens, and for each goal the number of gaps that are too long.
    """

    sent_at: float
    last_at: float | None = None
    is_good: bool = True
    gaps: int = 0
    late: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Counts of what happened to the replicas of a fleet.

    Attributes:
        most: the largest number at the same time.
        mean: the mean number over the whole time, including those that start.
        added, failures: the number of replicas added, and the number of deaths.
    """

    most: int
    mean: float
    added: int
    failures: int


class Figures:
    """Counts of what has happened.

    Attributes:
        goals: of the target. A request is good if its own first token and end are in time, and the share of its own
            gaps that each goal names.
        request_s: seconds that each request waits besides its steps: for its way to the engine, and for the way back.
        rejected: requests that no replica could ever hold.
        failed: requests that met the deaths of several engines without a token in between.
        fleet: what happened to the replicas; None: all of them were there all the time.
    """

    def __init__(self, goals: tuple[Goal, ...] = (), request_s: float = 0.0) -> None:
        self.goals, self.request_s = goals, request_s
        self._gap_goals = [goal for goal in goals if goal.metric == "itl"]
        self._limits = {
            name: min((goal.seconds for goal in goals if goal.metric == name), default=math.inf)
            for name in ("ttft", "e2e")
        }
        self.times = {name: Histogram() for name in METRICS}
        self.requests = self.rejected = self.failed = self.good = 0
        self.output_tokens = self.prompt_tokens = self.cached_tokens = self.preemptions = self.steps = 0
        self.busy_s = 0.0
        self.fleet: FleetFigures | None = None
        self.began, self.ended = math.inf, 0.0

    def first_token(self, request: RequestTimes, now: float) -> None:
        seconds = now - request.sent_at + self.request_s
        self.times["ttft"].add(seconds)
        request.is_good = seconds <= self._limits["ttft"]
        request.late = [0] * len(self._gap_goals)
        request.last_at = now

    def gap(self, request: RequestTimes, now: float, gaps: Counter[float]) -> None:
        """Note a further token. Its gap goes to `gaps`, because most gaps of a step are equal."""
        seconds = now - (request.last_at or 0.0)
        gaps[seconds] += 1
        request.last_at = now
        request.gaps += 1
        for index, goal in enumerate(self._gap_goals):
            request.late[index] += seconds > goal.seconds

    def more_gaps(self, request: RequestTimes, now: float, gaps: Counter[float]) -> None:
        """Note further tokens of a request, the last of them now. The caller counts the gaps of all requests."""
        request.last_at = now
        request.gaps += gaps.total()
        for index, goal in enumerate(self._gap_goals):
            request.late[index] += sum(count for seconds, count in gaps.items() if seconds > goal.seconds)

    def finish(self, request: RequestTimes, now: float) -> None:
        seconds = now - request.sent_at + self.request_s
        self.times["e2e"].add(seconds)
        self.requests += 1
        pairs = zip(self._gap_goals, request.late, strict=True)
        in_time = all(late <= request.gaps * (1 - goal.share / 100) for goal, late in pairs)
        self.good += request.is_good and in_time and seconds <= self._limits["e2e"]
        self.began, self.ended = min(self.began, request.sent_at), max(self.ended, now + self.request_s)

    def merge(self, other: "Figures") -> None:
        """Add the counts of other replicas."""
        for name, histogram in self.times.items():
            histogram.merge(other.times[name])
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.began, self.ended = min(self.began, other.began), max(self.ended, other.ended)

    def stand_for(self, factor: float) -> None:
        """Multiply all counts by `factor`, as for a sample that stands for the whole."""
        for name in COUNTS:
            setattr(self, name, type(getattr(self, name))(round(factor * getattr(self, name), 6)))

    @property
    def meets_target(self) -> bool:
        """True if the times of all requests together meet every goal, and no request was rejected or failed."""
        found = [(self.times[goal.metric].percentile(goal.share), goal.seconds) for goal in self.goals]
        return not self.rejected and not self.failed and all(value is None or value <= limit for value, limit in found)

    def summary(self, replicas: int) -> dict[str, Any]:
        """Sum up the figures for JSON. Times are in milliseconds, goodput in good requests per second."""
        duration = max(self.ended - self.began, MIN_SECONDS) if self.requests else 0.0
        rate = 1 / duration if duration else 0.0
        num_requests = self.requests + self.rejected + self.failed
        fleet = self.fleet or FleetFigures(replicas, replicas, 0, 0)
        return {
            "requests": self.requests,
            "rejected": self.rejected,
            "failed": self.failed,
            "duration_s": duration,
            "request_throughput": self.requests * rate,
            "output_tokens_per_s": self.output_tokens * rate,
            **{f"{name}_ms": _percentiles(histogram) for name, histogram in self.times.items()},
            "goodput": self.good * rate if self.goals else None,
            "good_fraction": self.good / max(1, num_requests) if self.goals else None,
            "meets_target": self.meets_target if self.goals else None,
            "replicas": fleet.most,
            "mean_replicas": fleet.mean,
            "replicas_added": fleet.added,
            "replica_failures": fleet.failures,
            "utilization": self.busy_s * rate / fleet.mean,
            "prefix_hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "preemptions": self.preemptions,
            "steps": self.steps,
        }


def _percentiles(histogram: Histogram) -> Mapping[str, float | None]:
    found = {f"p{share}": histogram.percentile(share) for share in PERCENTILES}
    return {name: None if value is None else 1000 * value for name, value in found.items()}
