"""EngineChild: one engine process and the connection to it. Knows frames, but no request and no restart."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from penstock.client import frames

EXIT_WAIT_S = 5.0  # for the process to end by itself once the connection is closed
STDERR = 2  # output of the engine process joins our messages on stderr; stdout belongs to the user
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class EngineChild:
    """A running engine process and our end of its connection. Raise OSError if no process can be started.

    start: sent at once, so that the engine loads while its client still starts.
    """

    def __init__(self, start: frames.Start) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        # -P keeps the current directory off the path: a queue.py there must not become the engine's.
        command = [sys.executable, "-P", "-m", "penstock.client.engine_main", str(os.getpid()), str(theirs.fileno())]
        inherited = [theirs.fileno()] if start.ring is None else [theirs.fileno(), start.ring]
        try:
            self._process = _starter().submit(_run, command, inherited).result()
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()
        with suppress(OSError):  # it has died already: the end of the connection will tell
            self._sock.sendall(frames.pack(start))

    @property
    def pid(self) -> int | None:
        """Return the process id; None once it has ended."""
        return self._process.pid if self._process.poll() is None else None

    def peak_memory_bytes(self) -> int | None:
        """Return the most physical memory that the process ever had; None once it has ended."""
        with suppress(OSError), open(f"/proc/{self._process.pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)
        return None

    async def connect(self) -> None:
        """Attach the connection to the running event loop."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    def send(self, frame: frames.ToEngine) -> None:
        """Send a frame without waiting: frames are small, and the child always reads. Dropped once hung up."""
        self.send_bytes(frames.pack(frame))

    def send_bytes(self, data: bytes) -> None:
        """Send what `frames.pack` gave."""
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
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def hang_up(self) -> None:
        """Close our end. The process then exits, even in the middle of a step. A second call does nothing."""
        if self._writer is None:
            self._sock.close()
        else:
            self._writer.close()

    def kill(self) -> None:
        """End the process at once, even if it is stopped."""
        if self._process.poll() is None:
            self._process.kill()

    def end(self) -> None:
        """End the process at once, and wait until it has ended; for use without an event loop."""
        self.hang_up()
        self.kill()
        self._process.wait()

    async def wait(self) -> int:
        """Wait for the process and return its exit code; it is killed after EXIT_WAIT_S."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
            await asyncio.sleep(0.005)
        return code


_starters: dict[int, ThreadPoolExecutor] = {}  # by process id: a process that was forked needs a thread of its own


def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts engine processes, and lives as long as this process: they die with the thread that
    started them, and a user's may end early."""
    return _starters.setdefault(os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="starter of engines"))


def _run(command: list[str], inherited: list[int]) -> "subprocess.Popen[bytes]":
    """Start a process that inherits these file descriptors."""
    return subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=STDERR, env=environment())


def environment() -> dict[str, str]:
    """Return our environment, with PYTHONPATH set where the package is not installed (a checkout)."""
    installed = any(os.path.basename(part) in ("site-packages", "dist-packages") for part in PACKAGE_ROOT.split(os.sep))
    if installed:
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": PACKAGE_ROOT if not known else f"{PACKAGE_ROOT}{os.pathsep}{known}"}
