"""Where the processes of ranks run, and how they are connected: a Launcher. HostLauncher starts them on this machine,
ray_launcher.py on those of a Ray cluster.

    ours, theirs = launcher.connect(HERE, 1)                an end for each; that of this process is a socket
    launcher.start(1, "penstock.assembly.ranks", [theirs])  its command line; an end becomes a descriptor's number
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.parallel.spawn import spawn

HERE = 0  # the number of this process; others count from 1
STDERR = 2  # output of a rank joins our messages; stdout belongs to the user


class Process(Protocol):
    """A rank's process, like subprocess.Popen's."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raise subprocess.TimeoutExpired if it has not ended by then, or cannot be asked."""

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts the processes of ranks.

    Attributes:
        shares_memory: the processes have memory in common.
    """

    shares_memory: bool

    def connect(self, one: int, other: int) -> tuple[Any, Any]:
        """Return both ends of a new connection between two processes, the lower number first."""

    def start(self, number: int, module: str, words: Sequence[Any]) -> Process | None:
        """Run `module.main(words)` in a process; ends become descriptors there. Raise OSError if it cannot be started.

        None: it is no process, but a thread of this one.
        """

    def free_memory_bytes(self, measure: Callable[[], int]) -> int:
        """Return the memory that all processes together can take. measure: finds the free memory of a machine."""

    def close(self) -> None:
        """Give back what was reserved for the processes, and end those that still run."""


class HostLauncher:
    """Starts processes on this machine."""

    shares_memory = True

    def connect(self, one: int, other: int) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection."""
        return socket.socketpair()

    def start(self, number: int, module: str, words: Sequence[Any]) -> Process | None:
        """Run a module in a process that inherits its ends."""
        inherited = [word.fileno() for word in words if not isinstance(word, str)]
        plain = [word if isinstance(word, str) else str(word.fileno()) for word in words]
        return spawn(module, plain, inherited=inherited, stdout=STDERR)

    def free_memory_bytes(self, measure: Callable[[], int]) -> int:
        """Return the free memory of this machine."""
        return measure()

    def close(self) -> None:
        """Do nothing: nothing was reserved."""
