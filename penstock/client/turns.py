"""Turns: a limited resource is given to those who wait for it flow by flow, and not in the order of arrival."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Waiting = deque["asyncio.Future[None]"]
MANY = 256  # flows whose times are remembered before those that no longer matter are dropped


class Turns:
    """A semaphore of an event loop whose turns go to the flow that has held them for the least time.

    So a flow waits for a turn under way, and then gets as much time as each other flow, however many turns those ask
    for and however long each is. Being idle earns no credit. Of several places, no flow has all at the same time: who
    comes while only one flow has turns finds a place.

    Args:
        places: how many may have a turn at the same time.
    """

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = places
        self._most = max(1, places - 1)
        self._clock = clock
        self._queues: dict[str | None, Waiting] = {}
        self._under_way: Counter[str | None] = Counter()  # turns, by flow
        self._held: dict[str | None, float] = {}  # by flow; what counts is how much more it is than _now
        self._now = 0.0  # the time that the flow had held which got the last turn for which anybody waited

    @asynccontextmanager
    async def turn(self, flow: str | None) -> AsyncIterator[None]:
        """Wait for a turn of a flow, and hold it inside the block. None is the flow of those who have none."""
        self._held[flow] = max(self._now, self._held.get(flow, 0.0))
        if self._free and self._may_have_more(flow):
            self._begin(flow)
        else:
            await self._wait(flow)
        began = self._clock()
        try:
            yield
        finally:
            self._held[flow] = max(self._now, self._held.get(flow, 0.0)) + self._clock() - began
            self._end(flow)

    async def _wait(self, flow: str | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(flow, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was its turn already
                self._end(flow)
            raise

    def _may_have_more(self, flow: str | None) -> bool:
        return flow is None or self._under_way[flow] < self._most

    def _begin(self, flow: str | None) -> None:
        self._free -= 1
        self._under_way[flow] += 1

    def _end(self, flow: str | None) -> None:
        self._free += 1
        self._under_way[flow] -= 1
        if not self._under_way[flow]:
            del self._under_way[flow]
        if len(self._held) > MANY:
            self._held = {flow: s for flow, s in self._held.items() if s > self._now or flow in self._queues}
        while self._free and (flows := [other for other in self._queues if self._may_have_more(other)]):
            self._pass_on(min(flows, key=self._held.__getitem__))

    def _pass_on(self, flow: str | None) -> None:
        """Give a turn to the first of a flow that waits, unless it was cancelled."""
        future = self._queues[flow].popleft()
        if not self._queues[flow]:
            del self._queues[flow]
        if not future.done():
            self._now = max(self._now, self._held[flow])
            self._begin(flow)
            future.set_result(None)
