"""Policy: which waiting request comes next, and which running one gives way. policies.py has the policies.

A policy orders in two ways. Within a flow, requests are ordered by `place`, which never changes: first come, or first
due. Among flows, the one whose next request is the most urgent comes first; among equals, the one with the fewest rows.

Nothing starves. Places contain the time of arrival, so only finitely many later requests can overtake an earlier one;
and a flow without a row becomes more urgent than flows with rows.
"""

import heapq
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.engine.request import Request

Place = tuple[float, int]  # the smallest comes first
_Waiting = tuple[Place, str, Request]  # place, id (the beams of a search share a place), request
Turn = tuple[float, int, Place, str]  # of a flow: urgency, rows, place of its next request, and the flow
Clock = Callable[[], float]


class Policy(Protocol):
    """What the Scheduler asks a policy, and what it reports to it."""

    def turns(self, waiting: Sequence[Request]) -> Iterator[Request]:
        """Yield waiting requests in the order in which they are tried; each leaves `waiting`, and may be started."""

    def is_time_to_start(self, waiting: Sequence[Request], num_running: int) -> bool:
        """Return whether waiting requests may join the running ones now."""

    def giver(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Return the running request to preempt for the first of `turns` when rows or blocks are short; None: none."""

    def rank(self, request: Request) -> Place:
        """Return the place of a running request: the smallest is computed first, the largest preempted first."""

    def added(self, request: Request) -> None:
        """Note that a request has arrived, and waits."""

    def started(self, request: Request, num_prompt_tokens: int) -> None:
        """Note that a request runs; `num_prompt_tokens` of its prompt are computed for the first time."""

    def generated(self, request: Request, num_tokens: int) -> None:
        """Note new output tokens of a request."""

    def preempted(self, request: Request) -> None:
        """Note that a request waits again."""

    def removed(self, request: Request, *, was_running: bool) -> None:
        """Note that a request has ended."""

    def reset(self, waiting: Iterable[Request]) -> None:
        """Note that exactly these requests are open, and that all of them wait."""


class FirstCome:
    """In order of arrival, but the flow with the fewest rows first. The other policies build on this one.

    Attributes:
        rows: number of running requests of each flow that has any; "" is not a flow.
    """

    def __init__(self, clock: Clock = time.monotonic, max_model_len: int = 1) -> None:
        self.clock = clock
        self.max_model_len = max_model_len
        self.rows: Counter[str] = Counter()

    def rank(self, request: Request) -> Place:
        return 0.0, request.arrival

    def turns(self, waiting: Sequence[Request]) -> Iterator[Request]:
        while waiting:
            chosen = waiting[0]
            fewest = self.rows[chosen.flow]
            for request in waiting:
                if fewest == 0:
                    break
                if self.rows[request.flow] < fewest:
                    chosen, fewest = request, self.rows[request.flow]
            yield chosen

    def is_time_to_start(self, waiting: Sequence[Request], num_running: int) -> bool:
        return True

    def giver(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Return the youngest request of the flow with the most rows, if another flow waits without one."""
        flow, most = max(self.rows.items(), key=lambda item: item[1], default=("", 0))
        if most > 1 and any(request.flow and request.flow not in self.rows for request in waiting):
            return max((request for request in running if request.flow == flow), key=self.rank)
        return None

    def added(self, request: Request) -> None:
        request.waits_since = self.clock()

    def started(self, request: Request, num_prompt_tokens: int) -> None:
        if request.flow:
            self.rows[request.flow] += 1

    def generated(self, request: Request, num_tokens: int) -> None: ...

    def preempted(self, request: Request) -> None:
        request.waits_since = self.clock()
        self._leaves_row(request.flow)

    def removed(self, request: Request, *, was_running: bool) -> None:
        if was_running:
            self._leaves_row(request.flow)

    def _leaves_row(self, flow: str) -> None:
        if flow:
            self.rows[flow] -= 1
            if not self.rows[flow]:
                del self.rows[flow]

    def reset(self, waiting: Iterable[Request]) -> None:
        self.rows.clear()
        for request in waiting:
            self.added(request)


class Urgency(FirstCome):
    """The flow with the most urgent request first. A subclass says how urgent a request is, and its place in the flow.

    The turn of a flow without a row changes only when something is noted, so these turns are kept in a heap. Flows with
    rows are few.
    """

    def __init__(self, clock: Clock = time.monotonic, max_model_len: int = 1) -> None:
        super().__init__(clock, max_model_len)
        self._queues: dict[str, list[_Waiting]] = {}  # waiting requests, by flow, in order
        self._left: dict[str, float] = {}  # when a flow with waiting requests gave up its last row
        self._heap: list[Turn] = []  # of flows without a row; some may be out of date
        self._out: set[str] = set()  # flows that the heap lacks until the next call

    def place(self, request: Request) -> Place:
        """Return a request's place within its flow, which must not change."""
        return self.rank(request)

    def urgency(self, request: Request, since: float) -> float:
        """Return the urgency of a request whose flow has had no row since `since`; the lowest is the most urgent."""
        raise NotImplementedError

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Return whether a waiting request may take the row of a less urgent one, whatever rows their flows have."""
        return False

    # --- whose turn it is ------------------------------------------------------------------------------------------

    def turns(self, waiting: Sequence[Request]) -> Iterator[Request]:
        tried: Counter[str] = Counter()  # by flow, requests that were tried and not started
        while (turn := self._next_turn(tried)) is not None:
            queue, index = self._queues[turn[-1]], tried[turn[-1]]
            request = queue[index][-1]
            yield request
            tried[turn[-1]] += index < len(queue) and queue[index][-1] is request

    def _next_turn(self, tried: Counter[str]) -> Turn | None:
        """Return the first turn, without the first `tried[flow]` requests of each flow."""
        now = self.clock()
        turns = [self._turn(flow, now, tried[flow]) for flow in self.rows.keys() | tried.keys()]
        while self._out:
            self._push(self._out.pop())
        while self._heap and ((flow := self._heap[0][-1]) in tried or self._heap[0] != self._turn(flow, now)):
            heapq.heappop(self._heap)
            if flow in tried:
                self._out.add(flow)
            else:
                self._push(flow)
        return min((turn for turn in (*turns, *self._heap[:1]) if turn is not None), default=None)

    def _turn(self, flow: str, now: float, index: int = 0) -> Turn | None:
        """Return the turn of a flow's request at this index, if it has one."""
        queue = self._queues.get(flow, ())
        if index >= len(queue):
            return None
        place, _, request = queue[index]
        since = now if self.rows[flow] else max(request.waits_since, self._left.get(flow, request.waits_since))
        return self.urgency(request, since), self.rows[flow], place, flow

    def _push(self, flow: str) -> None:
        """Note that the turn of a flow has changed."""
        turn = None if self.rows[flow] else self._turn(flow, 0.0)
        if turn is not None:
            heapq.heappush(self._heap, turn)
        if len(self._heap) > 64 + 2 * len(self._queues):  # most are out of date
            found = (self._turn(flow, 0.0) for flow in self._queues if not self.rows[flow])
            self._heap = [turn for turn in found if turn is not None]
            heapq.heapify(self._heap)

    def giver(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Return the running request that gives its row to the first in turn, and still comes after it when it waits.

        It belongs to the flow with the most rows, if the first request's flow has none, or the first outranks it.
        """
        turn = self._next_turn(Counter())
        if turn is None:
            return None
        urgency, num_rows, _, flow = turn
        first, now, most = self._queues[flow][0][-1], self.clock(), max(self.rows.values(), default=0)
        candidates = (
            request
            for request in running
            if (flow and not num_rows and self.rows[request.flow] == most > 1 and urgency <= self.urgency(request, now))
            or (self.outranks(first, request) and urgency < self.urgency(request, now))
        )
        return max(candidates, key=self.rank, default=None)

    # --- what has happened -----------------------------------------------------------------------------------------

    def _waits(self, request: Request) -> None:
        insort(self._queues.setdefault(request.flow, []), (self.place(request), request.request_id, request))
        self._push(request.flow)

    def _waits_no_more(self, request: Request) -> None:
        queue = self._queues[request.flow]
        del queue[bisect_left(queue, (self.place(request), request.request_id))]
        if not queue:
            del self._queues[request.flow]
            self._left.pop(request.flow, None)
        self._push(request.flow)

    def _leaves_row(self, flow: str) -> None:
        super()._leaves_row(flow)
        if flow and flow not in self.rows and flow in self._queues:
            self._left[flow] = self.clock()
            self._push(flow)

    def added(self, request: Request) -> None:
        super().added(request)
        self._waits(request)

    def started(self, request: Request, num_prompt_tokens: int) -> None:
        super().started(request, num_prompt_tokens)
        self._waits_no_more(request)

    def preempted(self, request: Request) -> None:
        super().preempted(request)
        self._waits(request)

    def removed(self, request: Request, *, was_running: bool) -> None:
        super().removed(request, was_running=was_running)
        if not was_running:
            self._waits_no_more(request)

    def reset(self, waiting: Iterable[Request]) -> None:
        for book in (self._queues, self._left, self._heap, self._out):
            book.clear()
        super().reset(waiting)
