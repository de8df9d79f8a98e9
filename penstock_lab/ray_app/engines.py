"""EngineReplica: the Serve deployment whose replicas are places for engine processes. Runs on every machine.

A replica holds one lease at a time. The lease is a call that lasts as long as the engine, and Serve counts it as an
ongoing request. So a replica with an engine is not free, and is not stopped before the engine has ended.
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

from penstock.ranks.children import spawn
from penstock_lab.ray_app.door import TOKEN_BYTES, Door, read_exactly

ENGINE, LOAD = b"engi", b"load"  # labels of connections
CONNECT_S = 30.0  # time limit for the client to connect once it has the lease
LOAD_FORMAT = struct.Struct("<d")
STDERR = 2  # the engine's output joins that of the replica, which Ray collects


class EngineReplica:
    """A place that runs engine processes, one at a time.

    Args:
        num_cpus: cores that Ray reserves for it.
    """

    def __init__(self, num_cpus: float) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        cores = next(node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["NodeID"] == node_id)
        self._place = {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": node_id,
            "num_engines": max(1, math.floor(cores / num_cpus)),  # engines that this machine may have to run
        }
        self._queued_tokens = 0.0

    async def lease(self) -> AsyncGenerator[dict[str, Any], None]:
        """Start an engine for the caller and keep the lease until it ends.

        Yields the address and token to connect with, then the engine's process id, then its exit code. The caller
        connects twice: for the engine's frames, and to report queued tokens.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with Door(token, ray.util.get_node_ip_address()) as door:
            yield {"address": door.address, "token": token, **self._place}
            engine, load = await door.accept(ENGINE, LOAD, within_s=CONNECT_S)
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
        """Store the queued tokens that the client reports, until it disconnects."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                (self._queued_tokens,) = LOAD_FORMAT.unpack(await read_exactly(load, LOAD_FORMAT.size))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report this replica's share of the queued tokens to Serve's autoscaler."""
        return {"queued_tokens": self._queued_tokens}


class ByQueuedTokens:
    """An autoscaling policy for Serve: as many replicas as the queued tokens need.

    Args:
        target_queued_tokens: queued tokens that one replica should have.
    """

    def __init__(self, target_queued_tokens: float) -> None:
        self._target = target_queued_tokens

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = ctx.aggregated_metrics or {}
        queued = sum(metrics.get("queued_tokens", {}).values())
        wanted = math.ceil(queued / self._target)
        return max(ctx.capacity_adjusted_min_replicas, min(wanted, ctx.capacity_adjusted_max_replicas)), {}
