"""Accepts the waiting connections, up to 16 at a time.

libuv, and so uvloop, accepts one connection per turn of its loop. With many open streams a turn takes some
milliseconds, so at a few hundred new connections per second the rest wait in the kernel, where nothing refuses them. A
client that should get a 429 at once would then be answered only after the clients before it have been served.
"""

import asyncio
import errno
import logging
import math
import socket
from collections.abc import Callable

MAX_AT_ONCE = 16  # connections per turn of the event loop; streams continue in between
LINGER_S, MAX_LINGER_S = 0.2, 2.0  # time to accept more: after the last connection, and in all
RETRY_S = 0.2  # pause when the system has no file handle or memory left for another connection
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOGGER = logging.getLogger("penstock")


class Acceptor:
    """Gives each new connection of a listening, non-blocking socket to a new protocol, between `start` and `close`."""

    def __init__(self, sock: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._sock = sock
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._accepted_at = -math.inf

    def start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    async def linger(self) -> None:
        """Return when no connection has come for LINGER_S, and after MAX_LINGER_S at the latest.

        Closing the socket resets the connections that wait in the kernel, whose clients may have sent a request long
        ago. If they are accepted, they get an answer that says the server is stopping.
        """
        began = now = self._loop.time()
        while now < (until := min(max(began, self._accepted_at) + LINGER_S, began + MAX_LINGER_S)):
            await asyncio.sleep(until - now)
            now = self._loop.time()

    def close(self) -> None:
        """Stop accepting; the open connections continue."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in NO_RESOURCES:
                    self._pause(exc)
                    return
                continue  # this connection has already ended
            connection.setblocking(False)
            self._accepted_at = self._loop.time()
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the connection has ended meanwhile
            connection.close()

    def _pause(self, exc: OSError) -> None:
        """Leave new connections to the kernel for RETRY_S, instead of failing again and again."""
        LOGGER.error("cannot accept a connection: %s; trying again in %g s", exc.strerror, RETRY_S)
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(RETRY_S, self.start)
