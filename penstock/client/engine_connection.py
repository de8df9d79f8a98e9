"""The client's end of the connection to one engine process. It knows frames, but neither requests nor restarts.

EngineConnection concerns the connection alone, and engines on other machines have it too (ray_app/remote.py).
EngineChild also starts the process, as a child of this one. Launcher says which of the two a client uses.
"""

import asyncio
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.client import frames
from penstock.ranks.children import Effort, spawn

EXIT_WAIT_S = 5.0  # for the process to end on its own once the connection is closed
STDERR = 2  # output of the engine process joins our messages on stderr; stdout belongs to the user


class EngineConnection(ABC):
    """Our end of the connection to an engine process.

    Attributes:
        is_remote: whether the engine is on a machine that may be taken away at any time, so that its end is normal.
    """

    is_remote = False

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process id; None if there is no process, or it has ended."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Return the most physical memory that the process ever had; None if it is not known."""

    @abstractmethod
    def effort(self) -> Effort | None:
        """Return what the process has done so far; None if it is not known."""

    @abstractmethod
    async def connect(self) -> None:
        """Attach the connection to the running event loop."""

    @abstractmethod
    def hang_up(self) -> None:
        """Close our end. The process then exits, even in the middle of a step. A second call does nothing."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, even if it is stopped."""

    @abstractmethod
    def end(self) -> None:
        """End the process at once, and wait until it has ended; for use without an event loop."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the process and return its exit code."""

    def send(self, frame: frames.ToEngine) -> None:
        """Send a frame without waiting: frames are small, and the engine always reads. After hang_up it is dropped."""
        self.send_bytes(frames.pack(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send the result of `frames.pack`."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> frames.FromEngine | None:
        """Wait for the next frame; None at the end of the connection.

        Raises:
            InvalidFrameError: what arrived is not a frame.
        """
        if self._reader is None:
            return None
        try:
            length = frames.body_length(await self._reader.readexactly(frames.HEADER_BYTES))
            return frames.unpack_from_engine(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def reason_of(self, code: int) -> str:
        """Return why the engine ended, from its exit code."""
        if code == -signal.SIGBUS:
            return f"signal {-code}: a mapped file has become shorter, or its disk has failed"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class EngineChild(EngineConnection):
    """A running engine process and our end of its connection. Raise OSError if no process can be started.

    start: the first frame, sent at once, so that the engine loads while its client still starts.
    """

    def __init__(self, start: frames.Start) -> None:
        super().__init__()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        words = [str(theirs.fileno())]
        inherited = [theirs.fileno()] if start.ring is None else [theirs.fileno(), start.ring]
        try:
            self._process = spawn("penstock.client.engine_process", words, inherited=inherited, stdout=STDERR)
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()
        with suppress(OSError):  # it has died already: the end of the connection will show
            self._sock.sendall(frames.pack(start))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process.poll() is None else None

    def peak_memory_bytes(self) -> int | None:
        with suppress(OSError), open(f"/proc/{self._process.pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)
        return None

    def effort(self) -> Effort:
        return Effort.of([self._process.pid])

    async def connect(self) -> None:
        """Attach the connection to the running event loop, unless it has been closed."""
        if self._sock.fileno() < 0:
            return
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    def hang_up(self) -> None:
        if self._writer is None:
            self._sock.close()
        else:
            with suppress(RuntimeError):  # its event loop is closed; the connection ends with the process
                self._writer.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def end(self) -> None:
        self.hang_up()
        self.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for the process and return its exit code. Kill it after EXIT_WAIT_S."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
            await asyncio.sleep(0.005)
        return code


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a client gets its engines.

    Attributes:
        start: starts an engine, given its first frame, and makes the connection to it.
        num_engines: most engines.
        num_initial: engines that must be ready before requests are taken; the others join when they can. None: all.
    """

    start: Callable[[frames.Start], EngineConnection] = EngineChild
    num_engines: int = 1
    num_initial: int | None = None
