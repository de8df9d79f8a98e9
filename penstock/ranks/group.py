"""Group: the rank processes that share every layer of a model. ParallelExecutor: runs the steps of an engine on them.

    leader:  plan -> every rank -> its own part of the step, and all sampling -> results to the engine
    ranks:   plan -> its own part of the step; the tokens sampled in the previous step came with the plan

Rank 0, the leader, is the engine's own process and starts the others (process.py). Each rank has links to every other
rank (links.py), and a connection to the leader. The first message over this connection says what to build; all later
ones are steps. A rank ends when its leader is gone: its connection is closed, and the system kills it even if it hangs.

If a rank ends, hangs or fails, the whole group is lost: the steps in progress fail, all ranks end, and the error goes
to the engine's owner. If the engine has a supervisor, a new group takes over every stream.
"""

import pickle
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from penstock.errors import EngineError, ExecutorLostError, InvalidRequestError, ModelLoadError
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock.layers.lora import Adapter
from penstock.ranks.launcher import HERE, PROCESS, Launcher, Process
from penstock.ranks.links import Mesh
from penstock.runner.model_runner import ModelRunner

RANK_OF_GROUP = "group"  # the first word of a process of a group
END_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step for a rank that does not sample.

    Attributes:
        sampled: new tokens of the steps collected since the last order, by request id.
        adapters: LoRA adapters to load before the step, pickled by the engine: (slot, Adapter) each.
    """

    plan: SchedulerOutput
    sampled: dict[str, list[int]] = field(default_factory=dict)
    adapters: list[tuple[int, bytes]] = field(default_factory=list)

    def load_adapters(self, runner: ModelRunner) -> None:
        for slot, content in self.adapters:
            runner.load_adapter(slot, pickle.loads(content))  # from the engine, over a connection of its own


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A rank's message that it has its part of the model. cache_bytes: the size of its key/value caches."""

    cache_bytes: int


class CannotStart(msgspec.Struct, tag=True, frozen=True):
    """A rank's message that it cannot start. param: the option at fault, if any."""

    message: str
    param: str | None = None


def receive_ready(receive: Sequence[Callable[[], Any]]) -> list[Ready]:
    """Wait until every rank is ready, and return its message. A rank that has ended without one may have lost another,
    so the others are asked for the cause first.

    receive: returns the first message of a rank, for each. It raises EngineError if the rank has ended.

    Raises:
        InvalidRequestError, ModelLoadError: a rank cannot load its part.
        EngineError: a rank has ended, and no other says why.
    """
    ready: list[Ready] = []
    lost: EngineError | None = None
    for rank, first_answer in enumerate(receive, start=1):
        try:
            answer = first_answer()
        except EngineError as error:
            lost = lost or error
            continue
        if isinstance(answer, CannotStart):
            if answer.param is not None:
                raise InvalidRequestError(answer.message, param=answer.param)
            raise ModelLoadError(f"rank {rank}: {answer.message}")
        ready.append(answer)
    if lost is not None:
        raise lost
    return ready


class Group:
    """The ranks of an engine, as the leader sees them.

    Attributes:
        links: the leader's end of the links.
        cache_bytes: the bytes of the other ranks' caches, once they are ready.
    """

    def __init__(self, size: int, buffer_bytes: int, plan: Any, launcher: Launcher) -> None:
        """Start the other ranks, and send them `plan` as the first message.

        launcher: starts the processes, and is closed with the group.

        Raises:
            EngineError: the processes cannot be started.
        """
        self.cache_bytes = 0
        self._launcher = launcher
        self._processes: list[Process] = []
        self._connections: list[Connection] = []
        try:
            with closing(Mesh(size, buffer_bytes, launcher)) as mesh:
                self.links = mesh.links(0)
                try:
                    for rank in range(1, size):
                        self._start(rank, mesh)
                    self.send(plan)
                except BaseException:
                    self.close()
                    raise
        except OSError as error:
            raise EngineError(f"the processes of {size} ranks cannot be started: {error}") from error

    def _start(self, rank: int, mesh: Mesh) -> None:
        ours, theirs = self._launcher.connect(HERE, rank)
        self._connections.append(Connection(ours.detach()))
        try:
            process = self._launcher.start(rank, PROCESS, [RANK_OF_GROUP, theirs, *mesh.words(rank)])
            self._processes += [] if process is None else [process]
        finally:
            theirs.close()

    @property
    def bytes_received(self) -> int:
        """The bytes that the leader has received from the other ranks so far."""
        return self.links.bytes_received

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready.

        Raises:
            InvalidRequestError, ModelLoadError: a rank cannot be built.
            EngineError: a rank has ended.
        """
        answers = receive_ready([partial(self._first_answer, rank) for rank in range(1, len(self._connections) + 1)])
        self.cache_bytes = sum(answer.cache_bytes for answer in answers)

    def _first_answer(self, rank: int) -> Any:
        try:
            return self._connections[rank - 1].recv()
        except (EOFError, OSError) as error:
            self.links.close()  # or ranks that wait for this process would never answer
            raise EngineError(f"{self._fate(rank)} while it loaded its part of the model") from error

    def send(self, message: Any) -> None:
        """Send a message to every other rank. Raise ExecutorLostError if one has ended."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.lost(ExecutorLostError("", rank=rank)) from error

    def lost(self, error: Exception) -> ExecutorLostError:
        """End every rank, because after an error they would not be at the same step. Return the exception to raise."""
        rank = getattr(error, "rank", None)
        what = self._fate(rank) if rank else f"rank 0: {error}"
        self.close()
        return ExecutorLostError(f"{what}; the ranks of this engine are replaced together", rank=rank)

    def _fate(self, rank: int) -> str:
        """Describe in an error's words how a rank has ended or failed."""
        process = self._processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1.0)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} (process {process.pid}) {how}"
        return f"rank {rank} (process {process.pid}) does not answer"

    def close(self) -> None:
        """Kill all other ranks at once, and wait until they have ended. A second call does nothing."""
        self.links.close()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_WAIT_S)
        self._launcher.close()


class ParallelExecutor:
    """A `step.Executor` with one runner in each of several processes; the leader's runner is in this process."""

    depth = 1

    def __init__(self, runner: ModelRunner, group: Group) -> None:
        self._runner: ModelRunner | None = runner
        self.group = group
        self._submitted: deque[SchedulerOutput] = deque()
        self._sampled: dict[str, list[int]] = {}
        self._adapters: list[tuple[int, bytes]] = []  # that the other ranks get with the next step
        self.cache_bytes = runner.cache_bytes + group.cache_bytes  # of all ranks

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put a LoRA adapter into a slot, for the steps from now on. Each rank takes its own part."""
        if self._runner is None:
            raise EngineError("the executor was shut down")
        self._runner.load_adapter(slot, adapter)
        self._adapters.append((slot, pickle.dumps(adapter, pickle.HIGHEST_PROTOCOL)))

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Start a step in the other ranks. The leader's part runs in `collect`."""
        if self._runner is None:
            raise EngineError("the executor was shut down")
        self.group.send(StepOrder(scheduler_output, self._sampled, self._adapters))
        self._sampled, self._adapters = {}, []
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
