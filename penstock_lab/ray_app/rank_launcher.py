"""RayLauncher: ranks on the machines of a Ray cluster. Ray decides where they run, and notices when a machine is lost.

    engine process (HERE)                                     a Place: an actor for each rank, with its share of cores
      places = a placement group with a bundle for each rank
      connect: dials the place's door  ---------------------->  keeps the connection for the rank
      start(module, words)             --- through Ray ------>  spawns the rank's process, which inherits them

From then on the ranks communicate with each other and with the engine over TCP; no part of a step passes through Ray. A
rank dies with its place, and a place with the engine that asked for it. A rank that cannot use the engine's instruction
level does not start.
"""

import asyncio
import os
import secrets
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock import EngineConfig, EngineError
from penstock.kernels.cpu.library import chosen_level
from penstock.ranks.children import Effort, children, count_elsewhere, spawn
from penstock.ranks.launcher import HERE, STDERR
from penstock_lab.ray_app.cluster import join_cluster
from penstock_lab.ray_app.door import LABEL_BYTES, TOKEN_BYTES, Door, dial

PLACE_S = 60.0  # time limit for Ray to find places, which may first have to be freed, and for each answer of a place
READING_INTERVAL_S = 1.0  # between two readings of the remote ranks' processor time
LEVEL = "PENSTOCK_CPU_LEVEL"


def open_launcher(config: EngineConfig, option: str) -> "RayLauncher":
    """Join the cluster named by RAY_ADDRESS, or this machine's Ray, and reserve places for a config's ranks.

    option: the option that asks for the cluster, for error messages.

    Raises:
        InvalidRequestError: there is no cluster.
        EngineError: the cluster has no room.
    """
    join_cluster(option)
    size, stages = config.parallel.num_ranks, config.parallel.pipeline_parallel_size
    here = 1 if stages == 1 else 0  # without stages, this process is one of the ranks
    return RayLauncher(here, size * stages - here, config.numerics.threads or 1, chosen_level())


@dataclass(frozen=True, slots=True)
class Wire:
    """One end of a connection between processes on two machines; the end without an address waits to be dialled."""

    label: bytes
    address: tuple[str, int] | None = None

    def close(self) -> None:
        """Do nothing, because the connection is not made in this process."""


class Place:
    """The actor that starts one rank.

    Args:
        token: opens the doors of the engine's places.
        level: the instruction level of the engine, if it has one.
    """

    def __init__(self, token: bytes, level: str | None) -> None:
        self._token = token
        self._door = Door(token, ray.util.get_node_ip_address())
        self._process: subprocess.Popen[bytes] | None = None
        if level is not None:
            os.environ[LEVEL] = level

    async def address(self) -> tuple[str, int]:
        return self._door.address

    async def measure(self, measure: Callable[[], int]) -> tuple[str, int]:
        """Call `measure` on the node, and return the node's id with the result."""
        return ray.get_runtime_context().get_node_id(), measure()

    async def start(self, module: str, words: list[str | Wire]) -> int:
        """Run a module in a process. Return its process id.

        Raises:
            OSError: the process cannot be started, or its connections to the other ranks cannot be made. Those to this
                place are then closed, so that no other rank waits for this one.
        """
        with self._door, ExitStack() as inherited:
            ends = [
                inherited.enter_context(await self._connect(word)) if isinstance(word, Wire) else word for word in words
            ]
            descriptors = [end.fileno() for end in ends if isinstance(end, socket.socket)]
            plain = [end if isinstance(end, str) else str(end.fileno()) for end in ends]
            self._process = spawn(module, plain, inherited=descriptors, stdout=STDERR)
        return self._process.pid

    async def _connect(self, wire: Wire) -> socket.socket:
        if wire.address is None:
            (found,) = await self._door.accept(wire.label, within_s=PLACE_S)
        else:
            found = await asyncio.to_thread(dial, wire.address, self._token + wire.label)
        found.setblocking(True)
        return found

    async def wait(self) -> int:
        """Wait for the process to end. Return its exit code."""
        if self._process is None:
            raise RuntimeError("no process was started here")
        return await asyncio.to_thread(self._process.wait)

    async def cpu_s(self) -> float:
        """Read the seconds of processor time that the rank has used."""
        return Effort.of(children()).cpu_s


class RemoteProcess:
    """A rank's process in a place."""

    def __init__(self, place: Any, module: str, words: list[Any]) -> None:
        self._place = place
        self._started = place.start.remote(module, words)

    @property
    def pid(self) -> int:
        """The process id on its machine; 0 if it was never started."""
        with suppress(RayError):
            return int(ray.get(self._started, timeout=0))
        return 0

    def wait(self, timeout: float) -> int:
        """Wait for the exit code. Raise TimeoutExpired if the process does not end in time, or cannot be reached."""
        try:
            return int(ray.get(self._place.wait.remote(), timeout=timeout))
        except RayError as error:
            raise subprocess.TimeoutExpired("rank", timeout) from error

    def kill(self) -> None:
        """Kill the process and its place."""
        with suppress(RayError, ValueError):
            ray.kill(self._place)


class RayLauncher:
    """Starts processes on the cluster that this process has joined (ray_cluster.py).

    Args:
        num_here: 1 if a rank runs in this process, with a share of this machine's cores, otherwise 0.
        num_elsewhere: number of ranks that Ray finds places for.
        cpus: cores of each rank.
        level: the instruction level of all ranks.

    Raises:
        EngineError: there is no room for the ranks, or the cluster does not answer.
    """

    shares_memory = False

    def __init__(self, num_here: int, num_elsewhere: int, cpus: int, level: str | None) -> None:
        self._num_here = num_here
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._num_wires = 0
        self._cpu_s: float | None = None  # not known until all ranks have places
        self._is_closed = threading.Event()
        self._places: list[Any] = []
        count_elsewhere(self.effort_s)
        here = {"CPU": cpus, f"node:{ray.util.get_node_ip_address()}": 0.001}
        bundles = [here] * num_here + [{"CPU": cpus}] * num_elsewhere
        self._group = placement_group(bundles, strategy="SPREAD")
        try:
            ray.get(self._group.ready(), timeout=PLACE_S)
            for index in range(num_here, len(bundles)):
                where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                actor = ray.remote(Place).options(num_cpus=cpus, scheduling_strategy=where)
                self._places.append(actor.remote(self._token, level))
            self._addresses: list[tuple[str, int]] = self._ask("address")
        except RayError as error:
            self.close()
            raise EngineError(_no_room(bundles, error)) from error
        except BaseException:
            self.close()
            raise
        self._cpu_s = 0.0
        threading.Thread(target=self._watch, name="effort of ranks", daemon=True).start()

    def _ask(self, method: str, *args: Any, timeout: float = PLACE_S) -> list[Any]:
        """Call a method of each place. Raise RayError if a place does not answer."""
        found: list[Any] = ray.get([getattr(place, method).remote(*args) for place in self._places], timeout=timeout)
        return found

    def free_memory_bytes(self, measure: Callable[[], int]) -> int:
        """Measure the memory that all ranks together can take, given the machine with the least memory per rank.

        Raises:
            EngineError: a place does not answer.
        """
        try:
            found: list[tuple[str, int]] = self._ask("measure", measure)
        except RayError as error:
            raise EngineError(f"a machine of the Ray cluster cannot run ranks: {_first_line(error)}") from error
        if self._num_here:
            found.append((ray.get_runtime_context().get_node_id(), measure()))
        count = Counter(node for node, _ in found)
        return len(found) * min(free // count[node] for node, free in found)

    def connect(self, one: int, other: int) -> tuple[Any, Any]:
        """Open a connection, and return both ends. Raise OSError if the place cannot be reached."""
        self._num_wires += 1
        label = self._num_wires.to_bytes(LABEL_BYTES, "big")
        address = self._addresses[other - 1]
        if one == HERE:
            return dial(address, self._token + label), Wire(label)
        return Wire(label, address), Wire(label)

    def start(self, number: int, module: str, words: Sequence[Any]) -> RemoteProcess:
        """Run a module in the place with this number."""
        return RemoteProcess(self._places[number - 1], module, list(words))

    def effort_s(self) -> float:
        """Read the processor time of the ranks or, while Ray looks for places, a clock that counts as progress."""
        return time.monotonic() if self._cpu_s is None else self._cpu_s

    def _watch(self) -> None:
        while not self._is_closed.wait(READING_INTERVAL_S):
            with suppress(RayError):  # a lost rank uses no more time
                self._cpu_s = sum(self._ask("cpu_s", timeout=READING_INTERVAL_S))

    def close(self) -> None:
        """End the places and everything that runs in them. A second call does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        for place in self._places:
            with suppress(RayError, ValueError):
                ray.kill(place)
        with suppress(RayError, ValueError):
            remove_placement_group(self._group)


def _no_room(bundles: list[dict[str, float]], error: RayError) -> str:
    """Write the error text for places that the cluster could not provide."""
    cores = bundles[0]["CPU"]
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = ", ".join(f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g}" for node in nodes)
    why = f"in {PLACE_S:g} s" if isinstance(error, GetTimeoutError) else f"({_first_line(error)})"
    return (
        f"the Ray cluster has no room {why} for {len(bundles)} ranks of {cores:g} cores each; its machines have {found}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
