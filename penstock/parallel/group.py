"""Group: the rank processes of one engine. Rank 0, the leader, is the engine's own process and starts the others.

Each rank has a socket to every other rank (links.py), and a connection to the leader. The first message over this
connection says what to build; all later ones are steps (executor.py). A rank ends when its leader is gone: its
connection is closed, and the system kills it even if it hangs (child_main.py).
"""

import pickle
import subprocess
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import EngineError, ExecutorLostError, InvalidRequestError, ModelLoadError
from penstock.parallel.launch import HERE, Launcher, Process
from penstock.parallel.links import Links, Meeting
from penstock.parallel.links import inherit as inherit_links
from penstock.parallel.wire import WireLinks

END_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Built:
    """A rank's message that it is ready: the bytes of its caches, and how many bytes of the files it has read."""

    cache_bytes: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class CannotBuild:
    """A rank's message that says why it cannot be built."""

    message: str
    param: str | None = None


class Group:
    """The ranks of an engine, as the leader sees them.

    Attributes:
        links: the leader's end of the links.
        built: the messages of the other ranks that they are ready.
    """

    def __init__(self, size: int, place_bytes: int, module: str, plan: Any, launcher: Launcher) -> None:
        """Start the other ranks, which run `module.main` in their own processes and get `plan` as the first message.

        launcher: starts the processes, and is closed with the group.

        Raises:
            EngineError: the processes cannot be started.
        """
        self.built: list[Built] = []
        self._launcher = launcher
        self._processes: list[Process] = []
        self._connections: list[Connection] = []
        try:
            with closing(Meeting(size, place_bytes, launcher)) as meeting:
                self.links = meeting.join(0)
                try:
                    for rank in range(1, size):
                        self._start(rank, meeting, module)
                    self.send(plan)
                except BaseException:
                    self.close()
                    raise
        except OSError as error:
            raise EngineError(f"the processes of {size} ranks cannot be started: {error}") from error

    def _start(self, rank: int, meeting: Meeting, module: str) -> None:
        ours, theirs = self._launcher.connect(HERE, rank)
        self._connections.append(Connection(ours.detach()))
        try:
            process = self._launcher.start(rank, module, [theirs, *meeting.words(rank)])
            self._processes += [] if process is None else [process]
        finally:
            theirs.close()

    @property
    def bytes_received(self) -> int:
        """The bytes that the leader has received from the other ranks so far."""
        return self.links.bytes_received

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def wait_until_built(self) -> None:
        """Wait until every rank is ready.

        Raises:
            InvalidRequestError, ModelLoadError: a rank cannot be built.
            EngineError: a rank has ended.
        """
        for rank, connection in enumerate(self._connections, start=1):
            try:
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise EngineError(f"{self._fate(rank)} while it loaded its part of the model") from error
            if isinstance(answer, CannotBuild):
                if answer.param is not None:
                    raise InvalidRequestError(answer.message, param=answer.param)
                raise ModelLoadError(f"rank {rank}: {answer.message}")
            self.built.append(answer)

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
        """Return a text that says what happened to a rank."""
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


def bytes_read() -> int:
    """Return the bytes that this process has read from files so far, or 0 if the system does not report them."""
    with suppress(OSError), open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("rchar:"))
    return 0


def inherit(words: list[str]) -> tuple[Links | WireLinks, Connection]:
    """Return a rank's links and its connection to the leader, from the words that it was started with."""
    return inherit_links(words[1:]), Connection(int(words[0]))
