"""Connections between processes of one service on several machines: a Door listens, `dial` connects.

    the caller sends at once:  the door's token (32 random bytes), then a label that names the connection (4 bytes)

Callers get the token through Ray. A connection that sends something else, or nothing, is closed.
"""

import asyncio
import secrets
import socket

TOKEN_BYTES, LABEL_BYTES = 32, 4
HELLO_S = 5.0  # time limit for a connection to send its token
DIAL_S = 10.0
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


def tune(sock: socket.socket) -> None:
    """Make a socket send frames at once, and notice within about 20 seconds that the other machine has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def dial(address: tuple[str, int], hello: bytes) -> socket.socket:
    """Connect to a door. Raise OSError if that fails. hello: token and label."""
    sock = socket.create_connection((address[0], address[1]), DIAL_S)
    try:
        tune(sock)
        sock.sendall(hello)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class Door:
    """A listening socket that accepts connections with the token, one for each label."""

    def __init__(self, token: bytes, host: str) -> None:
        """host: the address of this machine that other machines can reach."""
        self._token = token
        self._socket = socket.create_server((host, 0))
        self._socket.setblocking(False)
        self._admitted: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._admitting: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and close the connections that were not taken."""
        for task in (*self._admitting, *filter(None, [self._accepting])):
            task.cancel()
        self._socket.close()
        for found in self._admitted.values():
            if found.done() and not found.cancelled():
                found.result().close()
            found.cancel()
        self._admitted.clear()

    async def accept(self, *labels: bytes, within_s: float) -> list[socket.socket]:
        """Wait until all connections with these labels have come. Return them, non-blocking; the caller owns them.

        Raises:
            TimeoutError: one of them has not come in time, perhaps because its process has ended.
        """
        if self._accepting is None:
            self._accepting = asyncio.create_task(self._accept_all(), name="connections to a door")
        waited = [self._expect(label) for label in labels]
        _, missing = await asyncio.wait(waited, timeout=within_s)
        if missing:
            raise TimeoutError(f"{len(missing)} of {len(labels)} connections have not come in {within_s:g} s")
        for label in labels:
            del self._admitted[label]
        return [item.result() for item in waited]

    def _expect(self, label: bytes) -> "asyncio.Future[socket.socket]":
        return self._admitted.setdefault(label, asyncio.get_running_loop().create_future())

    async def _accept_all(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            task = asyncio.create_task(self._admit(connection))
            self._admitting.add(task)
            task.add_done_callback(self._admitting.discard)

    async def _admit(self, connection: socket.socket) -> None:
        """Accept a connection if it sends the token; close it otherwise."""
        connection.setblocking(False)
        hello = b""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await read_exactly(connection, TOKEN_BYTES + LABEL_BYTES)
        except (OSError, EOFError, TimeoutError):
            pass
        except asyncio.CancelledError:
            connection.close()
            raise
        known = secrets.compare_digest(hello[:TOKEN_BYTES], self._token) and len(hello) == TOKEN_BYTES + LABEL_BYTES
        if not known or self._expect(hello[TOKEN_BYTES:]).done():
            connection.close()
            return
        tune(connection)
        self._expect(hello[TOKEN_BYTES:]).set_result(connection)


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raise EOFError at the end of the connection."""
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
