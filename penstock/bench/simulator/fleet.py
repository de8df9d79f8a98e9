"""Fleet: replicas behind a router, driven in the order of time.

    arrivals -> [ users ] -> router -> replica 0: step | step | step ...
                                       replica 1: step | ...

Two kinds of events: a request is sent, and a step of a replica ends. What happens at one moment is sent first, so that
a step is planned with all that has come. The router knows of an answer that it has ended only when its step has.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock import validation as check
from penstock.bench.simulator.arrivals import Arrival
from penstock.bench.simulator.replica import Replica, prefix_id
from penstock.client import router as serving

Progress = Callable[[int], None]


class Router(Protocol):
    """Says which replica gets a request."""

    def choose(self, arrival: Arrival) -> int:
        """Return the index of a replica."""

    def note_load(self, replica: int, num_open: int) -> None:
        """Note how many requests a replica has open now."""


class RoundRobin:
    """One after the other. It needs to know nothing, so replicas may be simulated apart (workers.py)."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def choose(self, arrival: Arrival) -> int:
        chosen, self._next = self._next, (self._next + 1) % self._num_replicas
        return chosen

    def note_load(self, replica: int, num_open: int) -> None: ...


class LeastLoaded:
    """The replica with the fewest open requests; of equal ones the first."""

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        self._heap = [(0, index) for index in range(num_replicas)]  # some are out of date

    def choose(self, arrival: Arrival) -> int:
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def note_load(self, replica: int, num_open: int) -> None:
        self._loads[replica] = num_open
        heapq.heappush(self._heap, (num_open, replica))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, index) for index, load in enumerate(self._loads)]
            heapq.heapify(self._heap)


class CachedPrefix:
    """The router of `penstock serve --data-parallel-size` itself. What is queued is that of the planned step's end."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        kv_cache = replicas[0].engine.kv_cache
        self._block_size = kv_cache.groups[0].block_size
        self._router: serving.Router[int] = serving.Router(self._block_size, kv_cache.groups[0].num_blocks)
        self._queues = [replica.count_queued() for replica in replicas]
        self._num_arrivals = 0

    def choose(self, arrival: Arrival) -> int:
        hashes = self._hashes(arrival)
        queued = {index: queue.total for index, queue in enumerate(self._queues)}
        index = self._router.choose(hashes, arrival.prompt_len, queued)
        cached = self._router.cached_tokens(index, hashes, arrival.prompt_len)
        self._router.note(index, hashes)
        self._queues[index].add(str(self._num_arrivals), arrival.prompt_len - cached, arrival.output_len)
        self._num_arrivals += 1
        return index

    def note_load(self, replica: int, num_open: int) -> None: ...

    def _hashes(self, arrival: Arrival) -> list[bytes]:
        """Return what stands for the contents of the prompt's blocks: those behind the prefix are its own."""
        shared = [prefix_id(arrival.prefix_group)] * min(arrival.prefix_len, arrival.prompt_len - 1)
        hashes = serving.block_hashes(shared, None, self._block_size)
        own = range(len(hashes), min(arrival.prompt_len // self._block_size, serving.MAX_LOOKED_AT))
        return hashes + [b"%d of %d" % (index, self._num_arrivals) for index in own]


ROUTERS: dict[str, Callable[[Sequence[Replica]], Router]] = {
    "round_robin": lambda replicas: RoundRobin(len(replicas)),
    "least_loaded": lambda replicas: LeastLoaded(len(replicas)),
    "cached_prefix": CachedPrefix,
}


def check_router(name: str) -> None:
    """Raise InvalidRequestError if there is no router of that name."""
    check.check_choice("router", name, tuple(ROUTERS))


class Users:
    """So many users, each of whom waits for the answer, and then for a while, before the next request.

    think_s: mean seconds of that while, which is drawn from an exponential distribution; 0: none.
    """

    def __init__(self, count: int, think_s: float = 0.0, seed: int = 0) -> None:
        self._think_s = think_s
        self._rng = random.Random(f"users {seed}")
        self._ready = [self._thought() for _ in range(count)]  # when those who do not wait send again
        heapq.heapify(self._ready)

    @property
    def next_at(self) -> float | None:
        """Return when the next of them sends; None: all wait for answers."""
        return self._ready[0] if self._ready else None

    def send(self) -> None:
        heapq.heappop(self._ready)

    def answered(self, count: int, now: float) -> None:
        for _ in range(count):
            heapq.heappush(self._ready, now + self._thought())

    def _thought(self) -> float:
        return self._rng.expovariate(1 / self._think_s) if self._think_s else 0.0


class Fleet:
    """Replicas that are simulated together.

    Args:
        users: who send the arrivals; None: each is sent when it arrives.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, users: Users | None = None) -> None:
        self._replicas = replicas
        self._router = router
        self._users = users
        self._events: list[tuple[float, int]] = []  # when a busy replica can plan its next step
        self._ended = [0] * len(replicas)  # requests that end with the step that is under way

    def run(self, arrivals: Iterable[Arrival], sent: Progress = lambda count: None) -> None:
        """Send all arrivals and wait for the last answer. sent: is called with 1 for each."""
        for number, arrival in enumerate(arrivals):
            at = self._wait_until_sent(arrival.at)
            self._send(number, arrival, at)
            sent(1)
        while self._events:
            self._advance()

    def _wait_until_sent(self, at: float) -> float:
        """Let everything happen that comes before a request is sent. Return when that is."""
        while True:
            ready_at = 0.0 if self._users is None else self._users.next_at
            if ready_at is not None and not (self._events and self._events[0][0] < max(at, ready_at)):
                return max(at, ready_at)
            self._advance()

    def _send(self, number: int, arrival: Arrival, at: float) -> None:
        index = self._router.choose(arrival)
        replica = self._replicas[index]
        was_idle = not replica.num_open
        if not replica.add(number, arrival, at):
            return
        if self._users is not None:
            self._users.send()
        self._router.note_load(index, replica.num_open + self._ended[index])
        if was_idle and not self._ended[index]:
            replica.clock.now = at
            heapq.heappush(self._events, (at, index))

    def _advance(self) -> None:
        """Let the earliest step end, and its replica begin the next one."""
        now, index = heapq.heappop(self._events)
        replica = self._replicas[index]
        if self._ended[index]:
            if self._users is not None:
                self._users.answered(self._ended[index], now)
            self._ended[index] = 0
            self._router.note_load(index, replica.num_open)
        if replica.has_work:
            self._ended[index] = replica.step()
            heapq.heappush(self._events, (replica.clock.now, index))
