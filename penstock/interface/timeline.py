"""Timeline: where the wall time of a request went, in intervals that follow one another without a gap.

    preparing | queued | prefill | decode | preempted | queued | recompute | decode | delivery
    ^ start                                                                          ^ end

At every moment a request is in one state, and an interval is the time that it spends in a state. So the durations sum
to the wall time by construction. All times are from time.monotonic(), which the processes of a machine share.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

MAX_INTERVALS = 64  # in one timeline; beyond it, the shortest intervals are merged into their neighbours


class IntervalKind(StrEnum):
    """The activity of a request, or the reason why it waited."""

    PREPARING = "preparing"  # its body was read and checked, its text became tokens
    QUEUED = "queued"  # it had no row in the batch yet
    PREFILL = "prefill"  # its prompt was being computed, up to its first token
    DECODE = "decode"  # it was generating tokens
    STALLED = "stalled"  # it had a row, but the steps had no room for it
    PREEMPTED = "preempted"  # it had to give up its row or blocks, or a step had failed
    RECOMPUTE = "recompute"  # what it had lost was being computed again, up to its next token
    RECOVERY = "recovery"  # the engine had died, and no other engine had the request yet
    PAUSED = "paused"  # its reader had left too much unread
    OTHERS = "others"  # this choice had ended, other choices of the call had not
    DELIVERY = "delivery"  # its last token was on the way to the reader


@dataclass(slots=True)
class Interval:
    """Time spent in one state.

    Attributes:
        steps: engine steps in which the request took part.
        step_s: duration of these steps; the rest of the interval lies between them.
        sequences: number of sequences in these steps, summed up.
        computed_tokens: for prefill or recompute: tokens whose keys and values were computed.
        generated_tokens: tokens that the request got.
        waiting_before, running_before: for a queued interval: requests that were there when this one arrived.
        no_row_s, no_blocks_s: for a wait: how long all rows were taken, and how long too few blocks were free.
        merged: number of shorter intervals merged into this one, because there were more than MAX_INTERVALS.
    """

    kind: IntervalKind
    start: float
    end: float
    steps: int = 0
    step_s: float = 0.0
    sequences: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    waiting_before: int = 0
    running_before: int = 0
    no_row_s: float = 0.0
    no_blocks_s: float = 0.0
    merged: int = 0

    @property
    def duration(self) -> float:
        return self.end - self.start

    def absorb(self, later: "Interval") -> None:
        self.end = later.end
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.waiting_before = max(self.waiting_before, later.waiting_before)
        self.running_before = max(self.running_before, later.running_before)


SUMS = ("steps", "step_s", "sequences", "computed_tokens", "generated_tokens", "no_row_s", "no_blocks_s", "merged")
COMPUTED = (IntervalKind.PREFILL, IntervalKind.RECOMPUTE, IntervalKind.DECODE)
UNTIL_NOW = (IntervalKind.DELIVERY, IntervalKind.PAUSED)


@dataclass(slots=True)
class Timeline:
    """The intervals of one choice up to `end`; since then the choice is in `state`.

    Attributes:
        state: the state that counts for time that no interval covers yet.
    """

    start: float
    state: IntervalKind = IntervalKind.QUEUED
    intervals: list[Interval] = field(default_factory=list)
    end: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start

    @property
    def num_generated(self) -> int:
        return sum(interval.generated_tokens for interval in self.intervals)

    def add(self, interval: Interval) -> None:
        """Add a later interval; the time in between counts as `state`. Nothing overlaps and nothing is lost: an
        interval that begins before `end` is cut."""
        self.advance(interval.start)
        if interval.end > self.end or interval.steps:
            self._append(replace(interval, start=self.end, end=max(interval.end, self.end)))
        self.state = IntervalKind.DECODE if interval.kind in COMPUTED else interval.kind

    def extend(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            self.add(interval)

    def enter(self, state: IntervalKind, at: float, num_tokens: int | None = None) -> None:
        """Change the state at a time. num_tokens: tokens of the request so far, if no interval accounts for some."""
        generated = 0 if num_tokens is None else max(0, num_tokens - self.num_generated)
        self.advance(at, generated if self.state is IntervalKind.DECODE else 0)
        self.state = state

    def advance(self, at: float, generated: int = 0) -> None:
        """Count the time up to `at` as `state`."""
        if at > self.end:
            self._append(Interval(self.state, self.end, at, generated_tokens=generated))

    def until(self, at: float) -> "Timeline":
        """Copy the timeline up to `at`, which must not be before `end`."""
        copied = Timeline(self.start, self.state, [replace(interval) for interval in self.intervals])
        copied.end = self.end
        copied.advance(at)
        return copied

    def _append(self, interval: Interval) -> None:
        assert interval.start == self.end <= interval.end, "intervals overlap, or leave a gap"
        self.end = interval.end
        if self.intervals and self.intervals[-1].kind is interval.kind:
            self.intervals[-1].absorb(interval)
            return
        self.intervals.append(interval)
        if len(self.intervals) > MAX_INTERVALS:
            self._merge_shortest()

    def _merge_shortest(self) -> None:
        """Merge the shortest interval, except the first and the last, into the one before it."""
        inner = range(1, len(self.intervals) - 1)
        index = min(inner, key=lambda at: self.intervals[at].duration)
        before = self.intervals[index - 1]
        before.absorb(self.intervals.pop(index))
        before.merged += 1
        if before.kind is self.intervals[index].kind:
            before.absorb(self.intervals.pop(index))

    def seconds(self, kind: IntervalKind) -> float:
        return sum(interval.duration for interval in self.intervals if interval.kind is kind)


@dataclass(slots=True)
class Arrivals:
    """When the tokens of a choice reached the client.

    Attributes:
        first: when the first one did.
        gaps: seconds before each later one; tokens of the same step share the time since the step before.
    """

    first: float = 0.0
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    last: float | None = None

    def note(self, count: int, now: float) -> None:
        """Note that a step brought this many tokens."""
        if self.last is None and count:
            self.first = self.last = now
            count -= 1
        if count and self.last is not None:
            self.gaps.extend([(now - self.last) / count] * count)
            self.last = now


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request, in seconds of time.monotonic(), with vLLM's names; None for what has not happened.

    Attributes:
        time_in_queue: seconds until it was first scheduled.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    time_in_queue: float | None = None

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> "RequestMetrics | None":
        """Read the times of a call from the timelines of its choices; None without timelines."""
        if not timelines:
            return None
        computed = [item for line in timelines for item in line.intervals if item.kind in COMPUTED]
        with_tokens = [item for item in computed if item.generated_tokens]
        arrival = min(line.start for line in timelines)
        if not computed:
            return cls(arrival)
        scheduled = min(item.start for item in computed)
        firsts = [item.end for item in with_tokens if item.kind is not IntervalKind.DECODE]
        last = max((item.end for item in with_tokens), default=None)
        return cls(arrival, scheduled, min(firsts, default=None), last, scheduled - arrival)
