"""Turns the records of a bundle back into starts of engines and their steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import InvalidRequestError
from penstock.interface.step import BlockCopy, NewRequest, ScheduledRequest, SchedulerOutput
from penstock.recorder.records import (
    Begun,
    Computed,
    EngineDescription,
    EngineFailed,
    Introduced,
    Planned,
    Record,
    StepFailed,
    unpack_ids,
)


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request in the middle of its computation. Its first num_computed_tokens tokens are in the cache."""

    request: NewRequest
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Start:
    """An engine that began, or continued after a gap in the records, with the requests that were open."""

    engine: EngineDescription
    epoch: int
    requests: list[OpenRequest]


@dataclass(frozen=True, slots=True)
class Step:
    """One step and its outcome.

    Attributes:
        results: None if the step failed as a whole, or if the engine died in it.
        error: why the step failed as a whole.
    """

    plan: SchedulerOutput
    time: float
    results: Computed | None = None
    error: str | None = None

    @property
    def unfinished(self) -> bool:
        return self.results is None and self.error is None


@dataclass(slots=True)
class _Reader:
    """Turns request numbers back into ids, and columns back into requests."""

    epoch: int = -1
    ids: dict[int, str] = field(default_factory=dict)
    released: dict[int, list[int]] = field(default_factory=dict)
    num_groups: int = 0

    def start(self, record: Begun) -> Start:
        self.ids.clear()
        self.released.clear()
        self.epoch, self.num_groups = record.epoch, len(record.engine.groups)
        found = [OpenRequest(self.request(item), item.num_computed_tokens) for item in record.requests]
        return Start(record.engine, record.epoch, found)

    def request(self, item: Introduced) -> NewRequest:
        if len(item.block_tables) != self.num_groups or item.number in self.ids:
            raise malformed(f"request {item.number} is introduced twice, or its number of block tables is wrong")
        self.ids[item.number] = item.request_id
        self.released[item.number] = [0] * self.num_groups
        tables = [list(table) for table in item.block_tables]
        return NewRequest(
            item.request_id,
            unpack_ids(item.token_ids),
            item.num_prompt_tokens,
            item.params,
            item.choice,
            tables,
            item.sampler_state,
        )

    def plan(self, record: Planned) -> SchedulerOutput:
        removed = [self.ids.pop(number) for number in record.removed if number in self.ids]
        new = [self.request(item) for item in record.new]
        columns = zip(record.numbers, record.num_computed, record.num_new, record.num_samples, strict=True)
        nothing: list[list[int]] = [[] for _ in range(self.num_groups)]
        scheduled = []
        for index, (number, num_computed, num_new, num_samples) in enumerate(columns):
            blocks, released = record.tables.get(index, (nothing, self.released[number]))
            if not len(blocks) == len(released) == self.num_groups:
                raise malformed(f"step {record.step_id} has tables of {len(blocks)} groups")
            self.released[number] = released
            drafts = record.drafts.get(index, ())
            item = ScheduledRequest(self.ids[number], num_computed, num_new, blocks, released, num_samples, drafts)
            scheduled.append(item)
        copies = [BlockCopy(*copy) for copy in record.copies]
        return SchedulerOutput(record.step_id, new, scheduled, removed, checksum_logits=True, block_copies=copies)


def history(records: list[Record]) -> Iterator[Start | Step]:
    """Yield starts and steps in order. The step in which an engine died is the last before the next Start.

    Raises:
        InvalidRequestError: the records contradict each other.
    """
    reader, step = _Reader(), None
    try:
        for record in records:
            match record:
                case Begun():
                    if step is not None and record.epoch != reader.epoch:
                        yield step  # with an equal epoch, its results are missing because the ring was full
                    step = None
                    yield reader.start(record)
                case Planned():
                    if step is not None:
                        yield step
                    step = Step(reader.plan(record), record.time)
                case Computed() | StepFailed() if step is not None and step.plan.step_id == record.step_id:
                    yield _finished(step, record)
                    step = None
                case Computed() | StepFailed():
                    raise malformed(f"results of step {record.step_id}, which was not planned")
    except (KeyError, ValueError) as error:
        raise error if isinstance(error, InvalidRequestError) else malformed(repr(error)) from None
    if step is not None:
        yield step


def engine_errors(records: list[Record]) -> list[str]:
    """Return the exceptions that ended engine processes."""
    return [record.error for record in records if isinstance(record, EngineFailed)]


def malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"bundle: its records are malformed: {why}", param="bundle")


def _finished(step: Step, record: Computed | StepFailed) -> Step:
    if isinstance(record, StepFailed):
        return Step(step.plan, step.time, error=record.error)
    if not len(record.token_ids) == len(record.checksums) == len(step.plan.scheduled):
        raise malformed(f"step {record.step_id} has {len(record.token_ids)} results")
    return Step(step.plan, step.time, results=record)
