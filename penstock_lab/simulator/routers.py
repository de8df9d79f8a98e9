"""Routers: which replica of a fleet gets a request. Only serving replicas are chosen, and at least one serves."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.client import admission as serving
from penstock.errors import check_choice
from penstock_lab.simulator.arrivals import Arrival
from penstock_lab.simulator.replica import Replica, prefix_id


class Router(Protocol):
    """Decides which replica gets a request. No replica serves before it has joined."""

    def join(self, replica: int) -> None:
        """Note that a replica, whose cache is empty, begins to serve."""

    def leave(self, replica: int) -> None:
        """Note that a replica gets no further requests."""

    def choose(self, number: int, arrival: Arrival) -> int:
        """Choose a replica for a request, by its index."""

    def note_load(self, replica: int, num_open: int) -> None:
        """Note how many requests a replica has open now."""


class RoundRobin:
    """Chooses one replica after the other. It needs no knowledge, so replicas can be simulated apart (workers.py)."""

    def __init__(self) -> None:
        self._serving: list[int] = []  # sorted
        self._last = -1

    def join(self, replica: int) -> None:
        insort(self._serving, replica)

    def leave(self, replica: int) -> None:
        del self._serving[bisect_left(self._serving, replica)]

    def choose(self, number: int, arrival: Arrival) -> int:
        place = bisect_right(self._serving, self._last)
        self._last = self._serving[place if place < len(self._serving) else 0]
        return self._last

    def note_load(self, replica: int, num_open: int) -> None: ...


class LeastLoaded:
    """Chooses the replica with the fewest open requests; of equal ones, the first."""

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}  # of the replicas that serve
        self._heap: list[tuple[int, int]] = []  # some entries are out of date

    def join(self, replica: int) -> None:
        self._loads[replica] = 0
        heapq.heappush(self._heap, (0, replica))

    def leave(self, replica: int) -> None:
        del self._loads[replica]

    def choose(self, number: int, arrival: Arrival) -> int:
        while self._heap[0][0] != self._loads.get(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def note_load(self, replica: int, num_open: int) -> None:
        if replica not in self._loads:
            return
        self._loads[replica] = num_open
        heapq.heappush(self._heap, (num_open, replica))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, index) for index, load in self._loads.items()]
            heapq.heapify(self._heap)


class CachedPrefix:
    """The router of `penstock serve --data-parallel-size`. Queued tokens are those after the step under way."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        kv_cache = replicas[0].engine.kv_cache
        self._block_size = kv_cache.groups[0].block_size
        self._router: serving.Router[int] = serving.Router(self._block_size, kv_cache.groups[0].num_blocks)
        self._queues = [replica.count_queued() for replica in replicas]
        self._serving: set[int] = set()

    def join(self, replica: int) -> None:
        self._serving.add(replica)

    def leave(self, replica: int) -> None:
        self._serving.remove(replica)
        self._router.forget(replica)

    def choose(self, number: int, arrival: Arrival) -> int:
        hashes = self._hashes(number, arrival)
        queued = {index: self._queues[index].total for index in self._serving}
        index = self._router.choose(hashes, arrival.prompt_len, queued)
        cached = self._router.cached_tokens(index, hashes, arrival.prompt_len)
        self._router.note(index, hashes)
        self._queues[index].add(str(number), arrival.prompt_len - cached, arrival.output_len)
        return index

    def note_load(self, replica: int, num_open: int) -> None: ...

    def _hashes(self, number: int, arrival: Arrival) -> list[bytes]:
        """Make stand-ins for the hashes of the prompt's blocks. Blocks behind the prefix are the prompt's own."""
        shared = [prefix_id(arrival.prefix_group)] * min(arrival.prefix_len, arrival.prompt_len - 1)
        hashes = serving.block_hashes(shared, None, self._block_size)
        own = range(len(hashes), min(arrival.prompt_len // self._block_size, serving.MAX_LOOKED_AT))
        return hashes + [b"%d of %d" % (index, number) for index in own]


ROUTERS: dict[str, Callable[[Sequence[Replica]], Router]] = {
    "round_robin": lambda replicas: RoundRobin(),
    "least_loaded": lambda replicas: LeastLoaded(),
    "cached_prefix": CachedPrefix,
}


def check_router(name: str) -> None:
    """Raise InvalidRequestError if there is no router of this name."""
    check_choice("router", name, tuple(ROUTERS))
