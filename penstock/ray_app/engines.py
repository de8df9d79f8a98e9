"""EngineReplica: the Serve deployment whose replicas are places for engine processes. Runs on every machine.

A replica holds one lease at a time. The lease is a call that lasts as long as the engine, so that Serve counts it as an
ongoing request: a replica that has an engine is not free, and is not stopped before the engine has ended.
"""

import asyncio
import contextlib
import math
import secrets
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingContext

from penstock.parallel.spawn import spawn

TOKEN_BYTES = 32
ENGINE, LOAD = b"e", b"l"  # what a connection is for: the byte after its token
CONNECT_S = 30.0  # for the client to connect, once it has the lease
HELLO_S = 5.0  # for a connection to say its token
LOAD_FORMAT = struct.Struct("<d")
STDERR = 2  # output of the engine joins that of the replica, which Ray collects
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


def tune(sock: socket.socket) -> None:
    """Send frames at once, and notice within about 20 seconds that the other machine is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class EngineReplica:
    """A place for one engine process after the other.

    Args:
        num_cpus: cores that Ray reserves for it.
    """

    def __init__(self, num_cpus: float) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        cores = next(node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["NodeID"] == node_id)
        self._place = {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": node_id,
            "num_engines": max(1, math.floor(cores / num_cpus)),  # that this machine may have to bear
        }
        self._queued_tokens = 0.0

    async def lease(self) -> AsyncGenerator[dict[str, Any], None]:
        """Start an engine for the caller and bear it until it ends.

        Yields where to connect to and with which token, then the engine's process id, then its exit code. The caller
        connects twice: for the engine's frames, and to say what is queued.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with _Door(token) as door:
            yield {"address": door.address, "token": token, **self._place}
            engine, load = await asyncio.wait_for(door.both(), CONNECT_S)
        with load:
            with engine:
                descriptor = engine.fileno()
                engine.setblocking(True)
                module, words = "penstock.client.engine_process", [str(descriptor)]
                process = spawn(module, words, inherited=[descriptor], stdout=STDERR)
            reading = asyncio.create_task(self._read_load(load), name="queued tokens")
            try:
                yield {"pid": process.pid}
                yield {"code": await asyncio.to_thread(process.wait)}
            finally:
                reading.cancel()
                self._queued_tokens = 0.0
                if process.poll() is None:
                    process.kill()

    async def _read_load(self, load: socket.socket) -> None:
        """Note what the client says is queued, until it hangs up."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                (self._queued_tokens,) = LOAD_FORMAT.unpack(await _read_exactly(load, LOAD_FORMAT.size))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve's autoscaler this replica's share of what is queued."""
        return {"queued_tokens": self._queued_tokens}


class ByQueuedTokens:
    """An autoscaling policy of Serve: as many replicas as queued tokens need.

    Args:
        target_queued_tokens: that one replica should have.
    """

    def __init__(self, target_queued_tokens: float) -> None:
        self._target = target_queued_tokens

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = ctx.aggregated_metrics or {}
        queued = sum(metrics.get("queued_tokens", {}).values())
        wanted = math.ceil(queued / self._target)
        return max(ctx.capacity_adjusted_min_replicas, min(wanted, ctx.capacity_adjusted_max_replicas)), {}


class _Door:
    """A listening socket that lets in the two connections which know the token."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._socket = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._socket.setblocking(False)
        self._let_in: dict[bytes, socket.socket] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        for task in self._asking:
            task.cancel()
        if not self._complete.is_set():  # else they belong to whoever waited for them
            for connection in self._let_in.values():
                connection.close()

    async def both(self) -> tuple[socket.socket, socket.socket]:
        """Return the connections for frames and for the load."""
        accepting = asyncio.create_task(self._accept(), name="connections to a new engine")
        try:
            await self._complete.wait()
        finally:
            accepting.cancel()
        return self._let_in[ENGINE], self._let_in[LOAD]

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            task = asyncio.create_task(self._ask(connection))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, connection: socket.socket) -> None:
        """Let a connection in if it has the token; close it otherwise."""
        connection.setblocking(False)
        hello = b""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await _read_exactly(connection, TOKEN_BYTES + 1)
        except (OSError, EOFError, TimeoutError):
            pass
        except asyncio.CancelledError:
            connection.close()
            raise
        kind = hello[TOKEN_BYTES:]
        known = secrets.compare_digest(hello[:TOKEN_BYTES], self._token)
        if not known or kind not in (ENGINE, LOAD) or kind in self._let_in:
            connection.close()
            return
        tune(connection)
        self._let_in[kind] = connection
        if len(self._let_in) == 2:
            self._complete.set()


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    """Return so many bytes. Raise EOFError at the end of the connection."""
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
