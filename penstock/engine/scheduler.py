"""Scheduler: how many tokens of which requests the next step computes. It handles token counts and block ids only.

One loop serves chunked prefill, prefix hits, decode and resumption: num_computed_tokens of every request catches up
with num_tokens. A step gives out at most max_num_batched_tokens tokens, in this order:

  1. running requests that lack one token (decodes), so that a long prompt never stalls a stream;
  2. running requests that lack more (chunks of prompts);
  3. drafts of decodes (speculation.py), with what is left over;
  4. waiting requests, as far as rows, tokens and blocks suffice.

An executor may compute several steps at once (InFlight). A request that is in one of them is left out of the next,
and the requests are spread over the steps.

The policy (policies.py) says which request comes first in each of these groups, and which one is preempted when blocks
run out: its blocks are freed, and it waits to be recomputed. The default policy, `fcfs`, takes the oldest request first
and preempts the youngest. A flow is a group of requests that share rows with other groups: a user's call with all its
choices, or all calls of an API key. Flows with fewer rows come first, and a flow that waits without a row gets one of
the flow with the most rows. So no call keeps others out, and a single call still has the whole machine. Requests
without a flow, such as those of a batch, are started in order of arrival. Nothing starves: the oldest request can get
every block, a flow keeps its last row, and within a flow a waiting request is overtaken only while it waits for a
prefix that another request computes.

Everybody waits for the prompts of a step, so one of several flows gets only a part of it for its prompts.

Streams wait for the prompts of a step, too. `max_stall_s` limits these to what fits this time (policies.Pace).

When a step fails, it is unknown which of its requests is to blame. Each of them is then computed alone for one token,
so that only the one to blame fails.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Allowance, Pace, Scheduling
from penstock.engine.request import Request
from penstock.engine.speculation import Proposal
from penstock.interface.step import NO_ADAPTER, NewRequest, ScheduledRequest, SchedulerOutput

NO_DRAFTS: Mapping[str, list[int]] = {}
FLOWS_IN_A_STEP, LEAST_OF_A_FLOW = 8, 128  # prompts of one of several flows get this part of a step, and so many tokens
SHARED_S = 1.0  # so long after several flows were there, the next request of another one is expected
MAX_HELD_BACK = 64  # waiting requests per step that may be skipped because another computes their prefix


@dataclass(slots=True)
class InFlightStep:
    """A step that was submitted.

    Attributes:
        handle: the executor's handle; None if submitting the step raised `error`.
        proposal: the proposal that its drafts come from.
        began: when it was submitted.
    """

    plan: SchedulerOutput
    proposal: Proposal | None
    began: float
    handle: Any = None
    error: Exception | None = None


class InFlight:
    """The steps that were submitted and not yet collected, at most `depth`, oldest first, and their requests by id.

    An executor whose devices hold a few layers each (a pipeline) computes several steps at once. A request is in at
    most one of them, because its next step begins with what this one samples. A plan depends on committed state only,
    and the executor computes in the order of submission, so blocks that are freed meanwhile may be given to a later
    step.

        running   [ a b | c d | e f | g h ]     rows spread over `depth` micro-batches
        steps       k     k+1   k+2   ready     k is collected and committed first

    A request that is preempted, aborted or reset while in flight loses its results. If it is still open, it is computed
    again, to the same tokens, but not before that step has been collected, so that old results are never taken for new
    ones.
    """

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.steps: deque[InFlightStep] = deque()
        self._requests: dict[str, Request | None] = {}  # None: its results are lost

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return sum(request is not None for request in self._requests.values())

    @property
    def has_room(self) -> bool:
        return len(self.steps) < self.depth

    @property
    def num_streams(self) -> int:
        return sum(request is not None and request.is_stream for request in self._requests.values())

    def add(self, step: InFlightStep, requests: dict[str, Request]) -> None:
        """Add the youngest step. `requests` has its requests, by id."""
        assert self.has_room, "more steps are in flight than the executor can hold"
        self.steps.append(step)
        num_before = len(self._requests)
        self._requests.update({item.request_id: requests[item.request_id] for item in step.plan.scheduled})
        assert len(self._requests) == num_before + len(step.plan.scheduled), "a request is in two steps at once"

    def lose(self, request: Request) -> None:
        """Note that a request has lost its blocks and, if it is in flight, its results."""
        if self._requests.get(request.request_id) is request:  # and not another one that has its name by now
            self._requests[request.request_id] = None

    def lose_all(self) -> None:
        """Do the same for every request."""
        self._requests = dict.fromkeys(self._requests)

    def pop_oldest(self) -> tuple[InFlightStep, dict[str, Request]]:
        """Remove the oldest step. Return it, and those of its requests whose results count."""
        step = self.steps.popleft()
        found = {item.request_id: self._requests.pop(item.request_id) for item in step.plan.scheduled}
        return step, {name: request for name, request in found.items() if request is not None}


@dataclass(slots=True)
class _Plan:
    """A step while it is being planned.

    Attributes:
        max_rows: maximum number of requests in the step.
        allowance: for prompts; None: all of the budget. It is set once the streams are planned.
        most_of_a_flow: how many tokens of prompts each flow may have.
        waits_for_blocks: a request in flight has to free blocks first; later requests get none until then.
    """

    budget: int
    max_rows: int
    most_of_a_flow: int
    num_stream_tokens: int = 0
    allowance: Allowance | None = None
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> tokens computed in this step
    streams: dict[str, ScheduledRequest] = field(default_factory=dict)  # finished entries of streams in `tokens`
    new: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    drafts: dict[str, list[int]] = field(default_factory=dict)  # request id -> those of its tokens that are guesses
    waits_for_blocks: bool = False
    of_flows: Counter[str] = field(default_factory=Counter)  # tokens of prompts, by flow
    exhausted: set[str] = field(default_factory=set)  # flows that have no more room

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.max_rows


class Scheduler:
    """Queues, and the plan of each step.

    Attributes:
        waiting: preempted requests first, then those held back in the last step, then by arrival; the policy chooses
            among them.
        running: each holds blocks and a row.
        in_flight: the steps that are being computed.
        is_short_of_blocks: whether the last plan had no blocks for a waiting request.
        num_preempted: how many of the waiting requests have run before.
        num_preemptions, num_prompt_tokens, num_prefix_queries (prompt tokens that were looked up in the cache),
            num_cached_tokens: totals since the start; a prompt counts once, when it is first admitted.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        scheduling: Scheduling,
        max_model_len: int,
        depth: int = 1,
        on_preemption: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.kv_cache = kv_cache
        self._on_preemption = on_preemption
        self.in_flight = InFlight(depth)
        self.max_num_seqs = scheduling.max_num_seqs
        self.max_num_batched_tokens = scheduling.max_num_batched_tokens
        self.whole_prompts = scheduling.whole_prompts
        self.policy = scheduling.make_policy(max_model_len)
        self._shared_until = -math.inf  # on the policy's clock
        self.pace = None if scheduling.max_stall_s is None else Pace(scheduling.max_stall_s)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = self.num_prompt_tokens = self.num_prefix_queries = self.num_cached_tokens = 0
        self.num_preempted = 0
        self._alone: deque[Request] = deque()  # to be computed alone; the first one is now
        self._removed: list[str] = []  # since the last step; the executor frees their rows
        self._forked: set[str] = set()  # running, and not known to the executor yet
        self.is_short_of_blocks = False  # the last step had no blocks for a waiting request
        self._next_step_id = 0

    def add(self, request: Request) -> None:
        self.policy.added(request)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Drop a request, running or waiting. A request that was dropped before is ignored."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
            self.policy.removed(request, was_running=True)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.num_preempted -= request.has_run
            self.policy.removed(request, was_running=False)
        if request in self._alone:
            is_first = request is self._alone[0]
            self._alone.remove(request)
            if is_first:
                self._gather()

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """Replace a request, whatever its state, by others whose tokens begin with its own.

        If it is running and all its tokens are computed, the children share its blocks and run on, as far as there are
        rows; the rest wait at the head of the queue.
        """
        num_running = 0
        if parent in self.running and parent.num_missing_tokens == 0 and not self._alone:
            num_running = self.max_num_seqs - len(self.running) + 1
        for child in children[:num_running]:
            self.kv_cache.fork(parent, child)
        self.remove(parent)
        for child in children:
            self.policy.added(child)
        for child in children[:num_running]:
            self.running.append(child)
            self._forked.add(child.request_id)
            self.policy.started(child, 0)
        self.waiting.extendleft(reversed(children[num_running:]))
        self.num_preempted += sum(child.has_run for child in children[num_running:])
        self._put_first()

    @property
    def num_prefilling(self) -> int:
        """Count the running requests that lack more than their last token: of the prompt, or after a preemption."""
        return sum(request.num_missing_tokens > 1 for request in self.running)

    @property
    def is_trying(self) -> bool:
        """Tell whether a request is computed alone, because a step with it has failed."""
        return bool(self._alone)

    def isolate(self, failed: SchedulerOutput) -> None:
        """Compute each request of a failed step alone, until it has a token, fails or ends; the others wait."""
        # Whoever is to blame fails again alone, and everybody else gets the same token alone as in the batch. So the
        # price of a fault is time, never another request.
        self._removed = [*failed.removed_request_ids, *self._removed]  # the executor may not have seen them
        if not self._alone:  # otherwise the first of them was tried, and is again
            ids = {item.request_id for item in failed.scheduled}
            self._alone = deque(sorted((r for r in self.running if r.request_id in ids), key=lambda item: item.arrival))
        self._gather()

    def acquit(self, request: Request) -> None:
        """Note that a request got a token. If it was computed alone, the next one follows."""
        if self._alone and self._alone[0] is request:
            self._alone.popleft()
            self._gather()

    def _gather(self) -> None:
        """Preempt all requests, and put the next request to be computed alone at the head of the queue."""
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
        self.in_flight.lose_all()
        self._removed += [request.request_id for request in self.running]
        self.waiting = deque(sorted(requests, key=lambda item: item.arrival))
        for request in self.waiting:
            request.num_computed_tokens = 0
        self.num_preempted = sum(request.has_run for request in self.waiting)
        self.policy.reset(self.waiting)
        self.running.clear()
        self._alone.clear()
        self._forked.clear()

    @property
    def has_work(self) -> bool:
        offload = self.kv_cache.offload
        has_blocks_to_save = offload is not None and offload.has_work
        return bool(self.waiting or self.running or self.in_flight.steps) or has_blocks_to_save

    @property
    def ready(self) -> list[Request]:
        if not self.in_flight.steps:
            return self.running
        return [request for request in self.running if request.request_id not in self.in_flight]

    def schedule(self, drafts: Mapping[str, list[int]] = NO_DRAFTS, checksum_logits: bool = False) -> SchedulerOutput:
        """Plan the next step and allocate its blocks. num_computed_tokens changes only when the step has succeeded.

        drafts: guesses of the next tokens of running requests that lack one token, by request id. They get tokens and
            blocks that no running request needs, or are dropped.
        checksum_logits: as in SchedulerOutput.
        """
        plan = _Plan(self.max_num_batched_tokens, self._fair_share(), self._most_of_a_flow())
        # Nothing below may depend on a step in flight: its results may be lost, and then its requests are planned again
        # from the state that is committed now.
        self._make_way()
        others = self._schedule_streams(plan)
        for request in sorted(others, key=lambda item: (item.num_missing_tokens > 1, self.policy.rank(item))):
            if plan.is_full or plan.waits_for_blocks:
                break
            if request.request_id not in plan.preempted:  # by an earlier one in this loop
                self._schedule_running(request, plan)
        if drafts and not plan.preempted and not plan.waits_for_blocks and not self.is_short_of_blocks:
            self._add_drafts(plan, drafts)
        self._schedule_waiting(plan)
        assert plan.budget >= 0, "a step has more tokens than the executor was built for"
        assert len(self.running) <= self.max_num_seqs, "more requests run than there are rows"
        output = self._output(plan, checksum_logits)
        self._removed = []
        self._next_step_id += 1
        return output

    def withdraw(self, plan: SchedulerOutput) -> None:
        """Undo the plan of a step without requests, which was not submitted."""
        assert not plan.scheduled, "a plan with requests has moved blocks, and cannot be undone"
        assert plan.step_id == self._next_step_id - 1, "only the last plan can be undone"
        self._next_step_id -= 1
        self.repeat_removals(plan)

    def repeat_removals(self, plan: SchedulerOutput) -> None:
        """Let the next step remove the requests that this one may not have removed."""
        running = {request.request_id for request in self.running}
        self._removed[:0] = [name for name in plan.removed_request_ids if name not in running]

    def _fair_share(self) -> int:
        """Compute how many rows a step may have, so that all rows are spread over the steps that can be in flight.

        Ready rows are divided among the free places. No step gets more than its part of all rows, so that steps that
        lose rows are filled up from the others.
        """
        if self.in_flight.depth == 1:
            return self.max_num_seqs
        num_new = 0 if self.is_short_of_blocks else min(len(self.waiting), self.max_num_seqs - len(self.running))
        num_free = self.in_flight.depth - len(self.in_flight.steps)
        of_all = -(-(len(self.running) + num_new) // self.in_flight.depth)
        return max(1, min(of_all, -(-(len(self.ready) + num_new) // num_free)))

    def _most_of_a_flow(self) -> int:
        """Compute how many prompt tokens of one flow a step may have: others do not wait for all of its prompts.

        Prompts of a flow that has been alone for SHARED_S, and of requests without a flow, have all of the step; so
        have whole prompts.
        """
        now = self.policy.clock()
        if len(self.policy.open) > 1:
            self._shared_until = now + SHARED_S
        if now >= self._shared_until or self.whole_prompts:
            return self.max_num_batched_tokens
        return max(LEAST_OF_A_FLOW, self.max_num_batched_tokens // FLOWS_IN_A_STEP)

    def _make_way(self) -> None:
        """Preempt the requests that the policy names, if rows or blocks are short: a row for each flow that has none.

        No more than that per step, so that the others recompute only a few rows for each flow that arrives.
        """
        if self._alone or not self.waiting or not (self.is_short_of_blocks or len(self.running) == self.max_num_seqs):
            return
        without = {request.flow for request in self.waiting} - self.policy.rows.keys()
        for _ in range(1 if self.is_short_of_blocks else max(1, len(without))):
            victim = self.policy.victim(self.waiting, self.running)
            if victim is None or victim.request_id in self.in_flight:  # once its step is done
                return
            self.preempt(victim)

    def _add_drafts(self, plan: _Plan, drafts: Mapping[str, list[int]]) -> None:
        """Let requests that lack one token compute their drafts too, as far as tokens and free blocks are left over."""
        for request in self.running:
            ids = drafts.get(request.request_id, [])[: plan.budget]
            if not ids or request.num_missing_tokens != 1 or request.request_id not in plan.tokens:
                continue
            if self.kv_cache.allocate_slots(request, 1 + len(ids)):
                plan.drafts[request.request_id] = ids
                plan.streams.pop(request.request_id, None)
                plan.tokens[request.request_id] += len(ids)
                plan.budget -= len(ids)
                plan.num_stream_tokens += len(ids)

    def _schedule_streams(self, plan: _Plan) -> list[Request]:
        """Plan the next token of each stream that needs no block, in any order, and return the other ready requests.

        If there are too few tokens or rows for all ready requests, return all of them, to be planned in their order.
        """
        ready = self.ready
        if len(ready) > min(plan.budget, plan.max_rows):
            return ready
        streams, others = self.kv_cache.settled_streams(ready)
        new_block_ids, num_released = self.kv_cache.no_updates
        plan.streams = {
            request.request_id: ScheduledRequest(
                request.request_id, request.num_computed_tokens, 1, new_block_ids, num_released, 1
            )
            for request in streams
        }
        plan.tokens = dict.fromkeys(plan.streams, 1)
        plan.budget -= len(plan.tokens)
        plan.num_stream_tokens += len(plan.tokens)
        return others

    def _schedule_running(self, request: Request, plan: _Plan) -> None:
        num_new = self._fit(plan, request, request.num_computed_tokens)
        if num_new == 0:
            return
        # Each round preempts a request, at last this one itself, so the loop ends.
        while not self.kv_cache.allocate_slots(request, num_new):
            victim = max(self.running, key=self.policy.rank)
            if victim.request_id in self.in_flight:  # its step is awaited, and may even end it
                plan.waits_for_blocks = True
                return
            self.preempt(victim)
            plan.budget += plan.tokens.pop(victim.request_id, 0)
            plan.preempted.add(victim.request_id)
            if victim is request:
                return
        self._grant(plan, request, num_new)

    def _fit(self, plan: _Plan, request: Request, num_computed: int) -> int:
        """Count how many tokens of a request the step still has room for, from num_computed on."""
        num_missing = request.num_tokens - num_computed
        num_new = min(num_missing, plan.budget)
        if request.flow and not request.is_stream:
            num_new = min(num_new, plan.most_of_a_flow - plan.of_flows[request.flow])
        if self.whole_prompts and num_new < num_missing:
            return 0
        if self.pace is None or not num_new or request.is_stream:
            return num_new
        num_streams = plan.num_stream_tokens or self.in_flight.num_streams  # those in flight wait for this step too
        if plan.allowance is None and num_streams:
            plan.allowance = self.pace.allowance(num_streams)
        return num_new if plan.allowance is None else plan.allowance.fit(num_new, num_computed)

    def _grant(self, plan: _Plan, request: Request, num_new: int) -> None:
        assert 0 < num_new <= min(plan.budget, request.num_missing_tokens), "tokens that are not there are granted"
        assert request.request_id not in plan.tokens, "a request is twice in a step"
        plan.tokens[request.request_id] = num_new
        plan.budget -= num_new
        if not request.is_stream:
            plan.of_flows[request.flow] += num_new
        if self.pace is None:
            return
        if request.is_stream:
            plan.num_stream_tokens += num_new
        elif plan.allowance is not None:
            plan.allowance.spend(num_new, request.num_computed_tokens)

    def preempt(self, request: Request) -> None:
        """Free a running request's blocks; it waits at the head of the queue to be recomputed."""
        self.running.remove(request)
        self._free(request)
        assert request.num_computed_tokens == 0, "its blocks are gone, so all of it is recomputed"
        self.waiting.appendleft(request)
        self.num_preempted += 1
        self.policy.preempted(request)
        self.num_preemptions += 1
        self._on_preemption(request)

    def _free(self, request: Request) -> None:
        self._removed.append(request.request_id)
        self._forked.discard(request.request_id)
        self.in_flight.lose(request)
        self.kv_cache.free(request)

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Start waiting requests in the policy's order; none in a step that had to preempt for lack of blocks."""
        self.is_short_of_blocks = False
        if plan.preempted or plan.waits_for_blocks or not self.waiting or len(self.running) == self.max_num_seqs:
            return
        if not self._alone and not self.policy.is_time_to_start(self.waiting, len(self.running)):
            return
        held_back: list[Request] = []
        max_num_seqs = 1 if self._alone else self.max_num_seqs
        held_hashes: set[bytes] = set()  # of whole prompts held back, so that equal ones are not looked up
        candidates = iter([self._alone[0]]) if self._alone else self.policy.candidates(self.waiting, plan.exhausted)
        while plan.budget and len(self.running) < max_num_seqs and len(held_back) < MAX_HELD_BACK and not plan.is_full:
            request = next(candidates, None)
            if request is None:
                break
            if request.flow and plan.of_flows[request.flow] == plan.most_of_a_flow:
                plan.exhausted.add(request.flow)
                continue
            self.waiting.remove(request)
            is_known = bool(request.block_hashes) and request.block_hashes[-1] in held_hashes
            if is_known or request.request_id in self.in_flight:  # a run that has lost its results
                held_back.append(request)
                continue
            prefix = self.kv_cache.get_computed_blocks(request)
            if prefix.in_progress:
                held_back.append(request)
                held_hashes.add(request.block_hashes[-1])
                continue
            room = self._fit(plan, request, prefix.num_blocks * self.kv_cache.block_size)
            num_new = self.kv_cache.admit(request, prefix, room) if room else None
            if num_new is None:
                self.is_short_of_blocks = room > 0
                held_back.append(request)
                break
            self._start(request, num_new, plan)
        self.waiting.extendleft(reversed(held_back))

    def _start(self, request: Request, num_new: int, plan: _Plan) -> None:
        self.num_preempted -= request.has_run
        num_prompt_tokens = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            num_prompt_tokens = request.num_prompt_tokens - request.num_cached_tokens
            self.num_cached_tokens += request.num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_prefix_queries += request.num_prompt_tokens * self.kv_cache.looks_up(request)
        self.running.append(request)
        plan.new.add(request.request_id)
        self.policy.started(request, num_prompt_tokens)
        self._grant(plan, request, num_new)

    def _output(self, plan: _Plan, checksum_logits: bool) -> SchedulerOutput:
        chosen, ready = [request for request in self.running if request.request_id in plan.tokens], plan.streams
        new = plan.new | self._forked
        new_requests = [self._new_request(request) for request in chosen if request.request_id in new] if new else []
        self._forked.difference_update(plan.tokens)
        scheduled = [ready.get(request.request_id) or self._scheduled_request(request, plan) for request in chosen]
        # A request that runs and is left out of the plan keeps its blocks; one in the plan that does not run has none.
        assert len(scheduled) == len(plan.tokens), "a request is in the plan and does not run"
        copies, offload = self.kv_cache.pop_copies(), self.kv_cache.offload
        saves, loads = ([], []) if offload is None else offload.pop_transfers()
        return SchedulerOutput(
            self._next_step_id, new_requests, scheduled, self._removed, checksum_logits,
            block_copies=copies, block_saves=saves, block_loads=loads,
        )  # fmt: skip

    def _new_request(self, request: Request) -> NewRequest:
        tables = self.kv_cache.tables(request)
        self.kv_cache.pop_updates(request)
        return NewRequest(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            choice=request.choice,
            block_tables=tables,
            sampler_state=request.sampler_state,
            adapter=NO_ADAPTER if request.adapter is None else request.adapter.slot,
        )

    def _scheduled_request(self, request: Request, plan: _Plan) -> ScheduledRequest:
        new_block_ids, num_released = self.kv_cache.pop_updates(request)
        num_new, drafts = plan.tokens[request.request_id], plan.drafts.get(request.request_id, ())
        is_sampled = num_new == request.num_missing_tokens + len(drafts) and request.params.pooling is None
        return ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new,
            new_block_ids=new_block_ids,
            num_released_blocks=num_released,
            num_samples=1 + len(drafts) if is_sampled else 0,
            draft_token_ids=drafts,
        )
