"""The client's end of engines on a Ray cluster: EnginePool leases replicas, RemoteEngine is the engine in a replica."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec import structs
from ray.serve.handle import DeploymentHandle

from penstock.client import frames
from penstock.client.engine_client import EngineClient
from penstock.client.engine_handle import EngineConnection, EnginePlan
from penstock.interface.messages import EngineStats
from penstock_lab.ray_app.door import tune
from penstock_lab.ray_app.engines import ENGINE, LOAD, LOAD_FORMAT

LOGGER = logging.getLogger("penstock")
HEARTBEAT_S = 0.5  # between heartbeats while waiting for a lease
REPORT_S = 1.0  # between two reports of queued tokens
CONNECT_S = 10.0
EXIT_WAIT_S = 5.0  # time for an engine to end once the connection is closed
LEASE_AGAIN_S = 0.5  # pause after a lease that failed
UNKNOWN_CODE = 1
# State that this process shares with LeaseRouter (routing.py). It is not in that file, because Serve sends the class to
# other processes with copies of the globals beside it.
refused_nodes: set[str] = set()  # machines whose engines give different bits
listeners: list[Callable[[set[str]], None]] = []  # called in Serve's thread with the ids of the replicas that stay


class EnginePool:
    """The replicas of one deployment, as engines of one client.

    Args:
        handle: the handle of the EngineReplica deployment.
        num_engines: the largest number of engines that the client uses.
        num_initial: the number of engines that the client needs before it takes requests.

    Attributes:
        client: the client whose queued tokens are reported to the autoscaler; None: no reports.
        fingerprint: the fingerprint of the engines; an engine with another one is refused, and so is its machine.
    """

    def __init__(self, handle: DeploymentHandle[Any], num_engines: int, num_initial: int) -> None:
        self.handle = handle
        self.client: EngineClient | None = None
        self.fingerprint: str | None = None
        self.engine_plan = EnginePlan(self._start, num_engines, num_initial)
        self._engines: set[RemoteEngine] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # while there are engines
        self._reporting: asyncio.Task[None] | None = None

    def _start(self, start: frames.Start) -> "RemoteEngine":
        return RemoteEngine(self, start)

    def add(self, engine: "RemoteEngine") -> None:
        """Watch an engine's replica."""
        if self._reporting is None:
            self._loop = asyncio.get_running_loop()
            self._reporting = asyncio.create_task(self._report(), name="queued tokens")
            listeners.append(self._listen)
        self._engines.add(engine)

    def remove(self, engine: "RemoteEngine") -> None:
        """Forget an engine that has ended, and with the last one what was started for the first."""
        self._engines.discard(engine)
        if not self._engines and self._reporting is not None:
            listeners.remove(self._listen)
            _in_loop(self._loop, self._reporting.cancel)
            self._loop = self._reporting = None

    def _listen(self, staying: set[str]) -> None:
        _in_loop(self._loop, self._update, staying)

    def _update(self, staying: set[str]) -> None:
        for engine in self._engines:
            if engine.replica is not None and engine.replica not in staying:
                engine.is_leaving = True

    async def _report(self) -> None:
        """Report the queued tokens to the replicas in equal shares, because the autoscaler adds them."""
        while True:
            await asyncio.sleep(REPORT_S)
            connected = [engine for engine in self._engines if engine.replica is not None]
            if self.client is not None and connected:
                share = self.client.status().queued_tokens / len(connected)
                for engine in connected:
                    engine.report(share)


class RemoteEngine(EngineConnection):
    """An engine process in a replica, from the request for a lease to the end of the engine.

    Attributes:
        replica: the replica that has the engine; None before the connection is made and after it ends.
        is_leaving: whether Serve is going to stop the replica.
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
        self._decided = asyncio.Event()  # set when connected or disconnected
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
        """Start waiting for a lease; `receive` returns heartbeats meanwhile."""
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
        """Report the replica's share of the queued tokens. If the connection is full, the older report suffices."""
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
        """Wait at most EXIT_WAIT_S for the lease to end. Return the exit code, or UNKNOWN_CODE."""
        if self._leasing is not None:
            await asyncio.wait([self._leasing], timeout=EXIT_WAIT_S)
            self._leasing.cancel()
            await asyncio.wait([self._leasing])
        return self._code

    def _is_welcome(self, fingerprint: str) -> bool:
        """Check that the engine gives the bits of the first one. If not, its machine gets no more leases."""
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
        """Lease a replica and keep it until its engine has ended."""
        try:
            while True:
                try:
                    await self._hold()
                except Exception as error:  # from Ray: a replica dies or cannot be reached
                    LOGGER.info("%s: the lease ended: %r", self._place, str(error).partition("\n")[0])
                    if self._decided.is_set():
                        self.hang_up()  # the machine may have vanished
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
        if self._load is not None:  # left by an attempt that failed
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
    """Connect to an address and send the bytes of `hello`. Return the connection."""
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


def _in_loop(loop: asyncio.AbstractEventLoop | None, function: Any, *args: Any) -> None:
    """Call a function in the client's event loop, unless there is none any more."""
    if loop is not None:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(function, *args)
