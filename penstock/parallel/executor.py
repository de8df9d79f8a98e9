"""ParallelExecutor: connects the engine to ranks that share a model, without the engine knowing about them.

    leader:  plan -> every rank -> its own part of the step, and all sampling -> results to the engine
    ranks:   plan -> its own part of the step; the results of the previous step came with the plan

If a rank ends, hangs or fails, the whole group is lost: the steps in progress fail, all ranks end, and the error goes
to the engine's owner. If the engine has a supervisor, a new group takes over every stream.
"""

from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Protocol

from penstock.errors import EngineError, ExecutorLostError
from penstock.interface.step import SchedulerOutput, StepOutput

NewTokens = dict[str, list[int]]  # by request id


@dataclass(frozen=True, slots=True)
class Step:
    """A step for the ranks that do not sample, with the tokens sampled in the previous step."""

    plan: SchedulerOutput
    sampled: NewTokens


class Runner(Protocol):
    """Computes one rank's part of a step."""

    def execute(self, scheduler_output: SchedulerOutput) -> StepOutput: ...


class Follower(Runner, Protocol):
    """Computes the part of a rank that does not sample tokens."""

    def note_outputs(self, outputs: NewTokens) -> None:
        """Note what the leader sampled in the last step."""


class Ranks(Protocol):
    """The other ranks: a group.Group.

    Attributes:
        bytes_received: bytes that the leader has received from them so far.
    """

    @property
    def bytes_received(self) -> int: ...

    def send(self, message: Step) -> None: ...

    def lost(self, error: Exception) -> ExecutorLostError: ...

    def close(self) -> None: ...


class ParallelExecutor:
    """A `step.Executor` with one runner in each of several processes; the leader's runner is in this process."""

    depth = 1

    def __init__(self, runner: Runner, group: Ranks) -> None:
        self._runner: Runner | None = runner
        self.group = group
        self._submitted: deque[SchedulerOutput] = deque()
        self._sampled: NewTokens = {}

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Start a step in the other ranks. The leader's part runs in `collect`."""
        if self._runner is None:
            raise EngineError("the executor was shut down")
        self.group.send(Step(scheduler_output, self._sampled))
        self._sampled = {}
        self._submitted.append(scheduler_output)
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        """Run the leader's part of a step and return the results.

        Raises:
            EngineError: another step must be collected first, or the executor was shut down.
            ExecutorLostError: a rank ended, hangs or failed. No more steps can be computed.
        """
        if self._runner is None or not self._submitted or self._submitted[0] is not handle:
            raise EngineError("steps are collected once each, in the order in which they were submitted")
        self._submitted.popleft()
        before = self.group.bytes_received
        try:
            output = self._runner.execute(handle)
        except MemoryError:
            raise
        except Exception as error:
            raise self.group.lost(error) from error
        self._sampled = {name: item.new_token_ids for name, item in output.results.items() if item.new_token_ids}
        return replace(output, bytes_received=self.group.bytes_received - before)

    def shutdown(self) -> None:
        """End the ranks and release the model. A second call does nothing."""
        self._submitted.clear()
        self._runner = None
        self.group.close()


def follow(runner: Follower, leader: Connection) -> None:
    """Compute this rank's part of every step until the leader is gone.

    Raises:
        ExecutorLostError: another rank is gone.
        Exception: whatever the step raised. The rank must end then.
    """
    while True:
        try:
            step = leader.recv()
        except (EOFError, OSError):
            return
        if not isinstance(step, Step):
            raise ExecutorLostError(f"the leader sent {type(step).__name__}")
        runner.note_outputs(step.sampled)
        runner.execute(step.plan)
