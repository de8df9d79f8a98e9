"""Turns the records of a bundle back into starts of engines and their steps."""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from penstock import InvalidRequestError
from penstock.client.records import (
    DIGEST_BYTES,
    FORMAT,
    MAGIC,
    MAX_BYTES,
    Begun,
    Bundle,
    Computed,
    EngineDescription,
    EngineFailed,
    Introduced,
    Planned,
    Record,
    StepFailed,
    UsedAdapter,
    unpack_ids,
)
from penstock.errors import invalid
from penstock.interface.step import NO_ADAPTER, BlockCopy, NewRequest, ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request in the middle of its computation. Its first num_computed_tokens tokens are in the cache."""

    request: NewRequest
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine that began, or continued after a gap in the records, with the requests that were open."""

    engine: EngineDescription
    epoch: int
    requests: list[OpenRequest]
    adapters: list[UsedAdapter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step and its outcome.

    Attributes:
        results: None if the step failed as a whole, or if the engine died in it.
        error: why the step failed as a whole.
        adapters: those of the requests that are new in it.
    """

    plan: SchedulerOutput
    time: float
    results: Computed | None = None
    error: str | None = None
    adapters: list[UsedAdapter] = field(default_factory=list)

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

    def start(self, record: Begun) -> EngineStart:
        self.ids.clear()
        self.released.clear()
        self.epoch, self.num_groups = record.epoch, len(record.engine.groups)
        found = [OpenRequest(self.request(item), item.num_computed_tokens) for item in record.requests]
        return EngineStart(record.engine, record.epoch, found, _adapters(record.requests))

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
            NO_ADAPTER if item.adapter is None else item.adapter.slot,
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


def history(records: list[Record]) -> Iterator[EngineStart | RecordedStep]:
    """Yield starts and steps in order. The step in which an engine died is the last before the next EngineStart.

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
                    step = RecordedStep(reader.plan(record), record.time, adapters=_adapters(record.new))
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
    """List the exceptions that ended engine processes."""
    return [record.error for record in records if isinstance(record, EngineFailed)]


def malformed(why: str) -> InvalidRequestError:
    return invalid("bundle", f"its records are malformed: {why}")


def _finished(step: RecordedStep, record: Computed | StepFailed) -> RecordedStep:
    if isinstance(record, StepFailed):
        return replace(step, error=record.error)
    if not len(record.token_ids) == len(record.checksums) == len(step.plan.scheduled):
        raise malformed(f"step {record.step_id} has {len(record.token_ids)} results")
    return replace(step, results=record)


def _adapters(requests: list[Introduced]) -> list[UsedAdapter]:
    return [item.adapter for item in requests if item.adapter is not None]


# --- files -----------------------------------------------------------------------------------------------------------


def unpack(data: bytes) -> Bundle:
    """Decode the bundle in the bytes of a file.

    Raises:
        InvalidRequestError: the file is not a bundle, is damaged, or has the format of another version of Penstock.
    """
    body = data[len(MAGIC) + DIGEST_BYTES :]
    if not data.startswith(MAGIC):
        raise _broken("it is not a record of Penstock")
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != data[len(MAGIC) :][:DIGEST_BYTES]:
        raise _broken("its checksum does not match: the file is damaged or cut off")
    try:
        inflate = zlib.decompressobj()
        content = inflate.decompress(body, MAX_BYTES)
        if inflate.unconsumed_tail:
            raise _broken(f"its content is larger than {MAX_BYTES} bytes")
        version = msgspec.msgpack.decode(content, type=_Version)
        if version.format != FORMAT:
            raise _broken(f"it has format {version.format}, and this version of Penstock reads format {FORMAT}")
        bundle = msgspec.msgpack.decode(content, type=Bundle)
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise _broken(f"its content is malformed: {error}") from None
    if not bundle.records or not isinstance(bundle.records[0], Begun):
        raise _broken("it does not begin with an engine")
    return bundle


def read_bundle(path: str) -> Bundle:
    """Read the bundle in a file, and no more of the file than a bundle can have.

    Raises:
        InvalidRequestError: the file cannot be read, or its content is none of a bundle, as for `unpack`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(len(MAGIC))
            if data == MAGIC:
                data += file.read(MAX_BYTES)
                if file.read(1):
                    raise _broken(f"it is larger than {MAX_BYTES} bytes")
        return unpack(data)
    except OSError as error:
        raise invalid("bundle", f"{path}: {error.strerror}") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("bundle:", f"bundle: {path}:", 1), param="bundle") from None


class _Version(msgspec.Struct):
    format: int


def _broken(why: str) -> InvalidRequestError:
    return invalid("bundle", why)
