"""A simulation from options to figures, with one run for each request rate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly import PlannedEngine, plan_engine
from penstock.errors import check_int
from penstock_lab.bench.datasets import Dataset
from penstock_lab.bench.outcomes import Load
from penstock_lab.simulator.arrivals import Arrival, Drawn, Trace
from penstock_lab.simulator.costs import LinearCosts
from penstock_lab.simulator.executor import StepCosts
from penstock_lab.simulator.figures import Figures, parse_target
from penstock_lab.simulator.lifecycle import UNCHANGED, Changes
from penstock_lab.simulator.recorded import load_costs
from penstock_lab.simulator.scenario import Progress, Scenario, priced, smallest_fleet
from penstock_lab.simulator.workers import simulate

DEFAULT_PROMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is simulated.

    Attributes:
        rates: mean arrivals per second of each run; inf: all at once.
        num_prompts: requests of a run; None: DEFAULT_PROMPTS, or all of the trace.
        trace: a file of arrivals, instead of drawn arrivals.
        replicas: of the fleet; None: as few as meet the target.
        users: number of users who wait for their answers; None: nobody waits.
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
            raise InvalidRequestError("users: not allowed with a trace, which says when requests arrive", param="users")
        if self.think_s and self.users is None:
            raise InvalidRequestError("think_time: only allowed with --users, whose requests it separates",
                                      param="think_time")  # fmt: skip
        if self.replicas is None and self.changes.scaling is not None:
            message = "replicas: auto is not allowed with --max-replicas; give the smallest number of replicas"
            raise InvalidRequestError(message, param="replicas")
        has_rate = list(self.rates) != [float("inf")]
        if has_rate and (self.trace is not None or self.users is not None):
            name = "a trace" if self.trace is not None else "--users"
            raise InvalidRequestError(
                f"request_rate: not allowed with {name}, which says when requests arrive", param="request_rate"
            )

    def arrivals(self, rate: float, model: str) -> Iterable[Arrival]:
        """Return the arrivals of one run."""
        if self.trace is not None:
            return Trace(self.trace, self.num_prompts)
        load = Load(rate, self.burstiness, seed=self.seed)
        return Drawn.of(self.dataset, load, self.num_prompts or DEFAULT_PROMPTS, model)


def find_costs(options: dict[str, Any], source: str) -> LinearCosts:
    """Return the costs of steps: from a file, or for "this" measured now with the model of the options.

    Raises:
        InvalidRequestError: the file holds no costs.
        ModelLoadError: the model cannot be measured.
    """
    if source != "this":
        return load_costs(Path(source))
    from penstock_lab.simulator.calibrate import measure_costs

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
    """Return the result for JSON. The figures of a single run stand beside the description of the simulation."""
    runs: list[dict[str, Any]] = result["runs"]
    if len(runs) > 1:
        return result
    return {name: value for name, value in result.items() if name != "runs"} | runs[0]
