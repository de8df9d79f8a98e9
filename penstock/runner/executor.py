"""TorchExecutor: the engine's way to a Worker in this process.

A step runs when it is collected, in the thread that collects it: on one device there is nothing to overlap with yet.
"""

from collections import deque
from dataclasses import dataclass

from penstock.errors import EngineError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.runner.worker import Worker


@dataclass(frozen=True, slots=True, eq=False)
class StepHandle:
    """A submitted step."""

    scheduler_output: SchedulerOutput


class TorchExecutor:
    """Implements `step.Executor` with one Worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._submitted: deque[StepHandle] = deque()

    def submit(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Take a step; it starts in `collect`."""
        handle = StepHandle(scheduler_output)
        self._submitted.append(handle)
        return handle

    def collect(self, handle: StepHandle) -> StepOutput:
        """Run the step and return its results. Steps are collected once each, in the order submitted.

        Raises:
            EngineError: it is not this step's turn; nothing was run then.
            Exception: whatever the step raised as a whole. Later steps still work; the requests of this one have
                to be forgotten in the next.
        """
        if not self._submitted or self._submitted[0] is not handle:
            raise EngineError("steps are collected once each, in the order in which they were submitted")
        self._submitted.popleft()
        return self._worker.execute(handle.scheduler_output)

    def shutdown(self) -> None:
        """Free the model and the caches. A second call does nothing."""
        self._submitted.clear()
        self._worker.shutdown()
