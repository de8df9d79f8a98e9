"""The policies to choose from, and how requests share the steps of an engine.

    fcfs            in order of arrival; all flows are equally urgent
    priority        by the request's `priority`, lower first; waiting makes a request more urgent
    length_classes  by the length of the prompt, in three classes, longest first; waiting makes more urgent, too
    fair            by the cost of the tokens that the flow has had
    deadline        by the time at which the answer is due

To add a policy, write a class and add a line to POLICIES.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.policy import Clock, FirstCome, Place, Policy, Urgency
from penstock.engine.request import Request
from penstock.errors import check_choice

PRIORITY_AGING_S = 10.0  # seconds of waiting that outweigh one level of priority
CLASS_AGING_S = 2.0  # seconds of waiting that outweigh a class of length, or the rule that decoding goes on
NUM_CLASSES = 3
PREFILL_RATIO = 1.2  # waiting requests per running request at which they are started
PATIENCE_S = 60.0  # seconds in which an answer without a deadline is due
PROMPT_TOKEN_COST, OUTPUT_TOKEN_COST = 1, 2
MAX_FLOWS_REMEMBERED = 4096  # flows with nothing open whose counters are kept


class ByPriority(Urgency):
    """The lowest `priority` first. It takes the row of a higher one, unless that came much earlier."""

    def rank(self, request: Request) -> Place:
        return request.arrived_at + PRIORITY_AGING_S * request.priority, request.arrival

    def urgency(self, request: Request, since: float) -> float:
        return since + PRIORITY_AGING_S * request.priority

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and self.rank(waiting) < self.rank(running)


class LengthClasses(Urgency):
    """Three classes of prompt lengths, the longest first, started together: long sequences then decode together."""

    prefill_ratio = PREFILL_RATIO

    def rank(self, request: Request) -> Place:
        return self.urgency(request, request.arrived_at), request.arrival

    def urgency(self, request: Request, since: float) -> float:
        longer = min(NUM_CLASSES - 1, request.num_prompt_tokens * NUM_CLASSES // self.max_model_len)
        return since + CLASS_AGING_S * (NUM_CLASSES - 1 - longer)

    def is_time_to_start(self, waiting: Sequence[Request], num_running: int) -> bool:
        """Return whether enough requests wait for a step of prompts to pay, or one has waited for long enough.

        A request that has run before goes on at once: a beam search would otherwise wait like this at every token.
        """
        if len(waiting) >= self.prefill_ratio * num_running or any(request.has_run for request in waiting):
            return True
        return min(request.waits_since for request in waiting) <= self.clock() - CLASS_AGING_S

    def giver(self, waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
        return super().giver(waiting, running) if self.is_time_to_start(waiting, len(running)) else None


class ByDeadline(Urgency):
    """The request that is due first comes first."""

    def rank(self, request: Request) -> Place:
        return self.urgency(request, request.arrived_at), request.arrival

    def urgency(self, request: Request, since: float) -> float:
        return since + PATIENCE_S if request.deadline is None else request.deadline


class Fair(Urgency):
    """The flow that has had the least comes first: virtual token counters (VTC).

    A flow's counter adds up what it is given: prompt tokens when they are first computed (cached ones are free), and
    output tokens, which cost more. A flow that had nothing waiting begins at the lowest counter of the waiting flows or
    above, so that no flow saves up turns by being idle.
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
            first = self._next_turn(Counter())
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
    """How requests share the steps.

    Attributes:
        max_num_seqs: maximum number of requests that run at once; each has a row.
        max_num_batched_tokens: maximum number of tokens in a step.
        policy: a name of POLICIES.
        max_stall_s: longest time that streams may wait for the prompts in a step; None: no limit.
        prefill_ratio: of LengthClasses; None: PREFILL_RATIO.
        clock: returns seconds.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    max_stall_s: float | None = None
    prefill_ratio: float | None = None
    clock: Clock = time.monotonic

    def make_policy(self, max_model_len: int) -> Policy:
        """Return a new policy. Raise InvalidRequestError if its name is unknown."""
        check_choice("scheduling_policy", self.policy, tuple(POLICIES))
        policy = POLICIES[self.policy](self.clock, max_model_len)
        if isinstance(policy, LengthClasses) and self.prefill_ratio is not None:
            policy.prefill_ratio = self.prefill_ratio
        return policy
