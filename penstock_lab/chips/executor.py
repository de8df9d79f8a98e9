"""ChipsExecutor: runs steps on simulated chips, as LocalExecutor runs them locally, and keeps the machine's clock."""

from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock_lab.chips.machine import Machine


class ChipsExecutor(LocalExecutor):
    """A `step.Executor` whose runner has a model placed on a machine's chips.

    Attributes:
        depth: how many steps are in flight at once, where layers are on chips of their own.
    """

    def __init__(self, runner: ModelRunner, machine: Machine, depth: int = 1) -> None:
        super().__init__(runner)
        self.machine = machine
        self.depth = depth

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Compute a step on the chips. Raise as LocalExecutor does, and OverBudgetError."""
        requests = [item.request_id for item in handle.scheduled]
        self.machine.begin_step(handle.step_id, requests)
        try:
            return super().collect(handle)
        finally:
            self.machine.end_step(requests)
