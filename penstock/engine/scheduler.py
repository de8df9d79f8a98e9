"""Scheduler: how many tokens of which requests the next step computes. Token counts and block ids, nothing else.

One loop serves chunked prefill, prefix hits, decode and resumption: num_computed_tokens of every request catches up
with num_tokens, and a step gives each some tokens within max_num_batched_tokens:

  1. running requests that lack one token (decodes), oldest first, so that a long prompt never stalls a stream;
  2. running requests that lack more (chunks of prompts), oldest first;
  3. waiting requests, strictly in order, as far as rows, tokens and blocks suffice.

When blocks run out, the youngest running request is preempted: its blocks are freed, and it waits at the head of the
queue to be recomputed. Nothing starves: the oldest request can take every block, and a waiting one is overtaken only
while it waits for a prefix that another request computes.
"""

from collections import deque
from dataclasses import dataclass, field

from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.request import Request
from penstock.interface.step import NewRequest, ScheduledRequest, SchedulerOutput

MAX_HELD_BACK = 64  # waiting requests per step that may be skipped because another computes their prefix


@dataclass(slots=True)
class _Plan:
    """A step while it is being planned."""

    budget: int
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> tokens computed in this step
    new: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)


class Scheduler:
    """Queues, and the plan of each step.

    Attributes:
        waiting: in order of arrival, preempted ones first.
        running: each holds blocks and a row.
        num_preemptions, num_prompt_tokens, num_cached_tokens: since the start; prompts count once, when admitted.
    """

    def __init__(self, kv_cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._removed: list[str] = []  # since the last step; the executor frees their rows
        self._next_step_id = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drop a request that has ended, running or waiting."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        else:
            self.waiting.remove(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Its blocks are allocated; num_computed_tokens changes only when it has succeeded."""
        plan = _Plan(self.max_num_batched_tokens)
        for request in sorted(self.running, key=lambda item: (item.num_missing_tokens > 1, item.arrival)):
            if request.request_id not in plan.preempted:  # by an older one in this loop
                self._schedule_running(request, plan)
        self._schedule_waiting(plan)
        output = self._output(plan)
        self._removed = []
        self._next_step_id += 1
        return output

    def _schedule_running(self, request: Request, plan: _Plan) -> None:
        num_new = min(request.num_missing_tokens, plan.budget)
        if num_new == 0:
            return
        while not self.kv_cache.allocate_slots(request, num_new):
            victim = max(self.running, key=lambda item: item.arrival)
            self.preempt(victim)
            plan.budget += plan.tokens.pop(victim.request_id, 0)
            plan.preempted.add(victim.request_id)
            if victim is request:
                return
        plan.tokens[request.request_id] = num_new
        plan.budget -= num_new

    def preempt(self, request: Request) -> None:
        """Free a running request's blocks; it waits at the head of the queue to be recomputed."""
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _free(self, request: Request) -> None:
        self.kv_cache.free(request)
        self._removed.append(request.request_id)

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Start waiting requests in order; none in a step that had to preempt, for lack of blocks."""
        if plan.preempted:
            return
        held_back: list[Request] = []
        held_hashes: set[bytes] = set()  # of whole prompts that wait, so that equal ones are not looked up again
        while self.waiting and plan.budget and len(self.running) < self.max_num_seqs and len(held_back) < MAX_HELD_BACK:
            request = self.waiting.popleft()
            if request.block_hashes and request.block_hashes[-1] in held_hashes:
                held_back.append(request)
                continue
            prefix = self.kv_cache.get_computed_blocks(request)
            if prefix.in_progress:
                held_back.append(request)
                held_hashes.add(request.block_hashes[-1])
                continue
            num_new = self.kv_cache.admit(request, prefix, plan.budget)
            if num_new is None:
                held_back.append(request)
                break
            self._start(request, num_new, plan)
        self.waiting.extendleft(reversed(held_back))

    def _start(self, request: Request, num_new: int, plan: _Plan) -> None:
        if request.num_cached_tokens is None:  # else it was preempted before
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
        self.running.append(request)
        plan.new.add(request.request_id)
        plan.tokens[request.request_id] = num_new
        plan.budget -= num_new

    def _output(self, plan: _Plan) -> SchedulerOutput:
        chosen = [request for request in self.running if request.request_id in plan.tokens]
        new_requests = [self._new_request(request) for request in chosen if request.request_id in plan.new]
        scheduled = [self._scheduled_request(request, plan) for request in chosen]
        return SchedulerOutput(self._next_step_id, new_requests, scheduled, self._removed)

    def _new_request(self, request: Request) -> NewRequest:
        tables = self.kv_cache.tables(request)
        self.kv_cache.take_updates(request)
        return NewRequest(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            choice=request.choice,
            block_tables=tables,
        )

    def _scheduled_request(self, request: Request, plan: _Plan) -> ScheduledRequest:
        new_block_ids, num_released = self.kv_cache.take_updates(request)
        num_new = plan.tokens[request.request_id]
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new,
            new_block_ids=new_block_ids,
            num_released_blocks=num_released,
            num_samples=1 if num_new == request.num_missing_tokens else 0,
        )
