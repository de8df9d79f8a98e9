"""Accepting connections: all that wait, also after the system had no handle left for one."""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop

from penstock.server import serve
from penstock.server.serve import MAX_AT_ONCE, Acceptor, open_socket

NUM = 3 * MAX_AT_ONCE


class FullSystem(socket.socket):
    """A listening socket of a system that has no file handle left for the first connection, and then loses one."""

    failures: tuple[int, ...] = (errno.ECONNABORTED, errno.EMFILE)

    def accept(self) -> Any:
        if self.failures:
            code, self.failures = self.failures[-1], self.failures[:-1]
            raise OSError(code, "failed")
        return super().accept()


async def turns(listening: socket.socket) -> int:
    """Return the turns of the loop that it takes to accept NUM connections that wait already."""
    made: list[asyncio.BaseProtocol] = []
    clients = [socket.create_connection(listening.getsockname()) for _ in range(NUM)]

    def make() -> asyncio.BaseProtocol:
        made.append(asyncio.Protocol())
        return made[-1]

    accepting = Acceptor(listening, make)
    accepting.start()
    number = 0
    async with asyncio.timeout(60):
        while len(made) < NUM:
            await asyncio.sleep(0)
            number += 1
    accepting.close()
    for client in clients:
        client.close()
    return number


def run(make: Callable[[], socket.socket]) -> int:
    with make() as listening, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(turns(listening))


def test_connections_that_wait_are_accepted_at_once() -> None:
    """Guards against one connection per turn, as libuv does it: beside streams, nobody is refused in time."""
    assert run(lambda: open_socket("127.0.0.1", 0)) < NUM


def test_a_system_without_file_handles_recovers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a server that never accepts again, or that asks the system in a loop."""
    monkeypatch.setattr(serve, "RETRY_S", 0.01)
    run(lambda: FullSystem(fileno=open_socket("127.0.0.1", 0).detach()))
    assert caplog.text.count("cannot accept a connection") == 1


class Idle(asyncio.Protocol):
    """A connection that has been without a request for some seconds; None: one waits for its answer."""

    def __init__(self, idle_since: float | None) -> None:
        self.idle_since = idle_since
        self.transport = self
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_idle_strangers_do_not_take_the_last_file_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against connections without a request, which need no key, that keep the server from starting a helper."""
    monkeypatch.setattr(serve, "RESERVED", 2**21)  # more than there are: every connection takes one of the last
    there = [Idle(5.0), Idle(None), Idle(3.0)]

    async def accept(listening: socket.socket) -> None:
        made: list[asyncio.BaseProtocol] = []

        def make() -> asyncio.BaseProtocol:
            made.append(asyncio.Protocol())
            return made[-1]

        accepting = Acceptor(listening, make, connections=cast(Any, there))
        with socket.create_connection(listening.getsockname()):
            accepting.start()
            while not made:
                await asyncio.sleep(0.001)
        accepting.close()

    with open_socket("127.0.0.1", 0) as listening:
        asyncio.run(accept(listening))
    assert [one.aborted for one in there] == [False, False, True]


async def lingering(listening: socket.socket) -> list[int]:
    """Return how many connections were there each time that the acceptor had lingered."""
    made: list[asyncio.BaseProtocol] = []

    def make() -> asyncio.BaseProtocol:
        made.append(asyncio.Protocol())
        if len(made) < 3 and len(clients) < 3:  # another comes as the last one is accepted
            clients.append(socket.create_connection(listening.getsockname()))
        return made[-1]

    clients = [socket.create_connection(listening.getsockname())]
    accepting, counts = Acceptor(listening, make), []
    accepting.start()
    for _ in range(2):
        await accepting.linger()
        counts.append(len(made))
    accepting.close()
    for client in clients:
        client.close()
    return counts


def test_a_server_that_stops_takes_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that was sent before the end, and whose connection is reset instead of answered."""
    monkeypatch.setattr(serve, "LINGER_S", 0.05)
    with open_socket("127.0.0.1", 0) as listening, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(lingering(listening)) == [3, 3]
