"""Lifecycle: which replicas of a fleet serve, and when, with autoscaling and engines that die.

    off -> starting -> serving -> draining -> off
              ^           |
              +- failing <+

Autoscaling is that of Kubernetes and of Ray Serve. The wanted number of replicas gives each of them
target_ongoing_requests. The fleet grows only to the smallest number wanted during an upscale delay, and shrinks only to
the largest number wanted during a downscale delay. A removed replica finishes its requests. A replica is paid for from
its start to its end, including the time while it starts.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from enum import Enum

from penstock.errors import check_float
from penstock_lab.simulator.figures import FleetFigures

DECISION_INTERVAL_S = 10.0  # seconds between two decisions of the autoscaler
LONGEST_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The conditions under which replicas are added and removed. Names and defaults are those of Ray Serve.

    Attributes:
        max_replicas: largest number; the fleet begins with its smallest number.
        target_ongoing_requests: of a replica, on average; None: the rows of its engine, max_num_seqs.
    """

    max_replicas: int
    target_ongoing_requests: float | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0

    def __post_init__(self) -> None:
        if self.target_ongoing_requests is not None:
            check_float("target_ongoing_requests", self.target_ongoing_requests, 0.001, 1e6)
        check_float("upscale_delay", self.upscale_delay_s, 0.0, LONGEST_S)
        check_float("downscale_delay", self.downscale_delay_s, 0.0, LONGEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The causes that change a fleet.

    Attributes:
        scaling: None: the fleet keeps its size.
        startup_s: from the decision to add a replica until it serves.
        mtbf_s: mean time between the failures of a replica, exponentially distributed; None: it never fails.
        restart_s: from a failure until the replica serves again; None: startup_s.
    """

    scaling: Scaling | None = None
    startup_s: float = 60.0
    mtbf_s: float | None = None
    restart_s: float | None = None

    def __post_init__(self) -> None:
        check_float("startup_time", self.startup_s, 0.0, LONGEST_S)
        if self.mtbf_s is not None:
            check_float("mtbf", self.mtbf_s, 0.001, 1e12)
        if self.restart_s is not None:
            check_float("restart_time", self.restart_s, 0.0, LONGEST_S)

    @property
    def any(self) -> bool:
        return self.scaling is not None or self.mtbf_s is not None


UNCHANGED = Changes()


class Change(Enum):
    """An event in the life of a replica; the value describes it."""

    STARTED = "serves"
    DRAINED = "gets no further requests"
    FAILED = "has died"


class _State(Enum):
    STARTING, SERVING, DRAINING, FAILING = range(4)


class _Autoscaler:
    """Decides how many replicas are wanted, from the numbers wanted during the delays."""

    def __init__(self, scaling: Scaling, fewest: int, max_num_seqs: int) -> None:
        self._scaling = scaling
        self._ongoing = scaling.target_ongoing_requests or max_num_seqs
        self._fewest = fewest
        self._seen: deque[tuple[float, int]] = deque([(0.0, fewest)])

    def wanted(self, now: float, current: int, ongoing: int) -> int:
        """Decide the number of replicas. ongoing: requests on all replicas."""
        scaling = self._scaling
        wanted = math.ceil(ongoing / self._ongoing)
        self._seen.append((now, max(self._fewest, min(wanted, scaling.max_replicas))))
        oldest = now - max(scaling.upscale_delay_s, scaling.downscale_delay_s)
        while self._seen[0][0] < oldest:
            self._seen.popleft()
        up = min(count for at, count in self._seen if at >= now - scaling.upscale_delay_s)
        down = max(count for at, count in self._seen if at >= now - scaling.downscale_delay_s)
        return max(up, min(down, current))


class Lifecycle:
    """The states of all replicas of a fleet, and what happens to them next.

    Args:
        num_replicas: number that serve from the start, and the smallest number at any time.
        changes: what may happen to the replicas.
        max_num_seqs: of a replica.

    Attributes:
        serving: indices of replicas that may get requests.
        next_at: when something happens next.
    """

    def __init__(self, num_replicas: int, changes: Changes = UNCHANGED, max_num_seqs: int = 1, seed: int = 0) -> None:
        self._changes = changes
        self._rng = random.Random(f"failures {seed}")
        scaling = self._changes.scaling
        self._scaler = None if scaling is None else _Autoscaler(scaling, num_replicas, max_num_seqs)
        self._off = list(range(num_replicas, num_replicas if scaling is None else scaling.max_replicas))  # a heap
        self._states: dict[int, _State] = {}
        self._since: dict[int, float] = {}  # when paying for it began
        self._timers: list[tuple[float, int, int]] = []  # time, replica (-1: the autoscaler), number of the timer
        self._timer: dict[int, int] = {}  # number of each replica's current timer; others are out of date
        self._num_timers = self._num_failures = self._num_added = 0
        self._most, self._paid_s = num_replicas, 0.0
        self.serving: set[int] = set()
        for index in range(num_replicas):
            self._since[index] = 0.0
            self._serve(index, 0.0)
        if self._scaler is not None:
            self._set_timer(-1, DECISION_INTERVAL_S)

    @property
    def next_at(self) -> float:
        while self._timers and self._timer.get(self._timers[0][1]) != self._timers[0][2]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf

    def advance(self, now: float, ongoing: int) -> list[tuple[Change, int]]:
        """Let the next change happen; `now` is next_at. Return what happened to which replicas.

        ongoing: requests that are open.
        """
        _, index, _ = heapq.heappop(self._timers)
        if index < 0:
            self._set_timer(-1, now + DECISION_INTERVAL_S)
            return self._scaled(now, ongoing)
        if self._states[index] is _State.STARTING:
            self._serve(index, now)
            return [(Change.STARTED, index)]
        self._states[index] = _State.FAILING
        self.serving.remove(index)
        return [(Change.FAILED, index)]

    def failed(self, index: int, now: float) -> None:
        """Note that a replica that had FAILED is gone now, and starts again."""
        self._num_failures += 1
        changes = self._changes
        self._start(index, now + (changes.startup_s if changes.restart_s is None else changes.restart_s))

    def emptied(self, index: int, now: float) -> None:
        """Note that a replica has nothing to do. It ends if it was DRAINED."""
        if self._states[index] is _State.DRAINING:
            self._end(index, now)

    def finish(self, now: float) -> FleetFigures:
        """Note the end of the simulation. Return what happened to the replicas."""
        for index in list(self._since):
            self._end(index, now)
        return FleetFigures(
            self._most, self._paid_s / now if now else float(self._most), self._num_added, self._num_failures
        )

    def _scaled(self, now: float, ongoing: int) -> list[tuple[Change, int]]:
        """Add or remove replicas. Replicas that have not begun to serve are removed first."""
        if self._scaler is None:
            return []
        kept = [index for index, state in self._states.items() if state is not _State.DRAINING]
        missing = self._scaler.wanted(now, len(kept), ongoing) - len(kept)
        for _ in range(min(missing, len(self._off))):
            index = heapq.heappop(self._off)
            self._since[index] = now
            self._num_added += 1
            self._start(index, now + self._changes.startup_s)
        self._most = max(self._most, len(self._since))
        removable = [index for index in kept if self._states[index] is not _State.FAILING]
        removable.sort(key=lambda index: (self._states[index] is _State.SERVING, -index))
        drained = []
        for index in removable[: max(0, -missing)]:
            if self._states[index] is _State.STARTING:
                self._end(index, now)
            else:
                self._states[index] = _State.DRAINING
                self._timer.pop(index, None)
                self.serving.remove(index)
                drained.append((Change.DRAINED, index))
        return drained

    def _start(self, index: int, ready_at: float) -> None:
        self._states[index] = _State.STARTING
        self._set_timer(index, ready_at)

    def _serve(self, index: int, now: float) -> None:
        self._states[index] = _State.SERVING
        self.serving.add(index)
        self._timer.pop(index, None)
        if self._changes.mtbf_s is not None:
            self._set_timer(index, now + self._rng.expovariate(1 / self._changes.mtbf_s))

    def _end(self, index: int, now: float) -> None:
        self._paid_s += max(0.0, now - self._since.pop(index))
        del self._states[index]
        self._timer.pop(index, None)
        self.serving.discard(index)
        heapq.heappush(self._off, index)

    def _set_timer(self, index: int, at: float) -> None:
        self._num_timers += 1
        self._timer[index] = self._num_timers
        heapq.heappush(self._timers, (at, index, self._num_timers))
