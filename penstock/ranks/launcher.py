"""Launcher: starts and connects the processes of ranks. HostLauncher starts them on this machine; a plug-in may start
them elsewhere.

    ours, theirs = launcher.connect(HERE, 1)          one end for each process; this process's end is a socket
    launcher.start(1, PROCESS, ["group", theirs])    the process's words; an end becomes a descriptor's number

A plug-in is an entry point of the group penstock.launchers, named as in --distributed-executor-backend. It is loaded
only when a config asks for it.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.interface import entry_points
from penstock.ranks.children import spawn

PROCESS = "penstock.ranks.process"  # the module that a rank runs
HERE = 0  # the number of this process; the others are numbered from 1
STDERR = 2  # a rank's output goes to stderr, because stdout belongs to the user


class Process(Protocol):
    """A rank's process, like subprocess.Popen's."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float) -> int:
        """Wait for the exit code. Raise TimeoutExpired if the process does not end in time, or cannot be reached."""

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts the processes of ranks.

    Attributes:
        shares_memory: whether the processes can share memory.
    """

    shares_memory: bool

    def connect(self, one: int, other: int) -> tuple[Any, Any]:
        """Connect two processes, and return both ends; the lower number comes first."""

    def start(self, number: int, module: str, words: Sequence[Any]) -> Process | None:
        """Run `module.main(words)` in a process, where connection ends among the words become descriptors.

        Return None if it runs in a thread of this process. Raise OSError if it cannot be started.
        """

    def free_memory_bytes(self, measure: Callable[[], int]) -> int:
        """Measure the memory that all processes together can take. measure: returns a machine's free memory."""

    def close(self) -> None:
        """Release what was reserved for the processes, and end those that still run."""


class HostLauncher:
    """Starts processes on this machine."""

    shares_memory = True

    def connect(self, one: int, other: int) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def start(self, number: int, module: str, words: Sequence[Any]) -> Process | None:
        """Run a module in a process that inherits its connection ends."""
        inherited = [word.fileno() for word in words if not isinstance(word, str)]
        plain = [word if isinstance(word, str) else str(word.fileno()) for word in words]
        return spawn(module, plain, inherited=inherited, stdout=STDERR)

    def free_memory_bytes(self, measure: Callable[[], int]) -> int:
        """Measure this machine only, because all processes share it."""
        return measure()

    def close(self) -> None:
        """Do nothing, because nothing was reserved."""


def open_launcher(config: EngineConfig) -> Launcher:
    """Open the launcher of a resolved config's ranks.

    Raises:
        InvalidRequestError: the plug-in that the config names is not installed, or cannot be used.
        EngineError: it has no room for the ranks.
    """
    option, name = "distributed_executor_backend", config.parallel.distributed_executor_backend
    if name == "mp":
        return HostLauncher()
    launcher: Launcher = entry_points.load("launchers", name, option)(config, option)
    return launcher
