"""Computes the steps of a record again, as they were planned and with the same blocks, and compares the bits.

A record begins in the middle of things. Requests that were open then, and cached prefixes that they and later requests
reuse, are first computed from their tokens: the same tokens leave the same bits in the cache, whatever the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from penstock import EngineError, InvalidRequestError, SamplingParams
from penstock.client.recorder import score_checksums
from penstock.client.records import Bundle, Computed, EngineDescription, UsedAdapter
from penstock.engine.adapters import Adapters
from penstock.interface.step import (
    BlockCopy,
    CacheGroup,
    Executor,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from penstock_lab.bench.record_audit import needed_blocks
from penstock_lab.bench.record_history import EngineStart, RecordedStep, history

RESTORED = "\0restored"  # request id under which cached tokens are computed again
GREEDY = SamplingParams(temperature=0.0)
LOGITS, IDS, SCORES, ERROR, STEP = "logits", "token ids", "log-probabilities", "error", "step"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a replay differs from its record.

    Attributes:
        what: "token ids" (the logits differ too, unless it says so), "logits" (the same token was chosen),
            "log-probabilities", "error" (the request failed in only one of the two), or "step" (the whole step
            failed in only one of the two).
        position: index of the sampled token in prompt and outputs; None if a whole step differs.
        recorded, replayed: what was found, as text.
    """

    step_id: int
    request_id: str | None
    position: int | None
    what: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class ReplayReport:
    """The result of one replay.

    Attributes:
        computed: whether the steps were computed again, not only checked.
        steps, tokens: numbers compared, up to the first difference.
        restored: number of tokens that were computed before their request's first recorded step.
        differences: all differences of the first step that differs.
        findings: what the scheduler did wrong (bench/record_audit.py).
        remarks: what limits the comparison.
    """

    reason: str
    computed: bool = False
    steps: int = 0
    tokens: int = 0
    restored: int = 0
    differences: list[Difference] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.differences and not self.findings


def compute(
    bundle: Bundle,
    executor: Executor,
    report: ReplayReport,
    num_blocks: list[int],
    announce: Callable[[str], None] = lambda line: None,
    adapters: Adapters | None = None,
) -> None:
    """Compute the steps of a checked bundle on an executor without requests, up to the first difference.

    adapters: those of the executor; None if it takes none.

    Raises:
        InvalidRequestError: an adapter cannot be loaded, or its files have changed.
    """
    replayer = Replayer(executor, report, num_blocks, adapters)
    report.computed, report.steps = True, 0
    try:
        for event in history(bundle.records):
            if isinstance(event, EngineStart):
                replayer.start(event)
                continue
            if event.unfinished:
                announce(f"step {event.plan.step_id} has no results: the engine ended in it, and so may this process")
            replayer.step(event)
            if report.differences:
                return
    finally:
        replayer.forget_all()


def num_scratch(group: CacheGroup, engine: EngineDescription) -> int:
    """Count the blocks that replace, in turn, those behind a window: blocks of a window and a step."""
    if group.ring or group.sliding_window is None:
        return 0
    return -(-(group.sliding_window + engine.max_num_batched_tokens) // group.block_size) + 1


class Replayer:
    """Gives recorded steps to an executor.

    Args:
        num_blocks: per cache group, the blocks of the record; the executor has num_scratch more.
    """

    def __init__(
        self, executor: Executor, report: ReplayReport, num_blocks: list[int], adapters: Adapters | None = None
    ) -> None:
        self._executor, self._adapters = executor, adapters
        self._report = report
        self._num_blocks = num_blocks
        self._engine: EngineDescription | None = None
        self._tables: dict[str, list[list[int]]] = {}
        self._slots: dict[int, str] = {}  # slot -> the hash of the adapter in it
        self._written: set[tuple[int, int]] = set()  # (group, block) with the same content as in the recorded engine

    def start(self, start: EngineStart) -> None:
        """Forget everything, then take over the requests that were open."""
        self.forget_all()
        self._engine = start.engine
        self._load(start.adapters)
        for item in start.requests:
            self._restore(item.request, item.num_computed_tokens)
        self._learn([item.request for item in start.requests])
        self._prepare(SchedulerOutput(-1, [item.request for item in start.requests], []))

    def step(self, step: RecordedStep) -> None:
        """Compute a step and compare its results."""
        plan, report = step.plan, self._report
        first = {item.request_id: item.num_computed_tokens for item in plan.scheduled}
        if plan.removed_request_ids:  # before their blocks are restored for other requests
            self._prepare(SchedulerOutput(-1, [], [], plan.removed_request_ids))
        copies = self._possible_copies(plan)
        self._load(step.adapters)
        for request in plan.new_requests:
            self._restore(request, first.get(request.request_id, 0))
        self._learn(plan.new_requests)
        self._note_written(plan)
        try:
            output = self._run(replace(plan, removed_request_ids=[], block_copies=copies))
        except Exception as error:
            self._step_failed(step, error)
            return
        report.steps += 1
        if step.results is not None:
            report.differences += differences(plan, step.results, output)
            report.tokens += sum(map(len, step.results.token_ids))
        elif step.error is not None:
            difference = Difference(plan.step_id, None, None, STEP, f"it failed: {step.error}", "it was computed")
            report.differences.append(difference)
        else:
            report.remarks.append(f"step {plan.step_id}, in which the engine ended, was computed here without a fault")

    def _load(self, adapters: list[UsedAdapter]) -> None:
        """Load adapters into the slots that they had. No request that is open uses another one of the same slot."""
        for used in adapters:
            if self._adapters is None:
                raise InvalidRequestError("bundle: it has adapters, but enable_lora is false", param="bundle")
            if self._slots.get(used.slot) != used.sha256:
                self._adapters.restore(used.slot, used.path, used.sha256)
                self._slots[used.slot] = used.sha256

    def forget_all(self) -> None:
        """Remove every request from the executor."""
        self._run(SchedulerOutput(-1, [], [], [RESTORED, *self._tables]))
        self._tables.clear()
        self._written.clear()

    def _step_failed(self, step: RecordedStep, error: Exception) -> None:
        if step.error is None:
            found = f"it failed: {type(error).__name__}: {error}"
            recorded = "the engine ended in it" if step.unfinished else "it was computed"
            self._report.differences.append(Difference(step.plan.step_id, None, None, STEP, recorded, found))
        else:
            self._report.steps += 1

    def _learn(self, requests: list[NewRequest]) -> None:
        self._tables.update((item.request_id, [list(table) for table in item.block_tables]) for item in requests)

    def _possible_copies(self, plan: SchedulerOutput) -> list[BlockCopy]:
        """Choose the copies whose source has its recorded content. Targets of other copies are computed again."""
        possible = []
        for copy in plan.block_copies:
            if (copy.group, copy.source) in self._written:
                possible.append(copy)
                self._written.add((copy.group, copy.target))
            else:
                self._written.discard((copy.group, copy.target))
        return possible

    def _note_written(self, plan: SchedulerOutput) -> None:
        """Note the blocks that the step writes, and forget the requests that it removed."""
        new = {item.request_id for item in plan.new_requests}
        for request_id in plan.removed_request_ids:
            if request_id not in new:
                self._tables.pop(request_id, None)
        for item in plan.scheduled:
            start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_new_tokens
            for index, (group, table) in enumerate(zip(self._groups, self._tables[item.request_id], strict=True)):
                table.extend(item.new_block_ids[index])
                first, stop = (0, 1) if group.ring else (start // group.block_size, -(-end // group.block_size))
                self._written.update((index, block_id) for block_id in table[first:stop])

    def _restore(self, request: NewRequest, num_computed: int) -> None:
        """Compute the first num_computed tokens of a request into its blocks, unless the blocks hold them already."""
        missing = False
        for index, (group, table) in enumerate(zip(self._groups, request.block_tables, strict=True)):
            stop, hidden = needed_blocks(group, num_computed, num_computed)[1], group.hidden_blocks(num_computed)
            needed = {(index, block_id) for entry, block_id in enumerate(table[:stop]) if entry not in hidden}
            missing |= not needed <= self._written
            self._written |= needed
        if num_computed == 0 or not missing:
            return
        tables = [self._standing_in(index, table, num_computed) for index, table in enumerate(request.block_tables)]
        ids, adapter = request.token_ids[:num_computed], request.adapter
        new = [NewRequest(RESTORED, ids, num_computed, GREEDY, 0, tables, adapter=adapter)]
        nothing: list[list[int]] = [[] for _ in tables]
        for start, count in _chunks(num_computed, self._current().max_num_batched_tokens):
            item = ScheduledRequest(RESTORED, start, count, nothing, [0] * len(tables), 0)
            self._prepare(SchedulerOutput(-1, new, [item]))
            new = []
        self._prepare(SchedulerOutput(-1, [], [], [RESTORED]))
        self._report.restored += num_computed

    def _standing_in(self, index: int, table: list[int], num_computed: int) -> list[int]:
        """Make the table for the computed tokens, with spare blocks where the window has passed."""
        group, first_spare = self._groups[index], self._num_blocks[index]
        spare = num_scratch(group, self._current())
        length = needed_blocks(group, 0, num_computed)[1]
        return [
            block_id if block_id >= 0 else first_spare + entry % spare for entry, block_id in enumerate(table[:length])
        ]

    def _prepare(self, plan: SchedulerOutput) -> None:
        """Compute what is not in the record.

        Raises:
            EngineError: it fails.
        """
        try:
            self._run(plan)
        except Exception as error:
            what = "the state at the start of the record, or a cached prefix, cannot be computed"
            raise EngineError(f"{what}: {type(error).__name__}: {error}") from error

    def _run(self, plan: SchedulerOutput) -> StepOutput:
        return self._executor.collect(self._executor.submit(plan))

    @property
    def _groups(self) -> list[CacheGroup]:
        return self._current().groups

    def _current(self) -> EngineDescription:
        if self._engine is None:
            raise InvalidRequestError("bundle: a step comes before any engine", param="bundle")
        return self._engine


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, size):
        yield start, min(size, count - start)


def differences(plan: SchedulerOutput, recorded: Computed, output: StepOutput) -> list[Difference]:
    """Find the first difference of each request of a step."""
    results = [output.results[item.request_id] for item in plan.scheduled]
    scores = score_checksums(results)
    found = []
    for index, (item, result) in enumerate(zip(plan.scheduled, results, strict=True)):
        ids, checksum, error = recorded.token_ids[index], recorded.checksums[index], recorded.errors.get(index)
        pairs = {
            ERROR: (error, result.error) if (error is None) != (result.error is None) else (None, None),
            IDS: (ids, result.new_token_ids),
            LOGITS: (checksum, result.checksum),
            SCORES: (recorded.scores.get(index), scores.get(index)),
        }
        what = next((name for name, (theirs, ours) in pairs.items() if theirs != ours), None)
        if what is not None:
            theirs, ours = (str(value) for value in pairs[what])
            if what == IDS and checksum == result.checksum:
                ours += " from the same logits"
            position = item.num_computed_tokens + item.num_new_tokens
            found.append(Difference(plan.step_id, item.request_id, position, what, theirs, ours))
    return found
