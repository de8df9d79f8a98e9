"""Scenario: what is simulated. It is plain data, so that it can be sent to other processes."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from penstock import EngineError
from penstock.assembly import PlannedEngine
from penstock.engine.engine import Engine
from penstock.errors import check_float, check_int, fail
from penstock.interface.step import Executor
from penstock_lab.simulator.arrivals import Arrival
from penstock_lab.simulator.figures import Figures, Goal
from penstock_lab.simulator.fleet import Fleet, Users
from penstock_lab.simulator.lifecycle import UNCHANGED, Changes, Lifecycle
from penstock_lab.simulator.replica import NUM_IDS, MakeEngine, OpenRequest, Replica, StepCosts, VirtualClock
from penstock_lab.simulator.routers import ROUTERS, check_router

MAX_REPLICAS = 100_000
# Called with the name and the number of the things to be counted; yields `advance(count)`.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load and what serves it.

    Attributes:
        planned: the engine of every replica.
        arrivals: can be iterated any number of times.
        goals: of the target.
        users: number of users who send the arrivals; each waits for the answer, and pauses think_s seconds on average
            before the next request. None: requests are sent when they arrive.
        changes: of the fleet while it runs.
    """

    planned: PlannedEngine
    costs: StepCosts
    arrivals: Iterable[Arrival]
    goals: tuple[Goal, ...] = ()
    router: str = "round_robin"
    users: int | None = None
    think_s: float = 0.0
    seed: int = 0
    changes: Changes = UNCHANGED

    def __post_init__(self) -> None:
        check_int("users", self.users, 1, 10**7, optional=True)
        check_float("think_time", self.think_s, 0.0, 1e6)
        check_router(self.router)

    @property
    def has_independent_replicas(self) -> bool:
        """True if the requests that a replica gets depend on no answer, so that each can be simulated apart."""
        return self.router == "round_robin" and self.users is None and not self.changes.any

    def run(self, num_replicas: int, advance: Callable[[int], None] = lambda count: None) -> Figures:
        return self.run_part(num_replicas, range(num_replicas), advance)

    def run_part(self, num_replicas: int, part: range, advance: Callable[[int], None] = lambda count: None) -> Figures:
        """Simulate a fleet: all its replicas or, if they are independent, those of `part`."""
        check_int("replicas", num_replicas, 1, MAX_REPLICAS)
        make, figures = make_engine(self.planned), Figures(self.goals, self.costs.request)
        scaling = self.changes.scaling
        most = len(part) if scaling is None else scaling.max_replicas
        check_int("max_replicas", most, num_replicas if scaling is not None else 1, MAX_REPLICAS)
        replicas = [Replica(make, self.costs, figures) for _ in range(most)]
        if self.has_independent_replicas:
            self._run_apart(num_replicas, dict(zip(part, replicas, strict=True)), advance)
        else:
            users = None if self.users is None else Users(self.users, self.think_s, self.seed, self.costs.request)
            life = Lifecycle(num_replicas, self.changes, self.planned.config.scheduler.max_num_seqs, self.seed)
            figures.fleet = Fleet(replicas, ROUTERS[self.router](replicas), users, life).run(self.arrivals, advance)
        for replica in replicas:
            replica.engine.check_integrity()
        return figures

    def _run_apart(self, num_replicas: int, part: dict[int, Replica], advance: Callable[[int], None]) -> None:
        """Send each replica of a part its requests. It catches up only then, so it can take many steps at once."""
        for number, arrival in enumerate(self.arrivals):
            if (replica := part.get(number % num_replicas)) is not None:
                replica.run_until(arrival.at)
                if not replica.has_work:
                    replica.clock.now = max(replica.clock.now, arrival.at)
                replica.add(OpenRequest(sent_at=arrival.at, number=number, arrival=arrival))
                advance(1)
        for replica in part.values():
            replica.run_until(math.inf)


def make_engine(planned: PlannedEngine) -> MakeEngine:
    """Make a function that makes the engines of replicas: production engines with a larger vocabulary."""
    wide = replace(planned, model_config=replace(planned.model_config, vocab_size=NUM_IDS))

    def make(executor: Executor, clock: VirtualClock) -> Engine:
        return wide.make(executor, clock)

    return make


def smallest_fleet(scenario: Scenario, run: Callable[[int], Figures]) -> tuple[int, Figures]:
    """Find the smallest number of replicas that meets the target, and its figures. More are taken to be no worse.

    Args:
        run: simulates a number of replicas.

    Raises:
        InvalidRequestError: there is no target.
        EngineError: MAX_REPLICAS do not meet it, or more replicas change nothing.
    """
    if not scenario.goals:
        raise fail("target", None, "given, like ttft_p99=2s, for replicas = auto")
    low, high = 0, 1
    while not (figures := run(high)).meets_target:
        if figures.rejected or high >= min(MAX_REPLICAS, max(1, figures.requests)):
            raise EngineError(f"no fleet meets the target: {_why_not(figures, high)}")
        low, high = high, min(2 * high, MAX_REPLICAS)
    while high - low > 1:
        middle = (low + high) // 2
        found = run(middle)
        if found.meets_target:
            high, figures = middle, found
        else:
            low = middle
    return high, figures


def _why_not(figures: Figures, num_replicas: int) -> str:
    if figures.rejected:
        return f"{figures.rejected} requests are too long for the context or the cache of a replica"
    missed = [
        f"{goal.metric}_p{goal.share:g} is {value:.3g} s"
        for goal in figures.goals
        if (value := figures.times[goal.metric].percentile(goal.share)) is not None and value > goal.seconds
    ]
    return f"with {num_replicas} replicas (as many as there are requests, or the most allowed), {', '.join(missed)}"


def priced(summary: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Add the cost to figures. price: of a replica for an hour, in any currency, startup included."""
    if price is None:
        return summary
    check_float("price", price, 0.0, 1e9)
    per_hour = price * summary["mean_replicas"]
    rate = summary["output_tokens_per_s"] * 3600
    return summary | {
        "cost_per_hour": per_hour,
        "cost_per_million_output_tokens": 1e6 * per_hour / rate if rate else None,
    }
