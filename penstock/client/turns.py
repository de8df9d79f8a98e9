"""Turns: a limited resource is given to those who wait for it flow by flow, and not in the order of arrival."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Waiting = deque["asyncio.Future[None]"]


class Turns:
    """A semaphore of an event loop at which every flow has a queue of its own, and the queues take turns.

    So a flow waits for at most one turn of each other flow, however many of them those have asked for.

    Args:
        places: how many may have a turn at the same time.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._queues: OrderedDict[str | None, Waiting] = OrderedDict()  # the flow whose turn is next comes first

    @asynccontextmanager
    async def turn(self, flow: str | None) -> AsyncIterator[None]:
        """Wait for a turn of a flow, and hold it inside the block. None is the flow of those who have none."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(flow)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, flow: str | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(flow, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was its turn already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._queues:
            flow, queue = self._queues.popitem(last=False)
            future = queue.popleft()
            if queue:
                self._queues[flow] = queue  # now the last in turn
            if not future.done():  # else it was cancelled
                future.set_result(None)
                return
        self._free += 1
