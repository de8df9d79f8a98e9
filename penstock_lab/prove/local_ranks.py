"""Ranks as threads of one process, for tests and proofs of the arithmetic: they try many splits in one process."""

import queue
import threading
from collections.abc import Sequence

import numpy as np

from penstock.config import DEGREES
from penstock.errors import ExecutorLostError
from penstock.kernels.tensors import Array
from penstock.ranks.group import Group, StepOrder
from penstock.ranks.stage import FollowingRunner

TIMEOUT_S = 60


class LocalLinks:
    """The links of a rank that is a thread."""

    def __init__(self, rank: int, group: "LocalGroup") -> None:
        self.rank = rank
        self.bytes_received = 0
        self._group = group

    def gather(self, x: Array, degree: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[Array]:
        """Return the arrays of the ranks of this rank's block."""
        first = self.rank // degree * degree
        arrays, barrier = self._group.arrays[degree], self._group.barriers[degree, first]
        arrays[self.rank] = np.array(x)
        try:
            barrier.wait(TIMEOUT_S)
            found = [arrays[rank] for rank in range(first, first + degree)]
            barrier.wait(TIMEOUT_S)  # no rank stores its next array before all have read this one
        except threading.BrokenBarrierError as error:
            raise ExecutorLostError("a rank has ended") from error
        if shapes is not None and [item.shape for item in found] != list(shapes):
            raise ExecutorLostError(f"ranks passed {[item.shape for item in found]} but {list(shapes)} were expected")
        self.bytes_received += sum(item.nbytes for item in found) - found[self.rank - first].nbytes
        return found


class LocalGroup(Group):
    """A Group with a thread for each rank except the leader."""

    def __init__(self, size: int) -> None:
        self.arrays: dict[int, dict[int, Array]] = {degree: {} for degree in DEGREES}
        self.barriers = {
            (degree, first): threading.Barrier(degree) for degree in DEGREES for first in range(0, size, degree)
        }
        self.ranks = [LocalLinks(rank, self) for rank in range(size)]
        self._inboxes: list[queue.SimpleQueue[StepOrder | None]] = []
        self._following = threading.Semaphore(0)
        self.cache_bytes = 0  # not counted

    @property
    def bytes_received(self) -> int:
        """The bytes that the leader has received from the other ranks so far."""
        return self.ranks[0].bytes_received

    def follow(self, runner: FollowingRunner) -> None:
        """Compute every step of one rank in the calling thread until the group is closed."""
        inbox: queue.SimpleQueue[StepOrder | None] = queue.SimpleQueue()
        self._inboxes.append(inbox)
        self._following.release()
        while (step := inbox.get()) is not None:
            runner.append_sampled(step.sampled)
            runner.execute(step.plan)

    def wait_until_whole(self) -> None:
        """Wait until every rank follows. Raise ExecutorLostError if one does not start in time."""
        for _ in self.ranks[1:]:
            if not self._following.acquire(timeout=TIMEOUT_S):
                raise ExecutorLostError("a rank has ended")

    def send(self, message: StepOrder | None) -> None:
        """Send a step to every rank."""
        for inbox in self._inboxes:
            inbox.put(message)

    def lost(self, error: Exception) -> ExecutorLostError:
        """End every rank because of an error. Return the exception to raise."""
        self.close()
        for barrier in self.barriers.values():
            barrier.abort()
        return ExecutorLostError(str(error))

    def close(self) -> None:
        """End every rank after its step. A second call does nothing."""
        self.send(None)
