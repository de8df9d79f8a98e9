"""The definition of a proof, and of its report."""

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from penstock_lab.bench import available_threads

MAX_SERVERS = 8  # maximum number of servers that trials start at the same time
T = TypeVar("T")
MAX_SHOWN = 20  # maximum number of descriptions of errors that are kept; the rest are only counted


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under proof.

    Attributes:
        model: a directory, a hub name, or "demo".
        options: other options of EngineConfig, the same for every engine that a proof starts.
    """

    model: str = "demo"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_servers(self) -> int:
        """Number of servers that may run at once: one per core for the demo, one for a model that may be large."""
        return min(MAX_SERVERS, available_threads()) if self.model == "demo" else 1


@dataclass(slots=True)
class Outcome:
    """The result of one proof.

    Attributes:
        tried: number of trials made; the proof's `unit` says what a trial is.
        num_wrong: number of trials in which the promise was broken.
        wrong: what went wrong in the first of these trials, with everything needed to repeat it.
        figures: measurements by name, with their unit in the name: "median_s", "tokens".
        details: what is too long for a table, by name; plain values, for --json.
        skipped: why the proof could not be made here; None if it was made.
    """

    name: str
    promise: str
    unit: str
    tried: int = 0
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        """True if something was tried and nothing was wrong. A skipped proof has not passed."""
        return self.tried > 0 and self.num_wrong == 0


class Trials:
    """The run of one proof: how long it may go on, its random numbers, and where it reports.

    Args:
        goal: number of trials after which it ends.
        seconds: time after which it ends in any case, once it has made a first trial; by default, never.
        advance: called with the number of new trials.

    Attributes:
        seed: of the run.
        random: seeded; a proof takes every choice from it, so that the seed repeats the run.
    """

    def __init__(
        self, subject: Subject, outcome: Outcome, *, goal: int, seconds: float = math.inf, seed: int,
        advance: Callable[[int], None] = lambda number: None,
    ) -> None:  # fmt: skip
        self.subject = subject
        self.outcome = outcome
        self.goal = goal
        self.seed = seed
        self.random = random.Random(f"{outcome.name} {seed}")
        self._deadline = time.monotonic() + seconds
        self._advance = advance

    def go_on(self) -> bool:
        if self.outcome.tried == 0:
            return True
        return self.outcome.tried < self.goal and time.monotonic() < self._deadline

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def side_by_side(self, draw: Callable[[], T], trial: Callable[[T], str | None], number: int) -> None:
        """Make trials in threads, `number` at the same time, as long as more should be made.

        Args:
            draw: makes the random choices of a trial; one trial after the other, so that the seed repeats them.
            trial: makes a trial; returns what went wrong, or None.
        """
        running: set[Future[str | None]] = set()
        with ThreadPoolExecutor(number) as threads:
            while True:
                while len(running) < number and self.outcome.tried + len(running) < self.goal and self.go_on():
                    running.add(threads.submit(trial, draw()))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    self.tried()
                    if (what := future.result()) is not None:
                        self.wrong(what)

    def tried(self, number: int = 1) -> None:
        """Count trials, including broken ones."""
        self.outcome.tried += number
        self._advance(number)

    def wrong(self, what: str) -> None:
        """Report a trial in which the promise was broken. `tried` counts it as well."""
        self.outcome.num_wrong += 1
        if len(self.outcome.wrong) < MAX_SHOWN:
            self.outcome.wrong.append(what)

    def figure(self, name: str, value: float | int | str) -> None:
        """Report a measurement."""
        self.outcome.figures[name] = value

    def detail(self, name: str, value: Any) -> None:
        """Report what is too long for a table."""
        self.outcome.details[name] = value

    def skip(self, why: str) -> None:
        """Report that the proof cannot be made here."""
        self.outcome.skipped = why


class Proof(Protocol):
    """One promise, and the trials that could break it.

    Attributes:
        name: as given to --only, in lower case with hyphens.
        promise: in one line, as docs/guarantees.md states it.
        unit: what is counted: "comparisons", "kills".
        goal: trials of the full run, which `make prove` makes.
        weight: share of the time of all proofs, relative to the other proofs.
    """

    name: ClassVar[str]
    promise: ClassVar[str]
    unit: ClassVar[str]
    goal: ClassVar[int]
    weight: ClassVar[float]

    def run(self, trials: Trials) -> None:
        """Make trials while `trials.go_on()`, and report them. An exception counts as a broken promise."""
