"""Admission: which requests are let in. A queue that only grows makes everybody late; a refusal in time costs nobody.

A request is refused if it would overfill the queue, which is bounded in requests and in tokens, or if its first token
is not to be expected within the time that may be spent in the queue. That is forecast from what is open and from the
work per second measured while there was a queue. The unit of work is an output token; one of a prompt takes less:

    row 0   [ work of a flow that runs | of one that waits | ... ]
    row 1   [ ..................... | .............. ]              <- a new flow would start here
    ...     max_num_seqs rows, of which each does its share of the work per second

A flow is a call, or all calls of a key. The engine gives each its turn (engine/scheduler.py), and so does the forecast:
a call of many choices keeps a short one neither from the rows nor from the queue. How much longer than forecast
requests have waited of late is part of the next forecast. The refusal says when there will be room. Knows no engine and
sends nothing; not for several threads at once.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock import validation as check
from penstock.client.choice import Choice
from penstock.client.input_processor import PreparedRequest
from penstock.client.open_requests import OpenRequests, Wait
from penstock.errors import EngineOverloadedError
from penstock.interface.messages import EngineOutput, EngineStats

REFRESH_S = 0.05  # how old a forecast may be; what was let in since is in it
REFRESH_S_PER_CHOICE = 5e-5  # and if many are open, so that forecasts take a twentieth of the time
MARGIN = 0.8  # of the time in the queue that a forecast may fill: it may be wrong
MAX_UNMEASURED = 256  # choices that may wait for their first token before a rate has been measured
MIN_MEASURED_S, FORGET_S = 0.5, 4.0  # of work with a queue: less is no measurement; more counts half
TYPICAL_WEIGHT = 0.05  # of the newest choice in the typical number of output tokens
ERROR_WEIGHT, LEAST_ERROR, MOST_ERROR = 0.1, 0.5, 4.0  # of the newest wait in how much longer than forecast waits are


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """What may wait.

    Attributes:
        max_queued_requests: choices that wait for a row. A request that finds none waiting is let in whatever its size,
            and a small one of a flow that has little in a full queue too, so that no flow can fill it for the others.
        max_queued_tokens: tokens of their prompts, in the same way; the choices of one prompt count it once.
        max_queue_wait: seconds that a request which finds no free row may take to its first token; None: any time.
    """

    max_queued_requests: int = 8192
    max_queued_tokens: int = 2**23
    max_queue_wait: float | None = None

    def __post_init__(self) -> None:
        check.check_int("max_queued_requests", self.max_queued_requests, 1, 2**20)
        check.check_int("max_queued_tokens", self.max_queued_tokens, 1, 2**40)
        if self.max_queue_wait is not None:
            check.check_float("max_queue_wait", self.max_queue_wait, 0.0, 1e6, low_open=True)


class Admission:
    """Lets requests in or refuses them.

    Args:
        requests: what is open.
        clock: returns seconds.

    Attributes:
        num_rows: requests that run at once; None until an engine is ready.
        has_priorities: whether the engine's policy takes the most urgent request first.
    """

    def __init__(
        self, limits: AdmissionLimits, requests: OpenRequests, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_rows: int | None = None
        self.has_priorities = False
        self._limits = limits
        self._requests = requests
        self._clock = clock
        self._throughput = Throughput()
        self._engines: dict[int, _Computed] = {}
        self._typical_tokens: float | None = None  # outputs of a choice that may end by itself
        self._error = 1.0  # how many times as long as forecast requests have waited of late
        self._queue = _Queue(1, 1.0)
        self._forecast_at = -math.inf

    def check(
        self,
        flow: str | None,
        num_choices: int = 1,
        num_prompt_tokens: int = 0,
        priority: int | None = None,
        *,
        num_arriving: int = 0,
    ) -> float:
        """Raise EngineOverloadedError if a request of this size is refused now.

        Args:
            flow: whose request it is (EngineRequest.flow); None: of a flow of its own.
            num_prompt_tokens: 0 where they are not known yet.
            priority: under that policy: what is more urgent than all that waits is let in, for it comes next; as there
                are few priorities, these are few. None: not known yet, so that policy refuses nothing yet.
            num_arriving: requests that have passed this check and are not let in yet, all of which may come first.

        Returns:
            The seconds to its first token, by load and rate alone; 0.0 where they foretell nothing.
        """
        if priority is None and self.has_priorities:
            return 0.0
        queue, rate = self._forecast(), self._throughput.work_per_s
        if priority is not None and queue.num_queued and priority < queue.most_urgent:
            return 0.0
        mine = queue.flows.get(flow or "", _Flow())
        self._check_room(queue, mine, num_choices, num_prompt_tokens, num_arriving)
        limit = self._limits.max_queue_wait
        if limit is None or queue.num_open + num_arriving < queue.num_rows:
            return 0.0
        if rate is None:
            if (number := queue.num_queued + num_arriving) > MAX_UNMEASURED:
                raise _full(f"{number} requests, and how fast they are answered is not known yet", 1.0)
            return 0.0
        ahead = queue.work_ahead(mine) + num_arriving * queue.mean_work
        wait_s = (ahead + num_prompt_tokens * queue.prompt_weight) / rate
        expected_s = self._error * wait_s
        if ahead and expected_s > MARGIN * limit:
            what = f"requests whose first token would take {expected_s:.1f} s of at most {limit:g}"
            raise _full(what, expected_s - MARGIN * limit)
        return wait_s

    def _check_room(
        self, queue: "_Queue", mine: "_Flow", num_choices: int, num_prompt_tokens: int, num_arriving: int
    ) -> None:
        """Refuse what overfills the queue, unless it is little, and others have more than their share of it."""
        limits, share = self._limits, 2 * (len(queue.flows) + num_arriving + 1)
        num_queued = queue.num_queued + num_arriving
        if not num_queued:
            return
        beyond_rows = max(0, queue.num_open + num_arriving + num_choices - queue.num_rows)
        place_s = queue.mean_work / (self._throughput.work_per_s or queue.work or 1.0)
        num, limit = min(num_queued + num_choices, beyond_rows), limits.max_queued_requests
        if num > limit and mine.num_queued + num_choices > limit // share:
            raise _full(f"{num_queued} of {limit} requests", place_s)
        num, limit = queue.num_queued_tokens + num_prompt_tokens, limits.max_queued_tokens
        if num > limit and mine.num_queued_tokens + num_prompt_tokens > limit // share:
            raise _full(f"{queue.num_queued_tokens} of {limit} tokens", place_s)

    def admit(self, prepared: PreparedRequest) -> Wait | None:
        """Let a request in, or raise EngineOverloadedError. None: it need not wait, or may for any time."""
        num_prompt_tokens, params = len(prepared.prompt_token_ids), prepared.params
        flow = prepared.engine_requests[0].flow
        priority = prepared.engine_requests[0].priority
        forecast_s = self.check(flow, params.n, num_prompt_tokens, priority)
        waits = self._queue.must_wait
        for index in range(params.n):  # as many rows, of choices or beams
            prompt = 0 if index else num_prompt_tokens  # the others find it in the cache
            self._queue.add(flow, prompt, self.outputs_left(params.max_tokens or 0, params.ignore_eos))
        self._queue.most_urgent = min(self._queue.most_urgent, priority)
        limit, patient = self._limits.max_queue_wait, params.use_beam_search  # whose first token comes with its last
        return Wait(limit, forecast_s) if waits and limit is not None and not patient else None

    def note_wait(self, wait: Wait, seconds: float) -> None:
        """Learn how long a request has waited for its first token, or until it was refused after all."""
        if wait.forecast_s > 0.0:
            ratio = min(MOST_ERROR, max(LEAST_ERROR, seconds / wait.forecast_s))
            self._error += ERROR_WEIGHT * (ratio - self._error)

    def note(self, outputs: Sequence[EngineOutput], stats: EngineStats, engine: int = 0) -> None:
        """Measure a step of one of the engines. What they bear together shows when each of them has a queue."""
        num_prompt_tokens = stats.num_prompt_tokens_total - stats.num_cached_tokens_total
        self._engines[engine] = _Computed(num_prompt_tokens, stats.num_generated_tokens_total, stats.num_waiting > 0)
        engines = self._engines.values()
        computed = sum(its.prompts for its in engines), sum(its.outputs for its in engines)
        self._throughput.note(self._clock(), *computed, has_queue=all(its.has_queue for its in engines))
        for output in outputs:
            if output.finish_reason is not None and output.hypotheses is None and output.pooled is None:
                length = max(1, output.start_index + len(output.new_token_ids))
                before = length if self._typical_tokens is None else self._typical_tokens
                self._typical_tokens = before + TYPICAL_WEIGHT * (length - before)

    def engine_ready(self, num_rows: int, *, has_priorities: bool = False, engine: int = 0) -> None:
        """Count an engine from anew: the counters of a new one begin at 0. num_rows: of all that are ready."""
        self.num_rows, self.has_priorities = num_rows, has_priorities
        self._leave_out(engine)

    def engine_lost(self, num_rows: int, engine: int) -> None:
        """Do without an engine. num_rows: of those that are left; 0 while a successor is awaited."""
        self.num_rows = num_rows or self.num_rows
        self._leave_out(engine)

    def _leave_out(self, engine: int) -> None:
        self._engines.pop(engine, None)
        self._throughput.pause()

    def _forecast(self) -> "_Queue":
        now = self._clock()
        if now - self._forecast_at >= max(REFRESH_S, REFRESH_S_PER_CHOICE * self._queue.num_open):
            self._forecast_at = now
            self._queue = _Queue(self.num_rows or 1, self._throughput.prompt_weight)
            for choice in self._requests.running_choices():
                started, request = bool(choice.token_ids), choice.request
                prompt = 0 if started or request.choice else len(request.prompt_token_ids)
                if not started:
                    self._queue.most_urgent = min(self._queue.most_urgent, request.priority)
                for beam in range(request.params.n if request.params.use_beam_search else 1):
                    # A search tells nothing before its end: it takes its rows, and waits as one request.
                    self._queue.add(
                        request.flow, 0 if beam else prompt, self._left(choice), started=started or beam > 0
                    )
        return self._queue

    def _left(self, choice: Choice) -> float:
        params = choice.request.params
        return self.outputs_left((params.max_tokens or 0) - len(choice.token_ids), params.ignore_eos)

    def outputs_left(self, at_most: int, ignore_eos: bool) -> float:
        """Return the tokens to be expected of a choice, however many it has had."""
        return at_most if ignore_eos or self._typical_tokens is None else min(at_most, self._typical_tokens)


class _Computed(NamedTuple):
    """Tokens that an engine has computed since its start, and whether it has a queue."""

    prompts: int
    outputs: int
    has_queue: bool


@dataclass(slots=True)
class _Flow:
    """What is open of one flow: the work left, and of what waits the choices and the tokens of its prompts."""

    work: float = 0.0
    num_queued: int = 0
    num_queued_tokens: int = 0


class _Queue:
    """The open requests, by flow in order of arrival.

    Attributes:
        prompt_weight: the work of a prompt's token.
        work: what is left of all requests, in output tokens.
        most_urgent: the least priority of what waits.
    """

    def __init__(self, num_rows: int, prompt_weight: float) -> None:
        self.num_rows, self.prompt_weight = num_rows, prompt_weight
        self.flows: dict[str, _Flow] = {}
        self.num_open = self.num_queued = self.num_queued_tokens = 0
        self.work = 0.0
        self.most_urgent: float = math.inf
        self._rows: list[float] | None = None  # the work left of each, a heap; made when it is asked for

    @property
    def must_wait(self) -> bool:
        """Return whether a new request finds no free row."""
        return self.num_open >= self.num_rows

    @property
    def mean_work(self) -> float:
        """Return the work that is left of a choice, on average."""
        return self.work / self.num_open if self.num_open else 0.0

    def add(self, flow: str, prompt: int, outputs: float, *, started: bool = False) -> None:
        """Count a choice; `started`: it has its first token."""
        its, work = self.flows.setdefault(flow, _Flow()), self.prompt_weight * prompt + outputs
        its.work += work
        its.num_queued += not started
        its.num_queued_tokens += prompt
        self.num_open += 1
        self.num_queued += not started
        self.num_queued_tokens += prompt
        self.work += work
        if self._rows is not None:
            heapq.heapreplace(self._rows, self._rows[0] + work)

    def work_ahead(self, flow: _Flow) -> float:
        """Return the work that is done before a further request of a flow begins."""
        if flow.work:  # it comes after its own, at the flow's share of the rows
            return flow.work * min(len(self.flows), self.num_rows)
        if len(self.flows) < self.num_rows:
            return 0.0  # some flow has more than one row, and gives one up
        if self._rows is None:
            self._rows = [0.0] * self.num_rows
            for other in self.flows.values():
                heapq.heapreplace(self._rows, self._rows[0] + other.work)
        return self._rows[0] * self.num_rows


@dataclass(slots=True)
class _Steps:
    """Steps of one kind, summed up."""

    seconds: float = 0.0
    prompts: float = 0.0
    outputs: float = 0.0


class Throughput:
    """What the machine can bear, measured while requests waited.

    Where steps with prompts and without are known, the time of the former beyond that of their outputs is the prompts'.
    Counted alike, the prompts that a batch begins with would promise several times the outputs per second to come.
    """

    def __init__(self) -> None:
        self._plain, self._mixed = _Steps(), _Steps()  # without prompts, and with them
        self._before: tuple[float, int, int] | None = None  # time and counters at the last step, if there was a queue

    @property
    def prompt_weight(self) -> float:
        """Return the work of a prompt's token, of that of an output token: 0 to 1; 1 while it is not known."""
        plain, mixed = self._plain, self._mixed
        if not plain.outputs or not plain.seconds or not mixed.prompts:
            return 1.0
        per_output = plain.seconds / plain.outputs
        per_prompt = (mixed.seconds - mixed.outputs * per_output) / mixed.prompts
        return min(1.0, max(0.0, per_prompt / per_output))

    @property
    def work_per_s(self) -> float | None:
        """Return the rate, in output tokens; None while there has not been a queue for long enough."""
        seconds = self._plain.seconds + self._mixed.seconds
        work = self._plain.outputs + self._mixed.outputs + self.prompt_weight * self._mixed.prompts
        return work / seconds if seconds >= MIN_MEASURED_S and work else None

    def note(self, now: float, prompts: int, outputs: int, *, has_queue: bool) -> None:
        """Count a step that ended `now`. prompts, outputs: tokens since the engine's start."""
        if self._before is not None:
            then, prompts_then, outputs_then = self._before
            steps = self._plain if prompts == prompts_then else self._mixed
            steps.seconds += now - then
            steps.prompts += prompts - prompts_then
            steps.outputs += outputs - outputs_then
        if self._plain.seconds + self._mixed.seconds > FORGET_S:
            for steps in (self._plain, self._mixed):
                steps.seconds, steps.prompts, steps.outputs = steps.seconds / 2, steps.prompts / 2, steps.outputs / 2
        self._before = (now, prompts, outputs) if has_queue else None

    def pause(self) -> None:
        """Leave out the time until the next step."""
        self._before = None


def _full(what: str, retry_after_s: float) -> EngineOverloadedError:
    return EngineOverloadedError(
        f"the queue is full: it has {what}; try again later", retry_after_s=max(1.0, retry_after_s)
    )
