"""An engine whose steps take time on a clock of its own, and what happens in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.engine import Engine
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.step import SchedulerOutput
from tests.fakes_engine import ScriptedExecutor, make_engine

STEP_S, STREAM_TOKEN_S, PROMPT_TOKEN_S = 0.02, 0.001, 0.001


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def linear_cost(step: SchedulerOutput) -> float:
    """What a step takes: a part for the weights, and one for each token."""
    return STEP_S + STREAM_TOKEN_S * step.num_tokens


@dataclass
class Timed:
    """An engine, and the times at which its requests came, began and ended.

    Attributes:
        cost: seconds that a step takes.
        first, ended: request id -> time of its first token, and of its end.
    """

    engine: Engine
    clock: Clock
    cost: Callable[[SchedulerOutput], float] = linear_cost
    came: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    @classmethod
    def make(cls, cost: Callable[[SchedulerOutput], float] = linear_cost, **options: Any) -> "Timed":
        clock = Clock()
        return cls(make_engine(clock=clock, **options), clock, cost)

    @property
    def executor(self) -> ScriptedExecutor:
        assert isinstance(self.engine.executor, ScriptedExecutor)
        return self.engine.executor

    def add(self, request: EngineRequest) -> None:
        self.engine.add_request(request)
        self.came[request.request_id] = self.clock.now

    def step(self) -> list[EngineOutput]:
        """One step, at whose end its outputs are there."""
        self.executor.fail = self._pass
        outputs = self.engine.step()
        for output in outputs:
            if output.new_token_ids:
                self.first.setdefault(output.request_id, self.clock.now)
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.clock.now
        return outputs

    def _pass(self, step: SchedulerOutput) -> set[str]:
        self.clock.now += self.cost(step)
        return set()

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def wait_of(self, request_id: str) -> float:
        """Seconds from its arrival to its first token."""
        return self.first[request_id] - self.came[request_id]
