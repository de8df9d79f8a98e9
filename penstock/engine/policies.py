"""The policies: which request comes next, which one gives way, and how many prompt tokens a step may have.

    fcfs            in order of arrival; all flows are equally urgent
    priority        by the request's `priority`, lower first; waiting makes a request more urgent
    length_classes  by the length of the prompt, in three classes, longest first; waiting makes more urgent, too
    fair            by the cost of the tokens that the flow has had
    deadline        by the time at which the answer is due

A policy orders in two ways. Within a flow, requests are ordered by `place`, which never changes: first come, or first
due. Among flows, the one whose next request is the most urgent comes first; among equals, the one with the fewest rows.

Nothing starves. Places contain the time of arrival, so only finitely many later requests can overtake an earlier one;
and a flow without a row becomes more urgent than flows with rows.

To add a policy, write a class and add a line to POLICIES. The scheduler calls what FirstCome has.
"""

import heapq
import math
import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.request import Request
from penstock.errors import check_choice
from penstock.interface.step import ScheduledRequest

PRIORITY_AGING_S = 10.0  # seconds of waiting that outweigh one level of priority
CLASS_AGING_S = 2.0  # seconds of waiting that outweigh a class of length, or the rule that decoding goes on
NUM_CLASSES = 3
PREFILL_RATIO = 1.2  # waiting requests per running request at which they are started
PATIENCE_S = 60.0  # seconds in which an answer without a deadline is due
PROMPT_TOKEN_COST, OUTPUT_TOKEN_COST = 1, 2
MAX_FLOWS_REMEMBERED = 4096  # flows with nothing open whose counters are kept

Place = tuple[float, int]  # the smallest comes first
_Waiting = tuple[Place, str, Request]  # place, id (the beams of a search share a place), request
FlowKey = tuple[float, int, Place, str]  # of a flow: urgency, rows, place of its next request, and the flow
Clock = Callable[[], float]


class FirstCome:
    """Starts requests in order of arrival, the flow with the fewest rows first. The other policies build on this one.

    Attributes:
        rows: number of running requests of each flow that has any; "" is not a flow.
        open: number of all requests of each flow.
    """

    def __init__(self, clock: Clock = time.monotonic, max_model_len: int = 1) -> None:
        self.clock = clock
        self.max_model_len = max_model_len
        self.rows: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    def rank(self, request: Request) -> Place:
        """Place a running request: the smallest is computed first, the largest preempted first."""
        return 0.0, request.arrival

    def candidates(self, waiting: Sequence[Request], exhausted: Collection[str] = ()) -> Iterator[Request]:
        """Yield waiting requests in the order in which they are tried; each leaves `waiting`, and may be started.

        exhausted: flows that are left out. A request whose flow is added meanwhile stays in `waiting`.
        """
        while True:
            chosen, fewest = None, math.inf
            for request in waiting:
                if fewest == 0:
                    break
                if self.rows[request.flow] < fewest and request.flow not in exhausted:
                    chosen, fewest = request, self.rows[request.flow]
            if chosen is None:
                return
            yield chosen

    def is_time_to_start(self, waiting: Sequence[Request], num_running: int) -> bool:
        """Decide whether waiting requests may join the running ones now."""
        return True

    def victim(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Choose the request to preempt for the first candidate when rows or blocks are short; None: no request.

        It is the youngest of the flow with the most rows, if another flow waits without one.
        """
        flow, most = max(self.rows.items(), key=lambda item: item[1], default=("", 0))
        if most > 1 and any(request.flow and request.flow not in self.rows for request in waiting):
            return max((request for request in running if request.flow == flow), key=self.rank)
        return None

    def added(self, request: Request) -> None:
        """Note that a request has arrived, and waits."""
        request.waits_since = self.clock()
        self.open[request.flow] += 1

    def started(self, request: Request, num_prompt_tokens: int) -> None:
        """Note that a request runs; `num_prompt_tokens` of its prompt are computed for the first time."""
        if request.flow:
            self.rows[request.flow] += 1

    def generated(self, request: Request, num_tokens: int) -> None:
        """Note new output tokens of a request."""

    def preempted(self, request: Request) -> None:
        request.waits_since = self.clock()
        self._leaves_row(request.flow)

    def removed(self, request: Request, *, was_running: bool) -> None:
        self.open[request.flow] -= 1
        if not self.open[request.flow]:
            del self.open[request.flow]
        if was_running:
            self._leaves_row(request.flow)

    def _leaves_row(self, flow: str) -> None:
        if flow:
            assert self.rows[flow] > 0, "a flow gives up a row that it never had"
            self.rows[flow] -= 1
            if not self.rows[flow]:
                del self.rows[flow]

    def reset(self, waiting: Iterable[Request]) -> None:
        """Note that exactly these requests are open, and that all of them wait."""
        self.rows.clear()
        self.open.clear()
        for request in waiting:
            self.added(request)


class Urgency(FirstCome):
    """Starts the flow with the most urgent request first. A subclass says how urgent one is, and its place in the flow.

    The key of a flow without a row changes only when something is noted, so these keys are kept in a heap. Flows with
    rows are few.
    """

    def __init__(self, clock: Clock = time.monotonic, max_model_len: int = 1) -> None:
        super().__init__(clock, max_model_len)
        self._queues: dict[str, list[_Waiting]] = {}  # waiting requests, by flow, in order
        self._left: dict[str, float] = {}  # when a flow with waiting requests gave up its last row
        self._heap: list[FlowKey] = []  # of flows without a row; some may be out of date
        self._out: set[str] = set()  # flows that the heap lacks until the next call

    def place(self, request: Request) -> Place:
        """Place a request within its flow; the place must not change."""
        return self.rank(request)

    def urgency(self, request: Request, since: float) -> float:
        """Compute the urgency of a request whose flow has had no row since `since`; the lowest is the most urgent."""
        raise NotImplementedError

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Decide whether a waiting request may take the row of a less urgent one, whatever rows their flows have."""
        return False

    # --- which flow is next ---------------------------------------------------------------------------------------

    def candidates(self, waiting: Sequence[Request], exhausted: Collection[str] = ()) -> Iterator[Request]:
        tried: Counter[str] = Counter()  # by flow, requests that were tried and not started
        while (key := self._first_flow(tried)) is not None:
            if key[-1] in exhausted:
                tried[key[-1]] = len(self._queues[key[-1]])
                continue
            queue, index = self._queues[key[-1]], tried[key[-1]]
            request = queue[index][-1]
            yield request
            tried[key[-1]] += index < len(queue) and queue[index][-1] is request

    def _first_flow(self, tried: Counter[str]) -> FlowKey | None:
        """Find the lowest key of all flows, each without its first `tried[flow]` requests."""
        now = self.clock()
        keys = [self._key(flow, now, tried[flow]) for flow in self.rows.keys() | tried.keys()]
        while self._out:
            self._push(self._out.pop())
        while self._heap and ((flow := self._heap[0][-1]) in tried or self._heap[0] != self._key(flow, now)):
            heapq.heappop(self._heap)
            if flow in tried:
                self._out.add(flow)
            else:
                self._push(flow)
        return min((key for key in (*keys, *self._heap[:1]) if key is not None), default=None)

    def _key(self, flow: str, now: float, index: int = 0) -> FlowKey | None:
        """Compute the key of a flow's request at this index, if it has one."""
        queue = self._queues.get(flow, ())
        if index >= len(queue):
            return None
        place, _, request = queue[index]
        since = now if self.rows[flow] else max(request.waits_since, self._left.get(flow, request.waits_since))
        return self.urgency(request, since), self.rows[flow], place, flow

    def _push(self, flow: str) -> None:
        """Note that the key of a flow has changed."""
        key = None if self.rows[flow] else self._key(flow, 0.0)
        if key is not None:
            heapq.heappush(self._heap, key)
        if len(self._heap) > 64 + 2 * len(self._queues):  # most are out of date
            found = (self._key(flow, 0.0) for flow in self._queues if not self.rows[flow])
            self._heap = [key for key in found if key is not None]
            heapq.heapify(self._heap)

    def victim(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        """Choose the running request that gives its row to the first candidate, and still comes after it when it waits.

        It belongs to the flow with the most rows, if the first request's flow has none, or the first outranks it.
        """
        key = self._first_flow(Counter())
        if key is None:
            return None
        urgency, num_rows, _, flow = key
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


class ByPriority(Urgency):
    """Starts the lowest `priority` first, in the row of a higher one if need be, unless that came much earlier."""

    def rank(self, request: Request) -> Place:
        return request.arrived_at + PRIORITY_AGING_S * request.priority, request.arrival

    def urgency(self, request: Request, since: float) -> float:
        return since + PRIORITY_AGING_S * request.priority

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and self.rank(waiting) < self.rank(running)


class LengthClasses(Urgency):
    """Starts three classes of prompt lengths, the longest first, each together: long sequences then decode together."""

    prefill_ratio = PREFILL_RATIO

    def rank(self, request: Request) -> Place:
        return self.urgency(request, request.arrived_at), request.arrival

    def urgency(self, request: Request, since: float) -> float:
        longer = min(NUM_CLASSES - 1, request.num_prompt_tokens * NUM_CLASSES // self.max_model_len)
        return since + CLASS_AGING_S * (NUM_CLASSES - 1 - longer)

    def is_time_to_start(self, waiting: Sequence[Request], num_running: int) -> bool:
        """Decide whether enough requests wait for a step of prompts to pay, or one has waited for long enough.

        A request that has run before goes on at once: a beam search would otherwise wait like this at every token.
        """
        if len(waiting) >= self.prefill_ratio * num_running or any(request.has_run for request in waiting):
            return True
        return min(request.waits_since for request in waiting) <= self.clock() - CLASS_AGING_S

    def victim(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        return super().victim(waiting, running) if self.is_time_to_start(waiting, len(running)) else None


class ByDeadline(Urgency):
    """Starts the request that is due first."""

    def rank(self, request: Request) -> Place:
        return self.urgency(request, request.arrived_at), request.arrival

    def urgency(self, request: Request, since: float) -> float:
        return since + PATIENCE_S if request.deadline is None else request.deadline


class Fair(Urgency):
    """Starts the flow first that has had the least: virtual token counters (VTC).

    A flow's counter adds up what it is given: prompt tokens when they are first computed (cached ones are free), and
    output tokens, which cost more. A flow that had nothing waiting begins at the lowest counter of the waiting flows or
    above, so that no flow saves up keys by being idle.
    """

    def __init__(self, clock: Clock = time.monotonic, max_model_len: int = 1) -> None:
        super().__init__(clock, max_model_len)
        self.counters: OrderedDict[str, int] = OrderedDict()  # in the order in which the flows began to wait
        self._last = 0  # counter of the flow that was the last to have something waiting

    def place(self, request: Request) -> Place:
        return 0.0, request.arrival

    def rank(self, request: Request) -> Place:
        return self.counters[request.flow], request.arrival

    def urgency(self, request: Request, since: float) -> float:
        return self.counters[request.flow]

    def added(self, request: Request) -> None:
        flow = request.flow
        if flow not in self._queues and not request.has_run:  # a fork of a running request is no new turn
            first = self._first_flow(Counter())
            lowest = self._last if first is None else self.counters[first[-1]]
            self.counters[flow] = max(self.counters.get(flow, 0), lowest)
            self.counters.move_to_end(flow)
        super().added(request)

    def _waits_no_more(self, request: Request) -> None:
        super()._waits_no_more(request)
        if request.flow not in self._queues:
            self._last = self.counters[request.flow]

    def started(self, request: Request, num_prompt_tokens: int) -> None:
        self.counters[request.flow] += PROMPT_TOKEN_COST * num_prompt_tokens
        super().started(request, num_prompt_tokens)

    def generated(self, request: Request, num_tokens: int) -> None:
        self.counters[request.flow] += OUTPUT_TOKEN_COST * num_tokens

    def removed(self, request: Request, *, was_running: bool) -> None:
        """Drop the oldest counter of a flow with nothing open, if too many are kept.

        The flow of this request keeps its counter: if it was forked, its forks are about to be added.
        """
        super().removed(request, was_running=was_running)
        if len(self.counters) > MAX_FLOWS_REMEMBERED + len(self._queues) + len(self.rows):
            kept = ("", request.flow)  # "" is not a flow
            for flow in self.counters:
                if flow not in kept and flow not in self._queues and flow not in self.rows:
                    del self.counters[flow]
                    break


POLICIES: dict[str, type[FirstCome]] = {
    "fcfs": FirstCome,
    "priority": ByPriority,
    "length_classes": LengthClasses,
    "fair": Fair,
    "deadline": ByDeadline,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """Limits and policy by which requests share the steps.

    Attributes:
        max_num_seqs: maximum number of requests that run at once; each has a row.
        max_num_batched_tokens: maximum number of tokens in a step.
        policy: a name of POLICIES.
        max_stall_s: longest time that streams may wait for the prompts in a step; None: no limit.
        prefill_ratio: of LengthClasses; None: PREFILL_RATIO.
        whole_prompts: a prompt is computed in one step, never in chunks.
        clock: returns seconds.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    max_stall_s: float | None = None
    prefill_ratio: float | None = None
    whole_prompts: bool = False
    clock: Clock = time.monotonic

    def make_policy(self, max_model_len: int) -> FirstCome:
        """Make a new policy. Raise InvalidRequestError if its name is unknown."""
        check_choice("scheduling_policy", self.policy, tuple(POLICIES))
        policy = POLICIES[self.policy](self.clock, max_model_len)
        if isinstance(policy, LengthClasses) and self.prefill_ratio is not None:
            policy.prefill_ratio = self.prefill_ratio
        return policy


SHORT_CONTEXT = 1024  # attending to this many tokens costs at most as much as all other work on a token
BASE_WEIGHT = 0.1  # weight of a new base that is slower than the old one; a faster one replaces it
FORGET = 1.01  # factor by which the cost of a token rises with each step, to notice that a machine has become slow


@dataclass(slots=True)
class Allowance:
    """Room that a step has left for prompts.

    Attributes:
        tokens: number of prompt tokens that attend to no more than `context` tokens.
    """

    tokens: float
    context: float

    def fit(self, num_new: int, start: int) -> int:
        """Count how many of num_new tokens, the first of them at position `start`, are allowed."""
        if self.tokens < 1.0:
            return 0
        num_new = int(min(num_new, self.tokens))
        return max(1, int(min(num_new, self.tokens / self._weight(num_new, start))))

    def spend(self, num_new: int, start: int) -> None:
        """Subtract num_new tokens, the first of them at position `start`."""
        self.tokens = max(0.0, self.tokens - num_new * self._weight(num_new, start))

    def _weight(self, num_new: int, start: int) -> float:
        return max(1.0, (start + num_new / 2 + SHORT_CONTEXT) / (self.context + SHORT_CONTEXT))


class Pace:
    """Limit on the prompt tokens that a step computes beside running streams, which wait for all of them.

        a step with D tokens of streams and P of prompts takes  base(D) + extra,  and extra stays below max_stall_s

    base(D) is measured in steps without prompts, extra in steps with prompts. What was not measured is assumed to be
    slow: a further token costs as much as one in the cheapest step, with all of that step's time charged to its
    prompts, and a token that attends to more tokens costs proportionally more, apart from a share that does not grow.
    So the chunk rises to its limit from below, in a few steps. It has no clock: times are given to it.
    """

    def __init__(self, max_stall_s: float) -> None:
        self.max_stall_s = max_stall_s
        self._base_s: dict[int, float] = {0: 0.0}  # by the number of tokens of streams
        # The last step with prompts: their tokens, its extra time, and how many tokens each attended to in the mean.
        self._num_tokens, self._extra_s, self._context = 0, 0.0, 0.0
        # The most that a further prompt token costs, if it attends to no more than so many tokens.
        self._token_s, self._token_context = float("inf"), 0.0

    def allowance(self, num_stream_tokens: int) -> Allowance:
        """Compute the room for prompts in a step with num_stream_tokens.

        Nothing until a step with as many stream tokens, or fewer, has been measured without prompts; then at least one
        token.
        """
        if not self._known_base(num_stream_tokens):
            return Allowance(0.0, 0.0)
        if self._extra_s > self.max_stall_s:
            tokens = self._num_tokens * self.max_stall_s / self._extra_s
        else:
            mean_s, left_s = self._extra_s / max(1, self._num_tokens), self.max_stall_s - self._extra_s
            tokens = self._num_tokens + left_s / max(self._token_s, mean_s)
            if tokens < self._num_tokens + 1 and mean_s <= left_s:
                tokens = self._num_tokens + 1  # to learn what it costs
        return Allowance(max(1.0, tokens), min(self._context, self._token_context))

    def _known_base(self, num_stream_tokens: int) -> int:
        """Find the largest number of stream tokens, up to this one, measured without prompts; or 0."""
        return max(number for number in self._base_s if number <= num_stream_tokens)

    def note(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn from a step and the time that it took."""
        streams = sum(item.num_new_tokens for item in scheduled if is_stream(item))
        prompts = [item for item in scheduled if not is_stream(item)]
        if not prompts:
            before = self._base_s.get(streams, seconds)
            self._base_s[streams] = min(seconds, before + BASE_WEIGHT * (seconds - before))
            return
        count = sum(item.num_new_tokens for item in prompts)
        attended = sum(item.num_new_tokens * (item.num_computed_tokens + item.num_new_tokens / 2) for item in prompts)
        self._num_tokens, self._context = count, attended / count
        self._extra_s = max(0.0, seconds - self._base_s[self._known_base(streams)])
        self._token_s *= FORGET
        if seconds / count < self._token_s:
            self._token_s, self._token_context = seconds / count, attended / count


def is_stream(item: ScheduledRequest) -> bool:
    """Tell whether a scheduled request samples after each of its tokens, as a running stream does."""
    return item.num_new_tokens == item.num_samples
