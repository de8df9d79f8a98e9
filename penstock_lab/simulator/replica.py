"""Replica: one engine on its own clock, and the requests that were sent to it.

As long as no request waits or ends and free blocks suffice, every step of an engine gives each running stream one
token. Such steps are counted instead of planned (`leap`): their times are added up one by one, and the engine's own
objects are updated once with the result of all of them. What the engine decides afterwards is the same, to the block
(except that equivalent blocks may have other numbers), and so are all figures: tests compare them.

CostExecutor takes the place of the model: it computes nothing, and sets the clock forward by the time of a step.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from penstock import EngineError, FinishReason, InvalidRequestError, SamplingParams
from penstock.client.admission import QueuedTokens
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineRequest
from penstock.interface.step import Executor, RequestStepOutput, SchedulerOutput, StepOutput
from penstock_lab.simulator.arrivals import Arrival
from penstock_lab.simulator.figures import Figures, RequestTimes

MIN_LEAP_STEPS = 2  # steps; fewer are computed one by one
NUM_IDS = 2**62  # size of the vocabulary: each prompt has its own id, so that no prompt begins like another by accident
TOKEN = 0  # the id of every output token; prompts are made of other ids


class StepCosts(Protocol):
    """The durations of steps on some machine."""

    @property
    def request(self) -> float:
        """Seconds of a request's way to the engine and of its first token's way back."""

    def step_seconds(self, step: SchedulerOutput) -> float:
        """Compute the seconds from the plan of a step to the plan of the next one, if there is work for it."""

    def decode_seconds(self, sequences: int, cached_tokens: int) -> float:
        """Compute the same for a step in which `sequences` get a token each and attend to `cached_tokens` in all."""

    def as_json(self) -> dict[str, str | float]:
        """Describe the costs for a report."""


class VirtualClock:
    """A clock that stands still until it is set. The engine calls it instead of time.monotonic()."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CostExecutor:
    """Answers every step with one token for each sample, at the time when the step would have ended."""

    depth = 1

    def __init__(self, costs: StepCosts, clock: VirtualClock) -> None:
        self._costs = costs
        self._clock = clock

    def submit(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        return scheduler_output

    def collect(self, handle: SchedulerOutput) -> StepOutput:
        self._clock.now += self._costs.step_seconds(handle)
        results = {item.request_id: RequestStepOutput([TOKEN] if item.num_samples else []) for item in handle.scheduled}
        return StepOutput(handle.step_id, results)

    def shutdown(self) -> None: ...


MakeEngine = Callable[[Executor, VirtualClock], Engine]


def num_forced_steps(engine: Engine) -> int:
    """Count how many of the next steps are already decided and end no request; 0 if that is hard to say."""
    scheduler, cache = engine.scheduler, engine.kv_cache
    running, (group, *others) = scheduler.running, cache.groups
    is_plain = not others and not group.ring and group.sliding_window is None and scheduler.pace is None
    if scheduler.waiting or not is_plain or len(running) > scheduler.max_num_batched_tokens:
        return 0
    if scheduler.is_trying or engine.speculation is not None:
        return 0
    count = min((item.max_output_tokens - item.num_output_tokens for item in running), default=0) - 1
    if count < MIN_LEAP_STEPS or not all(item.is_stream for item in running):
        return 0
    size = group.block_size
    needed = sum(-(-(item.num_tokens - 1 + count) // size) + (item.num_tokens - 1) // -size for item in running)
    return count if needed <= cache.num_free else 0


def leap(engine: Engine, costs: StepCosts, now: float, until: float) -> tuple[float, int, Counter[float]]:
    """Take forced steps, as many as begin before `until`.

    Returns:
        The time at which the last of them ends, their number, and a count of steps by duration; (now, 0, empty) if the
        next step has to be planned.
    """
    seconds = Counter[float]()
    most = num_forced_steps(engine)
    if not most:
        return now, 0, seconds
    running, count = engine.scheduler.running, 0
    sequences, cached = len(running), sum(item.num_computed_tokens for item in running)
    while count < most and now < until:
        ended = now + costs.decode_seconds(sequences, cached)
        seconds[ended - now] += 1
        now = ended
        cached += sequences
        count += 1
    for request in running:
        if not engine.kv_cache.allocate_slots(request, count):
            raise EngineError(f"{count} steps were taken for which there are no blocks")
        request.token_ids.extend([TOKEN] * count)
        request.num_computed_tokens += count
        engine.kv_cache.commit(request)
        engine.scheduler.policy.generated(request, count)
    return now, count, seconds


@lru_cache(maxsize=2**16)
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)


@lru_cache(maxsize=2**16)
def prefix_id(group: str) -> int:
    """Hash a group to the id of which its prefixes consist. It is even; the ids of single prompts are odd."""
    return 2 * (1 + int.from_bytes(hashlib.blake2b(group.encode(), digest_size=7).digest()))


@dataclass(slots=True, kw_only=True)
class OpenRequest(RequestTimes):
    """A request until its answer is complete.

    Attributes:
        number: of the arrival.
        num_deaths: engines that died with it since it got its last token.
        at_death: number of tokens that it had at the last death.
    """

    number: int
    arrival: Arrival
    num_deaths: int = 0
    at_death: int = -1

    @property
    def num_outputs(self) -> int:
        return 0 if self.last_at is None else self.gaps + 1

    @property
    def rest(self) -> Arrival:
        """The part still to be computed. The tokens received so far belong to the prompt."""
        done, arrival = self.num_outputs, self.arrival
        if not done:
            return arrival
        return arrival._replace(prompt_len=arrival.prompt_len + done, output_len=arrival.output_len - done)


class Replica:
    """An engine, driven from outside: `add` requests up to the time of its clock, then `step`.

    Attributes:
        clock: the end of the last computed step.
        num_open: requests that have not ended.
    """

    def __init__(self, make_engine: MakeEngine, costs: StepCosts, figures: Figures) -> None:
        self.clock = VirtualClock()
        self._costs = costs
        self.figures = figures
        self._make_engine = make_engine
        self.engine = make_engine(CostExecutor(costs, self.clock), self.clock)
        self._open: dict[str, OpenRequest] = {}
        self._noted = [0, 0, 0]  # the part of the engine's counters that the figures include
        self._queued: QueuedTokens | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def count_queued(self) -> QueuedTokens:
        """Read the tokens that this engine has to compute, which are kept up to date. A router adds the requests."""
        self._queued = QueuedTokens()
        return self._queued

    def add(self, request: OpenRequest) -> bool:
        """Send a request to the engine. Return False if it is too long for the context or the cache."""
        arrival, number = request.arrival, request.number
        shared = min(arrival.prefix_len, arrival.prompt_len - 1)  # no two prompts are equal
        ids = [2 * number + 1] * (arrival.prompt_len - shared)
        if shared:
            ids = [prefix_id(arrival.prefix_group)] * shared + ids
        request_id = str(number)
        source = EngineRequest(request_id, ids, _params(arrival.output_len), arrived_at=request.sent_at)
        if request.num_outputs:
            source.output_token_ids.extend([TOKEN] * request.num_outputs)
        try:
            if arrival.prompt_len + arrival.output_len > self.engine.max_model_len:
                raise InvalidRequestError("too long")
            self.engine.add_request(source)
        except InvalidRequestError:
            self.figures.rejected += 1
            if self._queued is not None:
                self._queued.remove(request_id)
            return False
        self._open[request_id] = request
        return True

    def restart(self) -> list[OpenRequest]:
        """Begin with a new engine, and so with an empty cache. Return the requests that the old one still had."""
        self._note_counters()
        self._noted = [0, 0, 0]
        self.engine = self._make_engine(CostExecutor(self._costs, self.clock), self.clock)
        requests = list(self._open.values())
        for request_id, request in self._open.items():
            has_more = request.num_outputs > request.at_death
            request.num_deaths, request.at_death = 1 if has_more else request.num_deaths + 1, request.num_outputs
            if self._queued is not None:
                self._queued.remove(request_id)
        self._open.clear()
        return requests

    def run_until(self, at: float) -> None:
        """Take every step that begins before `at`, when a request comes; steps without decisions all at once."""
        while self.engine.has_work and self.clock.now < at:
            if not self._leap(at):
                self.step()

    def _leap(self, until: float) -> int:
        """Take steps in which every open request gets one token, if such steps come next. Return their number."""
        began, figures = self.clock.now, self.figures
        if any(request.last_at != began for request in self._open.values()):  # its next gap differs from others
            return 0
        now, count, gaps = leap(self.engine, self._costs, began, until)
        if count:
            self.clock.now = now
            num_open = len(self._open)
            for seconds, number in gaps.items():
                figures.times["itl"].add(seconds, number * num_open)
            for request in self._open.values():
                figures.more_gaps(request, now, gaps)
            figures.output_tokens += count * num_open
            figures.steps += count
            figures.busy_s += now - began
        return count

    def step(self) -> int:
        """Compute one step, and set the clock to its end. Return how many requests have ended with it.

        Raises:
            EngineError: the engine failed, which is a bug in this program.
        """
        began, figures, num_ended = self.clock.now, self.figures, 0
        outputs = self.engine.step()
        now, gaps = self.clock.now, Counter[float]()
        for output in outputs:
            request = self._open[output.request_id]
            if request.last_at is None:
                figures.first_token(request, now)
            else:
                figures.gap(request, now, gaps)
            if output.finish_reason is not None:
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineError(f"the simulated engine failed: {output.error}")
                figures.finish(request, now)
                num_ended += 1
                del self._open[output.request_id]
        for seconds, count in gaps.items():
            figures.times["itl"].add(seconds, count)
        figures.output_tokens += len(outputs)
        figures.steps += 1
        figures.busy_s += now - began
        if self._queued is not None:
            for output in outputs:
                self._queued.computed(output.request_id, len(output.new_token_ids))
                if output.finish_reason is not None:
                    self._queued.remove(output.request_id)
        if num_ended:
            self._note_counters()
        return num_ended

    def _note_counters(self) -> None:
        scheduler, figures = self.engine.scheduler, self.figures
        found = [scheduler.num_prompt_tokens, scheduler.num_cached_tokens, scheduler.num_preemptions]
        more = [count - before for count, before in zip(found, self._noted, strict=True)]
        figures.prompt_tokens += more[0]
        figures.cached_tokens += more[1]
        figures.preemptions += more[2]
        self._noted = found
