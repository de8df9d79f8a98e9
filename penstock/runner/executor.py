"""TorchExecutor: the engine's way to a ModelRunner in this process.

A step runs when it is collected, in the thread that collects it: one device has nothing to overlap a step with.
"""

from collections import deque

from penstock.errors import EngineError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.runner.model_runner import ModelRunner


class TorchExecutor:
    """Implements `step.Executor` with one ModelRunner. The handle of a step is its SchedulerOutput."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner
        self._submitted: deque[SchedulerOutput] = deque()

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Queue a step; it starts in `collect`."""
        self._submitted.append(scheduler_output)
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Run the step and return its results. Steps are collected once each, in the order submitted.

        Raises:
            EngineError: another step comes first, and nothing was run; or the executor was shut down.
            Exception: whatever the step raised as a whole. Later steps still work; the requests of this one must be
                forgotten in the next.
        """
        if not self._submitted or self._submitted[0] is not handle:
            raise EngineError("steps are collected once each, in the order in which they were submitted")
        self._submitted.popleft()
        if self._runner is None:
            raise EngineError("the executor was shut down")
        return self._runner.execute(handle)

    def shutdown(self) -> None:
        """Free the model and the caches. A second call does nothing."""
        self._submitted.clear()
        self._runner = None
