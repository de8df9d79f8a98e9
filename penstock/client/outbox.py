"""Outbox: what an engine process sends to its client: frames, and heartbeats when it has none.

    a heartbeat every half second: the process is idle, or a build or a step computes or reads files

So silence means that a process is stopped or in a deadlock, however long its steps take: a long prompt of a large model
takes minutes.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from penstock.client import frames
from penstock.interface.messages import EngineStats
from penstock.ranks.children import Effort

HEARTBEAT_S = 0.5


class ClientGoneError(Exception):
    """The client's end of the socket is closed."""


class Outbox:
    """Sends frames over a socket, and heartbeats from a thread while `working`. Thread-safe."""

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        self.epoch = epoch
        self._sock = sock
        self._lock = threading.Lock()  # frames must not mix
        self._stats = EngineStats()  # of the newest frame that has stats
        self._working_since: float | None = None
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, frame: frames.FromEngine) -> None:
        """Send a frame. Raise ClientGoneError if the client is gone."""
        if isinstance(frame, frames.Ready | frames.Outputs | frames.Heartbeat):
            self._stats = frame.stats
        packed = frames.pack(frame)
        try:
            with self._lock:
                self._sock.sendall(packed)
        except ConnectionError as error:
            raise ClientGoneError from error

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Send heartbeats while the block runs, as long as this process computes or reads."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
            self._thread.start()
        self._working_since = time.monotonic()
        self._begun.set()
        try:
            yield
        finally:
            self._working_since = None
            self._begun.clear()

    def _beat(self) -> None:
        seen = Effort.so_far()
        while True:
            self._begun.wait()
            time.sleep(HEARTBEAT_S)
            since, now = self._working_since, Effort.so_far()
            if since is None or not now.exceeds(seen):
                continue
            seen = now
            # If the client is gone, the reader thread ends this process.
            with contextlib.suppress(ClientGoneError, OSError):
                self.send(frames.Heartbeat(self.epoch, self._stats, working_s=time.monotonic() - since))
