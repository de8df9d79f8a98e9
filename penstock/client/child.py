"""EngineChild: one engine process and the connection to it. Knows frames, but no request and no restart."""

import asyncio
import socket
import time
from contextlib import suppress

from penstock.client import frames
from penstock.parallel.spawn import spawn

EXIT_WAIT_S = 5.0  # for the process to end by itself once the connection is closed
STDERR = 2  # output of the engine process joins our messages on stderr; stdout belongs to the user


class EngineChild:
    """A running engine process and our end of its connection. Raise OSError if no process can be started.

    start: sent at once, so that the engine loads while its client still starts.
    """

    def __init__(self, start: frames.Start) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        words = [str(theirs.fileno())]
        inherited = [theirs.fileno()] if start.ring is None else [theirs.fileno(), start.ring]
        try:
            self._process = spawn("penstock.client.engine_process", words, inherited=inherited, stdout=STDERR)
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
        """Attach the connection to the running event loop, unless it has been closed."""
        if self._sock.fileno() < 0:
            return
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
