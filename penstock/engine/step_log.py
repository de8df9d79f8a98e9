"""StepLog: where a request's time in this engine goes.

An interval of a request is the difference of two readings of running totals: nothing is written per request and step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.request import Request
from penstock.engine.scheduler import Scheduler
from penstock.interface.step import SchedulerOutput
from penstock.interface.timeline import COMPUTED, Interval, IntervalKind, Timeline


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

    def arrived(self, request: Request, now: float, scheduler: Scheduler) -> None:
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
        scheduler: Scheduler,
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
        self, plan: SchedulerOutput, requests: Mapping[str, Request], scheduler: Scheduler, began: float
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
