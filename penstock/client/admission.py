"""Admission and routing: which requests are let in, and which of several engines computes them.

A queue that only grows makes every request late; an early refusal does not.

A request is refused if it would overfill the queue, which is bounded in requests and in tokens, or if its first token
is not expected within the time that may be spent in the queue. The wait is forecast from the open requests and from the
work per second measured while there was a queue. The unit of work is an output token; a prompt token is less work:

    row 0   [ work of a running flow | work of a waiting flow | ... ]
    row 1   [ ..................... | .............. ]              <- a new flow would start here
    ...     max_num_seqs rows, each of which does its share of the work per second

A flow is a call, or all calls of an API key. The engine gives each flow its turn (engine/scheduler.py), and so does the
forecast: a call with many choices keeps a short call neither from the rows nor from the queue. The forecast is
corrected by how much longer than forecast recent requests have waited. A refusal says when there will be room. This
module knows no engine and sends nothing; it is not thread-safe.
"""

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from penstock.client.open_requests import Choice, OpenRequest, OpenRequests, Wait
from penstock.engine.block_pool import hash_block, salt_bytes
from penstock.errors import EngineOverloadedError, check_float, check_int
from penstock.interface.messages import EngineOutput, EngineStats

REFRESH_S = 0.05  # how old a forecast may be; it includes requests let in since
REFRESH_S_PER_CHOICE = 5e-5  # the same for many open choices, so that forecasts take 1/20 of the time
MARGIN = 0.8  # share of the allowed queue time that a forecast may fill, because forecasts can be wrong
MAX_UNMEASURED = 1024  # choices that may wait before a rate has been measured; benchmarks begin with 1000 at once
MIN_MEASURED_S, FORGET_S = 0.5, 4.0  # seconds with a queue: least for a rate; limit beyond which counts halve
TYPICAL_WEIGHT = 0.05  # weight of the newest choice in the typical number of output tokens
ERROR_WEIGHT, LEAST_ERROR, MOST_ERROR = 0.1, 0.5, 4.0  # weight of the newest wait in _error, and its limits


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Limits of the queue.

    Attributes:
        max_queued_requests: choices that wait for a row. A request that finds none waiting is let in whatever its size.
            So is a small request whose flow has little in a full queue, so that no flow can fill it for the others.
        max_queued_tokens: the same limit for their prompt tokens; the choices of one prompt count it once.
        max_queue_wait: seconds to the first token of a request that finds no free row; None: no limit.
    """

    max_queued_requests: int = 8192
    max_queued_tokens: int = 2**23
    max_queue_wait: float | None = None

    def __post_init__(self) -> None:
        check_int("max_queued_requests", self.max_queued_requests, 1, 2**20)
        check_int("max_queued_tokens", self.max_queued_tokens, 1, 2**40)
        if self.max_queue_wait is not None:
            check_float("max_queue_wait", self.max_queue_wait, 0.0, 1e6, low_open=True)


class Admission:
    """Lets requests in or refuses them.

    Args:
        requests: the open requests.
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
        self._typical_tokens: float | None = None  # outputs of a choice that may end on its own
        self._error = 1.0  # how many times as long as forecast recent requests have waited
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
            flow: the flow that the request belongs to (EngineRequest.flow); None: a flow of its own.
            num_prompt_tokens: 0 if not known yet.
            priority: under the policy "priority", a request more urgent than all waiting ones is let in, because it
                comes next; there are few, as there are few priorities. None: not known yet, so nothing is refused.
            num_arriving: requests of the flow, or of those without one, that have passed this check and are not let in
                yet, all of which may come first. Those of other flows take turns with this one.

        Returns:
            The forecast seconds to the first token, by load and rate alone; 0.0 without a forecast.
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
        ahead = queue.work_ahead(mine) + num_arriving * queue.mean_work
        if rate is None:
            if ahead and (number := queue.num_queued + num_arriving) > MAX_UNMEASURED:
                raise _full(f"{number} requests, and how fast it moves is not known yet", 1.0)
            return 0.0
        wait_s = (ahead + num_prompt_tokens * queue.prompt_weight) / rate
        expected_s = self._error * wait_s
        if ahead and expected_s > MARGIN * limit:
            what = f"so many requests that the first token would take {expected_s:.1f} s (max_queue_wait = {limit:g})"
            raise _full(what, expected_s - MARGIN * limit)
        return wait_s

    def _check_room(
        self, queue: "_Queue", mine: "_Flow", num_choices: int, num_prompt_tokens: int, num_arriving: int
    ) -> None:
        """Refuse a request that overfills the queue, unless it and its flow stay within their share of the queue."""
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

    def admit(self, request: OpenRequest) -> Wait | None:
        """Let a request in, or raise EngineOverloadedError. Return None if its wait is not limited."""
        num_prompt_tokens, params = len(request.prompt_token_ids), request.params
        flow, priority = request.engine_requests[0].flow, request.engine_requests[0].priority
        forecast_s = self.check(flow, params.n, num_prompt_tokens, priority)
        waits = self._queue.must_wait
        for index in range(params.n):  # one row for each choice or beam
            prompt = 0 if index else num_prompt_tokens  # the others find it in the cache
            self._queue.add(flow, prompt, self.outputs_left(params.max_tokens or 0, params.ignore_eos))
        self._queue.most_urgent = min(self._queue.most_urgent, priority)
        limit, patient = self._limits.max_queue_wait, params.use_beam_search  # its first token comes with its last
        return Wait(limit, forecast_s) if waits and limit is not None and not patient else None

    def note_wait(self, wait: Wait, seconds: float) -> None:
        """Learn how long a request has waited for its first token, or until its late refusal."""
        if wait.forecast_s > 0.0:
            ratio = min(MOST_ERROR, max(LEAST_ERROR, seconds / wait.forecast_s))
            self._error += ERROR_WEIGHT * (ratio - self._error)

    def note(self, outputs: Sequence[EngineOutput], stats: EngineStats, engine: int = 0) -> None:
        """Measure a step of one engine. It counts only while every engine has a queue, to show their joint limit."""
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
        """Count a new engine, whose counters begin at 0. num_rows: rows of all engines that are ready."""
        self.num_rows, self.has_priorities = num_rows, has_priorities
        self._leave_out(engine)

    def engine_lost(self, num_rows: int, engine: int) -> None:
        """Count an engine no longer. num_rows: rows of the remaining engines; 0 while a successor is awaited."""
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
                    # A search reports nothing before its end: it takes its rows, and waits as one request.
                    self._queue.add(
                        request.flow, 0 if beam else prompt, self._left(choice), started=started or beam > 0
                    )
        return self._queue

    def _left(self, choice: Choice) -> float:
        params = choice.request.params
        return self.outputs_left((params.max_tokens or 0) - len(choice.token_ids), params.ignore_eos)

    def outputs_left(self, at_most: int, ignore_eos: bool) -> float:
        """Estimate the tokens still to come of a choice, whatever it has received."""
        return at_most if ignore_eos or self._typical_tokens is None else min(at_most, self._typical_tokens)


class _Computed(NamedTuple):
    """Tokens that an engine has computed since its start, and whether it has a queue."""

    prompts: int
    outputs: int
    has_queue: bool


@dataclass(slots=True)
class _Flow:
    """The open choices of one flow: the work left, and the number and prompt tokens of those that wait."""

    work: float = 0.0
    num_queued: int = 0
    num_queued_tokens: int = 0


class _Queue:
    """The open requests, by flow in order of arrival.

    Attributes:
        prompt_weight: the work of a prompt token.
        work: work left for all requests, in output tokens.
        most_urgent: the lowest priority number among waiting requests.
    """

    def __init__(self, num_rows: int, prompt_weight: float) -> None:
        self.num_rows, self.prompt_weight = num_rows, prompt_weight
        self.flows: dict[str, _Flow] = {}
        self.num_open = self.num_queued = self.num_queued_tokens = 0
        self.work = 0.0
        self.most_urgent: float = math.inf
        self._rows: list[float] | None = None  # the work left in each row, a heap; made on demand

    @property
    def must_wait(self) -> bool:
        return self.num_open >= self.num_rows

    @property
    def mean_work(self) -> float:
        return self.work / self.num_open if self.num_open else 0.0

    def add(self, flow: str, prompt: int, outputs: float, *, started: bool = False) -> None:
        """Count a choice. started: whether it has its first token."""
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
        """Sum the work that is done before the next request of a flow begins."""
        if flow.work:  # it comes after the flow's own work, at its share of the rows
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
    """Sums over steps of one kind."""

    seconds: float = 0.0
    prompts: float = 0.0
    outputs: float = 0.0


class Throughput:
    """The work that the machine can do per second, measured while requests waited.

    If steps with and without prompts are known, the time of the former beyond that of their outputs is the prompts'
    time. If prompt and output tokens counted alike, the prompts at the start of a batch would suggest several times the
    outputs per second that follow.
    """

    def __init__(self) -> None:
        self._plain, self._mixed = _Steps(), _Steps()  # without prompts, and with them
        self._before: tuple[float, int, int] | None = None  # time and counters at the last step, if there was a queue

    @property
    def prompt_weight(self) -> float:
        """The work of a prompt token relative to an output token, 0 to 1; 1 while it is not known."""
        plain, mixed = self._plain, self._mixed
        if not plain.outputs or not plain.seconds or not mixed.prompts:
            return 1.0
        per_output = plain.seconds / plain.outputs
        per_prompt = (mixed.seconds - mixed.outputs * per_output) / mixed.prompts
        return min(1.0, max(0.0, per_prompt / per_output))

    @property
    def work_per_s(self) -> float | None:
        """The rate in output tokens; None until there has been a queue for long enough."""
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
        """Do not count the time until the next step."""
        self._before = None


def _full(what: str, retry_after_s: float) -> EngineOverloadedError:
    return EngineOverloadedError(
        f"the queue is full: it has {what}; try again later", retry_after_s=max(1.0, retry_after_s)
    )


# --- which engine computes a request ----------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
MAX_KNOWN = 2**16  # blocks that are remembered per engine
MAX_LOOKED_AT = 2**11  # first blocks of a prompt that are compared; later ones are ignored


def block_hashes(
    token_ids: Sequence[int],
    salt: str | None,
    block_size: int,
    known: Sequence[bytes] = (),
    *,
    most: int = MAX_LOOKED_AT,
    root: bytes = b"",
) -> list[bytes]:
    """Hash the first full blocks of a prompt. `known`: hashes of the first of them. Different salts share no hash,
    nor do different adapters, whose `root` is Adapters.root_hash."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root + salt_bytes(salt)
    num_tokens = min(len(token_ids) // block_size, most) * block_size
    for start in range(len(hashes) * block_size, num_tokens, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


class Router(Generic[Key]):
    """Chooses among engines, which have any hashable keys: an index, or the id of a replica elsewhere.

        cost of an engine = tokens that it still has to compute + prompt tokens that its cache does not have

    The engine with the lowest cost gets the request. So a prefix attracts the requests that begin with it, until a
    further request could compute it sooner elsewhere; then the prefix is in two caches, and so on. No engine is ever
    given more than a prompt's length beyond the engine that has the least to do.

    The router does not ask an engine what its cache holds. It remembers the content hashes of the full blocks that it
    sent there recently. If the engine has evicted some of them, the request takes longer, and its answer is the same.

    Args:
        block_size: tokens per block of their caches.
        max_known: blocks to remember of each engine, ideally as many as its cache has.
    """

    def __init__(self, block_size: int, max_known: int = MAX_KNOWN) -> None:
        self._block_size = block_size
        self._max_known = max(1, min(max_known, MAX_KNOWN))
        self._known: dict[Key, OrderedDict[bytes, None]] = {}  # by engine, least recently used first
        self._chosen: dict[Key, int] = {}  # when each engine was last chosen
        self._num_chosen = 0

    def cached_tokens(self, key: Key, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Count the prompt tokens that an engine finds in its cache: whole blocks, and never the last token."""
        known = self._known.get(key)
        if known is None:
            return 0
        usable = hashes[: max(0, num_tokens - 1) // self._block_size]
        count = next((index for index, block in enumerate(usable) if block not in known), len(usable))
        return count * self._block_size

    def choose(self, hashes: Sequence[bytes], num_tokens: int, queued: Mapping[Key, float]) -> Key:
        """Choose the engine that computes a prompt; among equals, the one chosen longest ago.

        Args:
            hashes: hashes of the prompt's full blocks.
            queued: tokens that each eligible engine still has to compute; at least one engine.
        """
        chosen = min(
            queued,
            key=lambda key: (queued[key] - self.cached_tokens(key, hashes, num_tokens), self._chosen.get(key, 0)),
        )
        self._num_chosen += 1
        self._chosen[chosen] = self._num_chosen
        return chosen

    def note(self, key: Key, hashes: Sequence[bytes]) -> None:
        """Remember that an engine computes these blocks. The first block is forgotten last, because without it the
        others cannot be found."""
        known = self._known.setdefault(key, OrderedDict())
        for block in reversed(hashes):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_known:
            known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget what an engine has cached, because its process has ended."""
        self._known.pop(key, None)


@dataclass(slots=True)
class _Work:
    prompt: float
    outputs: float
    rows: int


class QueuedTokens:
    """The work left for an engine, by choice: tokens of prompts without an output yet, and expected outputs.

    Attributes:
        total: number of tokens.
        rows: number of rows that these choices take.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0
        self._work: dict[str, _Work] = {}

    def __len__(self) -> int:
        return len(self._work)

    def add(self, choice: str, prompt: float, outputs: float, rows: int = 1) -> None:
        """Count a choice. A choice that is already counted is replaced."""
        self.remove(choice)
        self._work[choice] = _Work(prompt, outputs, rows)
        self.total += prompt + outputs
        self.rows += rows

    def computed(self, choice: str, num_tokens: int) -> None:
        """Note that a choice got outputs, so its prompt is computed."""
        work = self._work.get(choice)
        if work is not None and num_tokens:
            done = min(work.outputs, num_tokens)
            self.total -= work.prompt + done
            work.prompt, work.outputs = 0.0, work.outputs - done

    def remove(self, choice: str) -> None:
        work = self._work.pop(choice, None)
        if work is not None:
            self.total -= work.prompt + work.outputs
            self.rows -= work.rows
            assert self.rows >= 0, "rows of more choices were removed than were added"
        if not self._work:
            assert self.rows == 0, "an engine without choices has all its rows free"
            self.total = 0.0  # so that rounding errors leave nothing behind
