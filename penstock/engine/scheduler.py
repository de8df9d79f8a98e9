"""Scheduler: how many tokens of which requests the next step computes. Token counts and block ids, nothing else.

One loop serves chunked prefill, prefix hits, decode and resumption: num_computed_tokens of every request catches up
with num_tokens, and a step gives each some tokens within max_num_batched_tokens:

  1. running requests that lack one token (decodes), oldest first, so that a long prompt never stalls a stream;
  2. running requests that lack more (chunks of prompts), oldest first;
  3. drafts of decodes (speculation.py), with what is left over;
  4. waiting requests, as far as rows, tokens and blocks suffice: those of the flow with the fewest rows first, and
     within it in order of arrival.

When blocks run out, the youngest running request is preempted: its blocks are freed, and it waits at the head of the
queue to be recomputed. A flow is whatever asks as one: a user's call with all its choices, or all calls of an API key.
One that waits without a row takes one from the flow that has the most, so that no call keeps others out, and a call
alone still has the whole machine. Requests without a flow, as those of a batch, are taken in order of arrival. Nothing
starves: the oldest request can take every block, a flow keeps its last row, and within a flow a waiting request is
overtaken only while it waits for a prefix that another request computes.

When a step fails, nobody knows which of its requests is to blame. Each of them is then computed alone for one token, so
that only the one to blame pays for it.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.request import Request
from penstock.interface.step import NewRequest, ScheduledRequest, SchedulerOutput

NO_DRAFTS: Mapping[str, list[int]] = {}
MAX_HELD_BACK = 64  # waiting requests per step that may be skipped because another computes their prefix


@dataclass(slots=True)
class _Plan:
    """A step while it is being planned."""

    budget: int
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> tokens computed in this step
    new: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    drafts: dict[str, list[int]] = field(default_factory=dict)  # request id -> those of its tokens that are guesses


class Scheduler:
    """Queues, and the plan of each step.

    Attributes:
        waiting: in order of arrival, preempted ones first.
        running: each holds blocks and a row.
        num_preempted: of those that wait, how many have run before.
        num_preemptions, num_prompt_tokens, num_prefix_queries (tokens of prompts that were looked up in the cache),
            num_cached_tokens: since the start; prompts count once, when admitted.
    """

    def __init__(self, kv_cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_prefix_queries = self.num_cached_tokens = 0
        self.num_preempted = 0
        self._alone: deque[Request] = deque()  # to be computed alone; the first one is
        self._removed: list[str] = []  # since the last step; the executor frees their rows
        self._forked: set[str] = set()  # running, and not known to the executor yet
        self._short_of_blocks = False  # the last step had none for a waiting request
        self._next_step_id = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drop a request that has ended, running or waiting, or that was dropped before."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.num_preempted -= request.has_run
        if request in self._alone:
            is_first = request is self._alone[0]
            self._alone.remove(request)
            if is_first:
                self._gather()

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """Replace a request, whatever its state, by others whose tokens begin with its own.

        If it is running and all its tokens are computed, they share its blocks and run on, as far as there are rows;
        the others wait at the head of the queue.
        """
        num_running = 0
        if parent in self.running and parent.num_missing_tokens == 0 and not self._alone:
            num_running = self.max_num_seqs - len(self.running) + 1
        for child in children[:num_running]:
            self.kv_cache.fork(parent, child)
        self.remove(parent)
        self.running += children[:num_running]
        self._forked.update(child.request_id for child in children[:num_running])
        self.waiting.extendleft(reversed(children[num_running:]))
        self._put_first()

    @property
    def num_prefilling(self) -> int:
        """Return how many running requests lack more than their last token: of the prompt, or after a preemption."""
        return sum(request.num_missing_tokens > 1 for request in self.running)

    @property
    def is_trying(self) -> bool:
        """Return whether a request is computed alone, because a step with it has failed."""
        return bool(self._alone)

    def isolate(self, failed: SchedulerOutput) -> None:
        """Compute each request of a failed step alone, until it has a token, fails or ends; the others wait."""
        self._removed = [*failed.removed_request_ids, *self._removed]  # the executor may not have seen them
        ids = {item.request_id for item in failed.scheduled}
        self._alone = deque(sorted((r for r in self.running if r.request_id in ids), key=lambda item: item.arrival))
        self._gather()

    def acquit(self, request: Request) -> None:
        """Note that a request has a token: if it was computed alone, the next one is."""
        if self._alone and self._alone[0] is request:
            self._alone.popleft()
            self._gather()

    def _gather(self) -> None:
        """Preempt everybody, and put the next request to be computed alone at the head of the queue."""
        for request in sorted(self.running, key=lambda item: item.arrival, reverse=True):
            self.preempt(request)
        self._put_first()

    def _put_first(self) -> None:
        """Put the next request to be computed alone, if there is one and it waits, at the head of the queue."""
        if self._alone and self._alone[0] in self.waiting:
            self.waiting.remove(self._alone[0])
            self.waiting.appendleft(self._alone[0])

    def reset(self, requests: Iterable[Request]) -> None:
        """Let all requests wait again, with nothing computed: a plan broke off half-way, or could not be committed."""
        self.kv_cache.reset()
        self._removed += [request.request_id for request in self.running]
        self.waiting = deque(sorted(requests, key=lambda item: item.arrival))
        for request in self.waiting:
            request.num_computed_tokens = 0
        self.num_preempted = sum(request.has_run for request in self.waiting)
        self.running.clear()
        self._alone.clear()
        self._forked.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, drafts: Mapping[str, list[int]] = NO_DRAFTS) -> SchedulerOutput:
        """Plan the next step. Its blocks are allocated; num_computed_tokens changes only when it has succeeded.

        drafts: guesses of the next tokens of running requests that lack one token, by request id. They get tokens and
            blocks that no running request needs, or are dropped.
        """
        plan = _Plan(self.max_num_batched_tokens)
        self._make_way()
        for request in sorted(self.running, key=lambda item: (item.num_missing_tokens > 1, item.arrival)):
            if request.request_id not in plan.preempted:  # by an older one in this loop
                self._schedule_running(request, plan)
        if drafts and not plan.preempted and not self._short_of_blocks:
            self._add_drafts(plan, drafts)
        self._schedule_waiting(plan)
        output = self._output(plan)
        self._removed = []
        self._next_step_id += 1
        return output

    def _make_way(self) -> None:
        """Preempt a request of the flow with the most rows, where rows or blocks are short and a flow waits with none.

        One in a step: each flow that arrives costs the others at most a few rows to recompute.
        """
        if self._alone or not self.waiting or not (self._short_of_blocks or len(self.running) == self.max_num_seqs):
            return
        rows = self._rows()
        flow, most = max(rows.items(), key=lambda item: item[1], default=("", 0))
        if most > 1 and any(request.flow and request.flow not in rows for request in self.waiting):
            self.preempt(max((item for item in self.running if item.flow == flow), key=lambda item: item.arrival))

    def _rows(self) -> Counter[str]:
        """Return the number of running requests of each flow."""
        return Counter(request.flow for request in self.running if request.flow)

    def _add_drafts(self, plan: _Plan, drafts: Mapping[str, list[int]]) -> None:
        """Let requests that lack one token compute their drafts too, as far as tokens and free blocks are left over."""
        for request in self.running:
            ids = drafts.get(request.request_id, [])[: plan.budget]
            if not ids or request.num_missing_tokens != 1 or request.request_id not in plan.tokens:
                continue
            if self.kv_cache.allocate_slots(request, 1 + len(ids)):
                plan.drafts[request.request_id] = ids
                plan.tokens[request.request_id] += len(ids)
                plan.budget -= len(ids)

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
        self.num_preempted += 1
        self.num_preemptions += 1

    def _free(self, request: Request) -> None:
        self._removed.append(request.request_id)
        self._forked.discard(request.request_id)
        self.kv_cache.free(request)

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Start waiting requests in turn; none in a step that had to preempt, for lack of blocks."""
        self._short_of_blocks = False
        if plan.preempted or not self.waiting:
            return
        rows = self._rows()
        held_back: list[Request] = []
        max_num_seqs = 1 if self._alone else self.max_num_seqs
        held_hashes: set[bytes] = set()  # of whole prompts that wait, so that equal ones are not looked up again
        while self.waiting and plan.budget and len(self.running) < max_num_seqs and len(held_back) < MAX_HELD_BACK:
            request = self.waiting.popleft() if self._alone else self._next_in_turn(rows)
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
                self._short_of_blocks = True
                held_back.append(request)
                break
            self._start(request, num_new, plan)
            rows[request.flow] += bool(request.flow)
        self.waiting.extendleft(reversed(held_back))

    def _next_in_turn(self, rows: Counter[str]) -> Request:
        """Take the first request of a flow with the fewest rows out of the queue."""
        chosen, fewest = 0, rows[self.waiting[0].flow]
        for index, request in enumerate(self.waiting):
            if fewest == 0:
                break
            if rows[request.flow] < fewest:
                chosen, fewest = index, rows[request.flow]
        request = self.waiting[chosen]
        del self.waiting[chosen]
        return request

    def _start(self, request: Request, num_new: int, plan: _Plan) -> None:
        self.num_preempted -= request.has_run
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_prefix_queries += request.num_prompt_tokens * self.kv_cache.looks_up(request)
        self.running.append(request)
        plan.new.add(request.request_id)
        plan.tokens[request.request_id] = num_new
        plan.budget -= num_new

    def _output(self, plan: _Plan) -> SchedulerOutput:
        chosen = [request for request in self.running if request.request_id in plan.tokens]
        new = plan.new | self._forked
        new_requests = [self._new_request(request) for request in chosen if request.request_id in new]
        self._forked.difference_update(plan.tokens)
        scheduled = [self._scheduled_request(request, plan) for request in chosen]
        copies = self.kv_cache.take_copies()
        return SchedulerOutput(self._next_step_id, new_requests, scheduled, self._removed, block_copies=copies)

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
            mirostat_mu=request.mirostat_mu,
        )

    def _scheduled_request(self, request: Request, plan: _Plan) -> ScheduledRequest:
        new_block_ids, num_released = self.kv_cache.take_updates(request)
        num_new, drafts = plan.tokens[request.request_id], plan.drafts.get(request.request_id, [])
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new,
            new_block_ids=new_block_ids,
            num_released_blocks=num_released,
            num_samples=1 + len(drafts) if num_new == request.num_missing_tokens + len(drafts) else 0,
            draft_token_ids=drafts,
        )
