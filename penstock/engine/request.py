"""Request: one choice of one user's request inside the engine. Token ids only; no text, no blocks.
StepLog: where a request's time in this engine goes.

    token_ids:  [ prompt ............ | outputs ........ ]
                0      num_prompt_tokens          num_tokens
    computed:   [ keys and values cached |  to be computed ]
                0          num_computed_tokens

There is no prefill phase and no decode phase: num_computed_tokens catches up with num_tokens. A decode lacks one
token; a preempted request lacks all of them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.engine.block_pool import salt_bytes
from penstock.interface.messages import EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.step import SchedulerOutput, TokenLogprobs
from penstock.interface.timeline import COMPUTED, Interval, IntervalKind, Timeline

if TYPE_CHECKING:
    from penstock.engine.scheduler import Scheduler


class Request:
    """State of one request. The engine appends tokens; the engine and the KVCacheManager set num_computed_tokens.

    Attributes:
        source_id: the id under which outputs go to the client. Beams of a search share it; request_id is their own.
        arrival: order of arrival; the youngest is preempted first.
        flow: name of the flow that it belongs to (scheduler.py); "" for none.
        priority, deadline: see EngineRequest; the policy decides what they mean (policies.py).
        arrived_at, waits_since: times on the engine's clock; a preemption renews waits_since.
        max_output_tokens: number of outputs at which it ends with "length"; 0 where it only pools its prompt.
        block_hashes: content hashes of the leading full blocks of token_ids, as far as computed.
        pending_salt: what the cache_salt adds to the hash of a block; b"" once it was added, or without a salt.
        num_cached_tokens: prompt tokens found in the cache at first admission; None before.
        sampler_state: the sampler's after the last token; None before the first, or if draws do not depend on others.
        num_prompt_logprobs: how many have been delivered, so that a recomputed prompt delivers none twice.
    """

    def __init__(self, source: EngineRequest, arrival: int, max_model_len: int, now: float = 0.0) -> None:
        self.request_id = self.source_id = source.request_id
        self.params = source.params
        self.choice = source.choice
        self.arrival = arrival
        self.flow = source.flow
        self.priority = source.priority
        self.deadline = source.deadline
        self.arrived_at = now if source.arrived_at is None else min(now, source.arrived_at)
        self.waits_since = now
        self.token_ids = [*source.prompt_token_ids, *source.output_token_ids]
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.num_computed_tokens = 0
        room = max_model_len - self.num_prompt_tokens
        self.max_output_tokens = room if self.params.max_tokens is None else min(self.params.max_tokens, room)
        if self.params.pooling is not None:
            self.max_output_tokens = 0
        self.block_hashes: list[bytes] = []
        self.pending_salt = salt_bytes(source.cache_salt)
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 0
        self.sampler_state = source.sampler_state

    @property
    def has_run(self) -> bool:  # if it waits now, it was preempted
        return self.num_cached_tokens is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Count the tokens whose keys and values are not computed yet: at least one, the last."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_stream(self) -> bool:
        """Tell whether a running request lacks only its last output, and nothing of its prompt."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_output_tokens

    def ending(self, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
        """Find out why the request ends with its last token, if it does, and the stop token if that is the reason."""
        count = len(self.token_ids) - self.num_prompt_tokens
        if count == 0:
            return None, None
        last, params = self.token_ids[-1], self.params
        if last in eos_token_ids:
            if params.structured_outputs is not None:  # its answer is complete
                return FinishReason.STOP, None
            if count >= params.min_tokens and not params.ignore_eos:
                return FinishReason.STOP, None
        if params.stop_token_ids and count >= params.min_tokens and last in params.stop_token_ids:
            return FinishReason.STOP, last
        return (FinishReason.LENGTH if count >= self.max_output_tokens else None), None

    def new_prompt_logprobs(self, num_computed: int, found: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take the entries of `found` not delivered yet. Its first entry is for the token at num_computed + 1."""
        fresh = found[max(0, self.num_prompt_logprobs - num_computed) :]
        self.num_prompt_logprobs += len(fresh)
        return fresh


@dataclass(slots=True)
class Totals:
    """Sums over the steps so far, as in Interval. The waits are those of any request that waited meanwhile."""

    steps: int = 0
    step_s: float = 0.0
    sequences: int = 0
    no_row_s: float = 0.0
    no_blocks_s: float = 0.0


@dataclass(slots=True)
class Track:
    """The present state of a request, and its intervals that have not been sent.

    Attributes:
        since, reading, computed, generated: when the state began, and what was counted then.
    """

    state: IntervalKind
    since: float
    reading: Totals
    sent: Timeline
    computed: int = 0
    generated: int = 0
    waiting_before: int = 0
    running_before: int = 0


class StepLog:
    """Running totals over all steps, and the tracks of the open requests by request id (a beam search has one).

    Time is noted when a state changes, not in every step: a request costs nothing during a long run of steps, because
    its interval is the difference of two readings of the totals, taken when the run begins and when it ends. The plan
    of a step says what has changed: `new_requests` were started, and a request in `removed_request_ids` that is still
    open was preempted.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.ended = 0.0  # when the last step ended
        self._tracks: dict[str, Track] = {}
        self._stalled: dict[str, IntervalKind] = {}  # the state that each one goes on with

    def arrived(self, request: Request, now: float, scheduler: "Scheduler") -> None:
        """Begin the track of a request that is about to wait."""
        track = Track(IntervalKind.QUEUED, now, replace(self.totals), Timeline(now))
        track.generated = request.num_output_tokens
        track.waiting_before, track.running_before = len(scheduler.waiting), len(scheduler.running)
        self._tracks[request.source_id] = track

    def stepped(
        self,
        plan: SchedulerOutput,
        requests: Mapping[str, Request],
        live: Mapping[str, Request],
        scheduler: "Scheduler",
        began: float,
        ended: float,
    ) -> None:
        """Note a step that has been computed but not committed yet.

        live: the requests of the plan whose results count. began: no earlier than the end of the step before.
        """
        for request_id in plan.removed_request_ids:
            self._stalled.pop(request_id, None)
            request = _alone(requests.get(request_id))
            if request is not None and self._tracks[request_id].state is not IntervalKind.QUEUED:
                self._enter(request, IntervalKind.PREEMPTED, self.ended)
        for new in plan.new_requests:
            self._started(live.get(new.request_id), began)
        if self._stalled or len(plan.scheduled) < len(scheduler.running):
            self._note_stalls(plan, requests, scheduler, began)
        totals = self.totals
        totals.steps += 1
        totals.step_s += ended - began
        totals.sequences += len(plan.scheduled)
        if scheduler.waiting:
            if len(scheduler.running) >= scheduler.max_num_seqs:
                totals.no_row_s += ended - began
            elif scheduler.is_short_of_blocks:
                totals.no_blocks_s += ended - began
        self.ended = ended

    def _started(self, request: Request | None, began: float) -> None:
        if request is None or self._tracks[request.source_id].state in COMPUTED:  # a beam, forked from another one
            return
        has_lost = request.num_output_tokens > 0 or self._tracks[request.source_id].state is IntervalKind.PREEMPTED
        self._enter(request, IntervalKind.RECOMPUTE if has_lost else IntervalKind.PREFILL, began)

    def _note_stalls(
        self, plan: SchedulerOutput, requests: Mapping[str, Request], scheduler: "Scheduler", began: float
    ) -> None:
        scheduled = {item.request_id for item in plan.scheduled}
        for request_id in self._stalled.keys() & scheduled:
            request, kind = requests.get(request_id), self._stalled.pop(request_id)
            if request is not None:
                self._enter(request, kind, began)
        for request in scheduler.running:
            name = request.request_id
            if name in scheduled or name in scheduler.in_flight or _alone(request) is None:
                continue
            state = self._tracks[request.source_id].state
            if state in COMPUTED:
                self._stalled[request.request_id] = state
                self._enter(request, IntervalKind.STALLED, self.ended)

    def committed(self, request: Request, *, has_token: bool, has_ended: bool) -> list[Interval] | None:
        """Note what the last step has computed for a request. Return the intervals to send, if there are any."""
        track = self._tracks[request.source_id]
        if track.state is IntervalKind.DECODE and not track.sent.intervals and not has_ended:  # nearly always
            return None
        if has_ended:
            return self.finished(request)
        if has_token:
            self.has_token(request)
        return self.closed(request)

    def has_token(self, request: Request) -> None:
        """Note that the last step gave a request its next token: from now on it decodes."""
        if self._tracks[request.source_id].state is not IntervalKind.DECODE:
            self._enter(request, IntervalKind.DECODE, self.ended)

    def closed(self, request: Request) -> list[Interval] | None:
        """Take the intervals that have ended since the last call; None if there are none."""
        sent = self._tracks[request.source_id].sent
        if not sent.intervals:
            return None
        found, sent.intervals = sent.intervals, []
        return found

    def finished(self, request: Request) -> list[Interval] | None:
        """Take the last intervals of a request that ends with the last step, and forget it."""
        track = self._tracks.get(request.source_id)
        if track is None:
            return None
        self._enter(request, IntervalKind.DELIVERY, self.ended)
        found = self.closed(request)
        self.forget(request)
        return found

    def forget(self, request: Request) -> None:
        self._tracks.pop(request.source_id, None)
        self._stalled.pop(request.request_id, None)

    def _enter(self, request: Request, state: IntervalKind, at: float) -> None:
        """End the present interval of a request, and begin another one."""
        track, totals = self._tracks[request.source_id], self.totals
        at, reading = max(at, track.since), track.reading
        interval = Interval(track.state, track.since, at)
        if track.state in COMPUTED:
            interval.steps = totals.steps - reading.steps
            interval.step_s = totals.step_s - reading.step_s
            interval.sequences = totals.sequences - reading.sequences
            interval.generated_tokens = max(0, request.num_output_tokens - track.generated)
            if track.state is not IntervalKind.DECODE:
                interval.computed_tokens = max(0, request.num_computed_tokens - track.computed)
        elif track.state in (IntervalKind.QUEUED, IntervalKind.PREEMPTED):
            interval.no_row_s = min(at - track.since, totals.no_row_s - reading.no_row_s)
            interval.no_blocks_s = min(at - track.since, totals.no_blocks_s - reading.no_blocks_s)
            interval.waiting_before, interval.running_before = track.waiting_before, track.running_before
            track.waiting_before = track.running_before = 0
        track.sent.add(interval)
        track.state, track.since, track.reading = state, at, replace(totals)
        track.computed, track.generated = request.num_computed_tokens, request.num_output_tokens


def _alone(request: Request | None) -> Request | None:
    """Return an open request that is not a beam; None otherwise, because the beams of a search differ in state."""
    return request if request is not None and request.request_id == request.source_id else None
