"""Fleet: replicas behind a router, driven in the order of time.

    arrivals -> [ users ] -> router -> replica 0: step | step | step ...
                                       replica 1: step | ...

An event is a request that is sent, a step that ends, or a replica that begins or ends to serve (lifecycle.py). At any
moment, requests are sent first, so that a step is planned with all requests that have come. The router learns that an
answer has ended only when its step has ended.

A replica that fails does so at the end of its step. Its requests go to the other replicas with the tokens that they
have received, as `penstock serve` hands them over. If no replica serves, they wait.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from penstock_lab.simulator.arrivals import Arrival
from penstock_lab.simulator.figures import FleetFigures
from penstock_lab.simulator.lifecycle import Change, Lifecycle
from penstock_lab.simulator.replica import OpenRequest, Replica
from penstock_lab.simulator.routers import Router

Progress = Callable[[int], None]
MAX_DEATHS = 3  # deaths of engines without a token in between after which a request fails, as in client/fleet.py


class Users:
    """Users who each wait for the answer, and then pause before the next request.

    think_s: mean seconds of the pause, which is drawn from an exponential distribution; 0: no pause.
    request_s: seconds of a request's way to the engine and back.
    """

    def __init__(self, count: int, think_s: float = 0.0, seed: int = 0, request_s: float = 0.0) -> None:
        self._think_s, self._request_s = think_s, request_s
        self._rng = random.Random(f"users {seed}")
        self._ready = [self._thought() for _ in range(count)]  # when the users who do not wait send again
        heapq.heapify(self._ready)

    @property
    def next_at(self) -> float | None:
        """The time at which the next user sends; None: all wait for answers."""
        return self._ready[0] if self._ready else None

    def send(self) -> None:
        heapq.heappop(self._ready)

    def answered(self, count: int, now: float) -> None:
        for _ in range(count):
            heapq.heappush(self._ready, now + self._request_s + self._thought())

    def _thought(self) -> float:
        return self._rng.expovariate(1 / self._think_s) if self._think_s else 0.0


class Fleet:
    """Replicas that are simulated together.

    Args:
        users: send the arrivals; None: each request is sent when it arrives.
        life: says which replica serves when; None: all of them serve all the time.
    """

    def __init__(
        self, replicas: Sequence[Replica], router: Router, users: Users | None = None, life: Lifecycle | None = None
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._users = users
        self._life = life or Lifecycle(len(replicas))
        self._events: list[tuple[float, int]] = []  # when a busy replica can plan its next step
        self._ended = [0] * len(replicas)  # requests that end with the step under way
        self._is_busy = [False] * len(replicas)  # whether a step is under way
        self._waiting: deque[OpenRequest] = deque()  # until a replica serves
        self._failing: set[int] = set()  # replicas that fail with the step under way
        self._num_open = 0
        for index in sorted(self._life.serving):
            router.join(index)

    def run(self, arrivals: Iterable[Arrival], sent: Progress = lambda count: None) -> FleetFigures:
        """Send all arrivals and wait for the last answer. Return what happened to the replicas.

        sent: called with 1 for each arrival.
        """
        for number, arrival in enumerate(arrivals):
            at = self._wait_until_sent(arrival.at)
            self._num_open += 1
            self._send(OpenRequest(sent_at=at, number=number, arrival=arrival), at)
            sent(1)
        while self._num_open:
            self._advance()
        return self._life.finish(max((replica.clock.now for replica in self._replicas), default=0.0))

    def _wait_until_sent(self, at: float) -> float:
        """Let everything happen that comes before a request is sent. Return the time at which it is sent."""
        while True:
            ready_at = 0.0 if self._users is None else self._users.next_at
            if ready_at is not None and not self._next_at < max(at, ready_at):
                if self._users is not None:
                    self._users.send()
                return max(at, ready_at)
            self._advance()

    @property
    def _next_at(self) -> float:
        """The time at which the next step ends, or the next replica changes."""
        ended = self._events[0][0] if self._events else float("inf")
        return min(ended, self._life.next_at)

    def _send(self, request: OpenRequest, at: float) -> None:
        """Give a request to the replica that the router chooses, or let it wait until a replica serves."""
        if not self._life.serving:
            self._waiting.append(request)
            return
        index = self._router.choose(request.number, request.rest)
        replica = self._replicas[index]
        if not replica.add(request):
            self._num_open -= 1
            if self._users is not None:
                self._users.answered(1, at)
            return
        self._router.note_load(index, replica.num_open + self._ended[index])
        if not self._is_busy[index]:
            self._is_busy[index] = True
            replica.clock.now = at
            heapq.heappush(self._events, (at, index))

    def _advance(self) -> None:
        """Let the earliest step end and its replica begin the next one, or first let replicas change."""
        if not self._events or self._life.next_at < self._events[0][0]:
            now = self._life.next_at
            for change, index in self._life.advance(now, self._num_open):
                self._change(change, index, now)
            return
        now, index = heapq.heappop(self._events)
        replica = self._replicas[index]
        if self._ended[index]:
            self._num_open -= self._ended[index]
            if self._users is not None:
                self._users.answered(self._ended[index], now)
            self._ended[index] = 0
            self._router.note_load(index, replica.num_open)
        if index in self._failing:
            self._is_busy[index] = False
            self._fail(index, now)
        elif replica.has_work:
            self._ended[index] = replica.step()
            heapq.heappush(self._events, (replica.clock.now, index))
        else:
            self._is_busy[index] = False
            self._life.emptied(index, now)

    def _change(self, change: Change, index: int, now: float) -> None:
        """Let a replica begin or end to serve."""
        if change is Change.STARTED:
            if self._replicas[index].engine.kv_cache.num_cached:  # it was removed before
                self._replicas[index].restart()
            self._router.join(index)
            waiting, self._waiting = self._waiting, deque()
            for request in waiting:
                self._send(request, now)
            return
        self._router.leave(index)
        if change is Change.DRAINED:
            if not self._is_busy[index]:
                self._life.emptied(index, now)
        elif self._is_busy[index]:
            self._failing.add(index)
        else:
            self._fail(index, now)

    def _fail(self, index: int, now: float) -> None:
        """End an engine, and give its requests to other replicas."""
        self._failing.discard(index)
        self._life.failed(index, now)
        for request in self._replicas[index].restart():
            if request.num_deaths == MAX_DEATHS:
                self._num_open -= 1
                self._replicas[index].figures.failed += 1
                if self._users is not None:
                    self._users.answered(1, now)
            else:
                self._send(request, now)
