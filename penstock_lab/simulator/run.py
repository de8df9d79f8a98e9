"""A simulation from options to figures, with one run for each request rate, in several processes if wanted.

Replicas that do not depend on each other are simulated apart, part by part. A part is small enough that the block pools
of its replicas fit in memory. So the memory depends on the size of a part, and not on the number of replicas or
requests.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock import EngineConfig, EngineError
from penstock.assembly import PlannedEngine, plan_engine
from penstock.errors import check_int, fail, invalid
from penstock_lab.bench.datasets import Dataset
from penstock_lab.bench.outcomes import Load
from penstock_lab.simulator.arrivals import Arrival, Drawn, Trace
from penstock_lab.simulator.costs import LinearCosts
from penstock_lab.simulator.figures import Figures, parse_target
from penstock_lab.simulator.lifecycle import UNCHANGED, Changes
from penstock_lab.simulator.recorded import load_costs
from penstock_lab.simulator.replica import StepCosts
from penstock_lab.simulator.scenario import Progress, Scenario, priced, smallest_fleet

MAX_BLOCKS = 2**20  # of the replicas of a part: about 200 MB
MIN_REPLICAS = 16  # a smaller fleet is simulated in this process, because other processes would take longer to start
DEFAULT_PROMPTS = 1000


def simulate(
    scenario: Scenario, num_replicas: int, processes: int | None = None,
    advance: Callable[[int], None] = lambda count: None, sample: int | None = None,
) -> Figures:  # fmt: skip
    """Simulate a fleet and return its figures, which do not depend on the number of processes.

    Args:
        processes: maximum number of processes that compute; None: only this one.
        advance: called with the number of requests sent.
        sample: number of replicas that are simulated, evenly spread, and stand for all, because their loads are alike.
            None: all are simulated.

    Raises:
        InvalidRequestError: there is a sample, but the requests of a replica depend on the other replicas.
    """
    processes = processes or 1
    if sample is not None and not scenario.has_independent_replicas:
        raise fail("sample", sample, "left out unless replicas are independent: the router is round_robin, "
                         "without --users, autoscaling or failures")  # fmt: skip
    if not scenario.has_independent_replicas or (num_replicas < MIN_REPLICAS and sample is None):
        return scenario.run(num_replicas, advance)
    simulated = range(num_replicas)
    if sample is not None and sample < num_replicas:
        simulated = range(0, num_replicas, num_replicas // sample)[:sample]
    parts = list(divided(simulated, processes, sum(group.num_blocks for group in scenario.planned.groups)))
    figures = Figures(scenario.goals)
    if processes == 1:
        for part in parts:
            figures.merge(scenario.run_part(num_replicas, part, advance))
    else:
        _in_processes(scenario, num_replicas, parts, min(processes, len(parts)), advance, figures)
    if len(simulated) < num_replicas:
        figures.stand_for(num_replicas / len(simulated))
    return figures


def _in_processes(
    scenario: Scenario, num_replicas: int, parts: list[range], processes: int, advance: Callable[[int], None],
    figures: Figures,
) -> None:  # fmt: skip
    """Simulate parts in other processes, and add their results to `figures`.

    The processes end with this call, however it ends, and with this process.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads, but not the threads
    reader, writer = context.Pipe(duplex=False)
    try:
        with ProcessPoolExecutor(processes, context, initializer=_end_with, initargs=(reader,)) as pool, writer:
            running = [pool.submit(scenario.run_part, num_replicas, part) for part in parts]
            for done in as_completed(running):
                found = done.result()
                figures.merge(found)
                advance(found.requests + found.rejected)
    except BrokenProcessPool:
        message = "a simulating process died, perhaps for lack of memory; use --processes 1, or fewer replicas"
        raise EngineError(message) from None
    finally:
        reader.close()


def _end_with(reader: Connection) -> None:
    """End this process when the other end of the pipe, which only its parent has, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, and that is enough

    def watch() -> None:
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def divided(replicas: range, processes: int, num_blocks: int) -> Iterator[range]:
    """Yield parts of a fleet, at least one per process, of one replica or of at most MAX_BLOCKS in all.

    num_blocks: of a replica.
    """
    size = max(1, min(-(-len(replicas) // processes), MAX_BLOCKS // max(1, num_blocks)))
    for start in range(0, len(replicas), size):
        yield replicas[start : start + size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a simulation.

    Attributes:
        rates: mean arrivals per second of each run; inf: all at once.
        num_prompts: requests of a run; None: DEFAULT_PROMPTS, or all of the trace.
        trace: a file of arrivals, instead of drawn arrivals.
        replicas: of the fleet; None: as few as meet the target.
        users: number of users who wait for their answers; None: requests come whether or not others are answered.
        price: of a replica for an hour.
        changes: of the fleet while it runs: autoscaling and failures.
        processes: number of processes that compute; None: only this one.
        sample: number of replicas that are simulated and stand for all; None: all are simulated.
    """

    dataset: Dataset
    rates: Sequence[float]
    burstiness: float = 1.0
    num_prompts: int | None = None
    trace: Path | None = None
    replicas: int | None = 1
    router: str = "round_robin"
    users: int | None = None
    think_s: float = 0.0
    target: str | None = None
    price: float | None = None
    processes: int | None = None
    sample: int | None = None
    seed: int = 0
    changes: Changes = UNCHANGED

    def __post_init__(self) -> None:
        check_int("num_prompts", self.num_prompts, 1, 10**9, optional=True)
        check_int("processes", self.processes, 1, 4096, optional=True)
        check_int("sample", self.sample, 1, 10**6, optional=True)
        if self.trace is not None and self.users is not None:
            raise invalid("users", "not allowed with a trace, which says when requests arrive")
        if self.think_s and self.users is None:
            raise invalid("think_time", "only allowed with --users, whose requests it separates")  # fmt: skip
        if self.replicas is None and self.changes.scaling is not None:
            raise invalid("replicas", "auto is not allowed with --max-replicas; give the smallest number of replicas")
        has_rate = list(self.rates) != [float("inf")]
        if has_rate and (self.trace is not None or self.users is not None):
            name = "a trace" if self.trace is not None else "--users"
            raise invalid("request_rate", f"not allowed with {name}, which says when requests arrive")

    def arrivals(self, rate: float, model: str) -> Iterable[Arrival]:
        """Draw or read the arrivals of one run."""
        if self.trace is not None:
            return Trace(self.trace, self.num_prompts)
        load = Load(rate, self.burstiness, seed=self.seed)
        return Drawn.of(self.dataset, load, self.num_prompts or DEFAULT_PROMPTS, model)


def find_costs(options: dict[str, Any], source: str) -> LinearCosts:
    """Find the costs of steps: from a file, or for "this" measured now with the model of the options.

    Raises:
        InvalidRequestError: the file holds no costs.
        ModelLoadError: the model cannot be measured.
    """
    if source != "this":
        return load_costs(Path(source))
    from penstock_lab.simulator.recorded import measure_costs

    return measure_costs(options)


def run(
    engine_options: dict[str, Any],
    options: Options,
    costs: StepCosts,
    progress: Progress,
    planned: PlannedEngine | None = None,
) -> dict[str, Any]:
    """Simulate a run for each rate, and return their figures.

    planned: a replica on other hardware; None: a replica on this machine.

    Raises:
        InvalidRequestError: an option or a line of the trace is invalid.
        EngineError: no fleet meets the target.
    """
    goals = () if options.target is None else parse_target(options.target)
    planned = planned or plan_engine(EngineConfig.from_options(**engine_options))
    runs = []
    for rate in options.rates:
        scenario = Scenario(
            planned, costs, options.arrivals(rate, planned.config.model), goals, options.router, options.users,
            options.think_s, options.seed, options.changes,
        )  # fmt: skip
        replicas, figures = _run(scenario, options, progress)
        shown_rate = "trace" if options.trace is not None else "users" if options.users is not None else rate
        summary = {"request_rate": "inf" if rate == float("inf") and shown_rate == rate else shown_rate}
        runs.append(summary | priced(figures.summary(replicas), options.price))
    return {
        "model": planned.config.model,
        "router": options.router,
        "users": options.users,
        "target": options.target,
        "costs": costs.as_json(),
        "runs": runs,
    }


def _run(scenario: Scenario, options: Options, progress: Progress) -> tuple[int, Figures]:
    def run_fleet(num_replicas: int) -> Figures:
        total = options.num_prompts or DEFAULT_PROMPTS
        with progress(f"requests on {num_replicas} replicas", total) as advance:
            return simulate(scenario, num_replicas, options.processes, advance, options.sample)

    if options.replicas is None:
        return smallest_fleet(scenario, run_fleet)
    return options.replicas, run_fleet(options.replicas)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Arrange the result for JSON. The figures of a single run stand beside the description of the simulation."""
    runs: list[dict[str, Any]] = result["runs"]
    if len(runs) > 1:
        return result
    return {name: value for name, value in result.items() if name != "runs"} | runs[0]
