"""CostExecutor: an Executor that computes nothing, and sets a clock forward by the time that a step takes."""

from typing import Protocol

from penstock.interface.step import RequestStepOutput, SchedulerOutput, StepOutput

TOKEN = 0  # the id of every output token; prompts are made of other ids


class StepCosts(Protocol):
    """The durations of steps on some machine."""

    @property
    def request(self) -> float:
        """Seconds of a request's way to the engine and of its first token's way back."""

    def step_seconds(self, step: SchedulerOutput) -> float:
        """Compute the seconds from the plan of a step to the plan of the next one, if there is work for it."""

    def decode_seconds(self, sequences: int, cached_tokens: int) -> float:
        """Compute the same for a step in which `sequences` get a token each and attend to `cached_tokens` in all."""

    def as_json(self) -> dict[str, str | float]:
        """Describe the costs for a report."""


class VirtualClock:
    """A clock that stands still until it is set. The engine calls it instead of time.monotonic()."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CostExecutor:
    """Answers every step with one token for each sample, at the time when the step would have ended."""

    depth = 1

    def __init__(self, costs: StepCosts, clock: VirtualClock) -> None:
        self._costs = costs
        self._clock = clock

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        self._clock.now += self._costs.step_seconds(handle)
        results = {item.request_id: RequestStepOutput([TOKEN] if item.num_samples else []) for item in handle.scheduled}
        return StepOutput(handle.step_id, results)

    def shutdown(self) -> None: ...
