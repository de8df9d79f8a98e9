"""The client's end of engines on a Ray cluster: EnginePool leases replicas, RemoteEngine is the engine in one."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import structs
from ray.serve.handle import DeploymentHandle

from penstock.client import frames
from penstock.client.child import EngineConnection, Launcher
from penstock.client.engine_client import EngineClient
from penstock.interface.messages import EngineStats
from penstock.parallel.door import tune
from penstock.ray_app.engines import ENGINE, LOAD, LOAD_FORMAT

LOGGER = logging.getLogger("penstock")
HEARTBEAT_S = 0.5  # while a lease is waited for
REPORT_S = 1.0  # between two reports of what is queued
CONNECT_S = 10.0
EXIT_WAIT_S = 5.0  # for an engine to end once the connection is closed
LEASE_AGAIN_S = 0.5  # after a lease that came to nothing
UNKNOWN_CODE = 1
# What LeaseRouter (routing.py) has to know of this process, or tell it. Not in its own file: Serve sends the class to
# others with copies of what lies beside it.
refused_nodes: set[str] = set()  # machines that compute with other bits
listeners: list[Callable[[set[str]], None]] = []  # called with the ids of the replicas that stay, in Serve's thread


class EnginePool:
    """The replicas of one deployment, as engines of one client.

    Args:
        handle: of the deployment of EngineReplica.
        num_engines: that the client uses at most.
        num_initial: without which it takes no requests.

    Attributes:
        client: whose queued tokens are reported to the autoscaler; None: nothing is.
        fingerprint: of the engines; one with another is refused, and its machine with it.
    """

    def __init__(self, handle: DeploymentHandle[Any], num_engines: int, num_initial: int) -> None:
        self.handle = handle
        self.client: EngineClient | None = None
        self.fingerprint: str | None = None
        self.launcher = Launcher(self._start, num_engines, num_initial)
        self._engines: set[RemoteEngine] = set()
        self._reporting: asyncio.Task[None] | None = None

    def _start(self, start: frames.Start) -> "RemoteEngine":
        return RemoteEngine(self, start)

    def add(self, engine: "RemoteEngine") -> None:
        """Watch an engine's replica."""
        if self._reporting is None:
            loop = asyncio.get_running_loop()
            listeners.append(lambda staying: _in_loop(loop, self._update, staying))
            self._reporting = asyncio.create_task(self._report(), name="queued tokens")
        self._engines.add(engine)

    def remove(self, engine: "RemoteEngine") -> None:
        """Forget an engine that has ended."""
        self._engines.discard(engine)

    def _update(self, staying: set[str]) -> None:
        for engine in self._engines:
            if engine.replica is not None and engine.replica not in staying:
                engine.is_leaving = True

    async def _report(self) -> None:
        """Tell the replicas what is queued; each one an equal share, because the autoscaler adds them."""
        while True:
            await asyncio.sleep(REPORT_S)
            connected = [engine for engine in self._engines if engine.replica is not None]
            if self.client is not None and connected:
                share = self.client.status().queued_tokens / len(connected)
                for engine in connected:
                    engine.report(share)


class RemoteEngine(EngineConnection):
    """An engine process in a replica, from the wish for a lease to the end of the engine.

    Attributes:
        replica: that has the engine; None before there is a connection, and after it.
        is_leaving: Serve is going to stop the replica.
    """

    is_remote = True

    def __init__(self, pool: EnginePool, start: frames.Start) -> None:
        super().__init__()
        self.replica: str | None = None
        self.is_leaving = False
        self._said_so = False
        self._pool = pool
        self._start = start
        self._place = "no replica"
        self._node = ""
        self._pid: int | None = None
        self._code = UNKNOWN_CODE
        self._load: socket.socket | None = None
        self._decided = asyncio.Event()  # connected, or hung up
        self._leasing: asyncio.Task[None] | None = None
        self._hung_up = False

    @property
    def pid(self) -> int | None:
        return self._pid

    def peak_memory_bytes(self) -> int | None:
        return None

    def effort(self) -> None:
        return None

    def reason_of(self, code: int) -> str:
        return f"{self._place}: " + ("the connection ended" if code == UNKNOWN_CODE else super().reason_of(code))

    async def connect(self) -> None:
        """Begin to wait for a lease; `receive` gives heartbeats meanwhile."""
        if not self._hung_up:
            self._pool.add(self)
            self._leasing = asyncio.create_task(self._lease(), name="lease of an engine")

    async def receive(self) -> frames.FromEngine | None:
        if not self._decided.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._decided.wait()
            return frames.Heartbeat(self._start.epoch, EngineStats())
        if self.is_leaving and not self._said_so:
            self._said_so = True
            return frames.Leaving(self._start.epoch)
        frame = await super().receive()
        if isinstance(frame, frames.Ready) and not self._is_welcome(frame.info.system_fingerprint):
            return None
        return frame

    def report(self, queued_tokens: float) -> None:
        """Tell the replica its share of what is queued; a connection that is full has older news, which will do."""
        if self._load is not None:
            with suppress(OSError):
                self._load.send(LOAD_FORMAT.pack(queued_tokens))

    def hang_up(self) -> None:
        self._hung_up = True
        self._decided.set()
        self.replica = None
        self._pool.remove(self)
        if self._writer is not None:
            self._writer.close()
        elif self._leasing is not None:
            self._leasing.cancel()
        if self._load is not None:
            self._load.close()
            self._load = None

    def kill(self) -> None:
        if self._leasing is not None:
            self._leasing.cancel()  # the replica ends the engine
        self.hang_up()

    def end(self) -> None:
        self.hang_up()

    async def wait(self) -> int:
        """Wait for the lease to end, at most EXIT_WAIT_S, and return the exit code as far as it is known."""
        if self._leasing is not None:
            await asyncio.wait([self._leasing], timeout=EXIT_WAIT_S)
            self._leasing.cancel()
            await asyncio.wait([self._leasing])
        return self._code

    def _is_welcome(self, fingerprint: str) -> bool:
        """Return whether the engine computes like the first one; else its machine gets no lease any more."""
        self._pool.fingerprint = self._pool.fingerprint or fingerprint
        if fingerprint == self._pool.fingerprint:
            return True
        refused_nodes.add(self._node)
        LOGGER.error(
            "%s is refused, and its machine with it: it computes with other bits (%s, not %s). Give all machines the "
            "same files and instruction level (PENSTOCK_CPU_LEVEL)", self._place, fingerprint, self._pool.fingerprint,
        )  # fmt: skip
        return False

    async def _lease(self) -> None:
        """Get a replica and keep it until its engine has ended."""
        try:
            while True:
                try:
                    await self._hold()
                except Exception as error:  # whatever Ray raises: a replica that dies, or cannot be reached
                    LOGGER.info("%s: the lease ended: %r", self._place, str(error).partition("\n")[0])
                    if self._decided.is_set():
                        self.hang_up()  # the machine may be gone without a word
                if self._decided.is_set():
                    return
                await asyncio.sleep(LEASE_AGAIN_S)
        except asyncio.CancelledError:
            self.hang_up()
            raise

    async def _hold(self) -> None:
        stream = self._pool.handle.options(stream=True).lease.remote()
        try:
            async for item in stream:
                if "address" in item:
                    await self._dial(item)
                self._pid, self._code = item.get("pid"), item.get("code", self._code)
        finally:
            with suppress(Exception):
                stream.cancel()

    async def _dial(self, place: dict[str, Any]) -> None:
        """Connect to the replica, and send the engine its first frame."""
        self._place, self._node = f"replica {place['replica']} on node {place['node'][:8]}", place["node"]
        if self._load is not None:  # of an attempt that failed
            self._load.close()
        async with asyncio.timeout(CONNECT_S):
            self._load = await _connect(place["address"], place["token"] + LOAD)
            sock = await _connect(place["address"], place["token"] + ENGINE)
            self._reader, self._writer = await asyncio.open_connection(sock=sock)
        first = structs.replace(self._start, ring=None, num_engines=place["num_engines"])
        self._writer.write(frames.pack(first))
        self.replica = place["replica"]
        self._decided.set()


async def _connect(address: tuple[str, int], hello: bytes) -> socket.socket:
    """Return a connection that has said these bytes."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, tuple(address))
        tune(sock)
        await loop.sock_sendall(sock, hello)
    except BaseException:
        sock.close()
        raise
    return sock


def _in_loop(loop: asyncio.AbstractEventLoop, function: Any, *args: Any) -> None:
    """Call a function in the client's event loop, unless that has been closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
