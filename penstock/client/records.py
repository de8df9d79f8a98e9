"""The records of the flight recorder, the ring that holds the newest, and the bundles that RecordKeeper makes of it.

A step has two records, Planned before it is computed and Computed after it, so that the last record before the engine
dies names the step in which it died. A request has a number from its introduction to the executor until its removal.
Records are typed msgpack, compact: arrays without field names, columns for objects.

    "penstock-record\\n" | BLAKE2b of the rest, 16 bytes | zlib of one msgpack object

In a bundle without text, each token id is replaced by a keyed hash of the whole prefix that it ends. The random key is
not kept, so only the sharing of prefixes can be seen. Such a bundle has no checksums of logits, because with them
anyone with the same model could confirm a guess of a prompt. The laboratory reads bundles and computes
them again.
"""

import hashlib
import itertools
import logging
import mmap
import os
import re
import struct
import tempfile
import time
import weakref
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import (
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    check_bool,
    check_int,
    check_str,
    invalid,
)
from penstock.interface.sampling_params import DRY_BREAKERS, SamplingParams
from penstock.interface.step import CacheGroup, SamplerState

FORMAT = 5  # incremented with every change to a record, or to a default of SamplingParams


class EngineDescription(msgspec.Struct, frozen=True):
    """Everything needed to build the engine again.

    Attributes:
        options: for EngineConfig.from_options, including those that were chosen automatically.
        groups: the cache groups.
    """

    system_fingerprint: str
    options: dict[str, Any]
    groups: list[CacheGroup]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class UsedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The adapter of a request: where its files were, their hash, and the executor's slot that held it."""

    slot: int
    path: str
    sha256: str


class Introduced(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is introduced to the executor (step.NewRequest).

    Attributes:
        token_ids: prompt and outputs so far, packed by pack_ids.
        num_computed_tokens: tokens whose keys and values are in the cache, if the request is listed at the beginning
            of a segment; else 0.
    """

    number: int
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams
    choice: int
    block_tables: list[list[int]]
    num_computed_tokens: int = 0
    sampler_state: SamplerState | None = None
    adapter: UsedAdapter | None = None


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first record of a segment.

    Attributes:
        time: seconds since 1970, like all times here.
        epoch: of the engine.
        continued: whether the previous segment holds every record up to this one. If not, records are missing, or the
            engine is new.
        requests: all requests that the executor knows at this moment.
    """

    time: float
    epoch: int
    continued: bool
    engine: EngineDescription
    requests: list[Introduced]


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine accepted a request."""

    time: float
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # more than 0 if the request is resumed


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A client aborted a request."""

    time: float
    request_id: str


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step as planned (step.SchedulerOutput).

    Attributes:
        new: the plan's new_requests.
        removed: numbers of the removed requests.
        numbers, num_computed, num_new, num_samples: of the scheduled requests, in order.
        tables: index of a scheduled request -> new_block_ids and num_released_blocks, if these change.
        drafts: index of a scheduled request -> draft_token_ids, if it has any.
        copies: the plan's block_copies, as (group, source, target).
    """

    step_id: int
    time: float
    new: list[Introduced]
    removed: list[int]
    numbers: list[int]
    num_computed: list[int]
    num_new: list[int]
    num_samples: list[int]
    tables: dict[int, tuple[list[list[int]], list[int]]]
    drafts: dict[int, list[int]] = {}
    copies: list[tuple[int, int, int]] = []


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The results of the step planned last, in the plan's order.

    Attributes:
        checksums: of the logits from which the ids were sampled; None where nothing was sampled.
        scores: index -> checksum of the log-probabilities or of the pooled vector that the request asked for.
        errors: index -> why the request failed.
    """

    step_id: int
    duration_us: int
    token_ids: list[list[int]]
    checksums: list[int | None]
    scores: dict[int, int]
    errors: dict[int, str]


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The step planned last failed as a whole."""

    step_id: int
    error: str


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An exception that ends the engine process."""

    time: float
    error: str


Record = Begun | Arrived | Aborted | Planned | Computed | StepFailed | EngineFailed

encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode  # raises msgspec.DecodeError


def pack_ids(ids: list[int]) -> bytes:
    """Pack token ids as 4 bytes each, which is two hundred times faster than a list of numbers."""
    return array("I", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Read the token ids packed by pack_ids. Raise ValueError if the length is not a multiple of 4."""
    return array("I", data).tolist()


# --- the ring --------------------------------------------------------------------------------------------------------

NUM_SEGMENTS = 4
_MAGIC = b"pnstring"
_HEADER = struct.Struct("<8sQ")  # magic, bytes per segment
_WORD = struct.Struct("<Q")
_FRAME = struct.Struct("<II")  # length and CRC-32 of a record
FRAME_BYTES = _FRAME.size
_FIRST = 64  # offset of the first segment
_HEAD = 2 * _WORD.size  # head of a segment: its number, counted from 1 (0: being emptied), and the bytes used


@dataclass(frozen=True, slots=True)
class Segment:
    """A copy of one segment: its number and its records, oldest first."""

    number: int
    records: list[bytes]


class Ring:
    """The records of the last minutes, in memory that two processes share and that outlives the writing process.

        | header | segment | segment | ... |        segment:  number, used | length, checksum, record | ...

    One process writes; it inherits `descriptor`. It appends to one segment; when that is full, it empties the oldest
    segment and continues there. `used` is set after a record is in place, so a writer that is killed leaves only whole
    records. A reader copies a segment, and discards the copy if the segment was emptied meanwhile.

    Raises:
        EngineError: the descriptor does not belong to a ring.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0)
        magic, num_bytes = _HEADER.unpack_from(self._memory)
        self.segment_bytes = int(num_bytes)
        if magic != _MAGIC or _FIRST + NUM_SEGMENTS * self.segment_bytes != len(self._memory):
            raise EngineError(f"file descriptor {descriptor} is not a flight recorder's ring")
        self._number = 0  # number of the segment being written; 0 until this process writes for the first time
        self._used = 0

    @classmethod
    def create(cls, num_bytes: int) -> "Ring":
        """Make an empty ring. Its pages take memory only when they are written."""
        segment_bytes = num_bytes // NUM_SEGMENTS // _WORD.size * _WORD.size
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, _FIRST + NUM_SEGMENTS * segment_bytes)
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, segment_bytes), 0)
        made = cls(descriptor)
        weakref.finalize(made, os.close, descriptor)
        return made

    # --- writing ---------------------------------------------------------------------------------------------------

    def start_segment(self) -> None:
        """Empty the oldest segment, to which `append` then writes."""
        self._number = 1 + (self._number or max(self._word(index, 0) for index in range(NUM_SEGMENTS)))
        index = self._number % NUM_SEGMENTS
        # In this order, because another process may be reading: a reader of the old segment finds that the number has
        # changed, and no reader finds the new number with the old length.
        self._set_word(index, 0, 0)
        self._set_word(index, 1, 0)
        self._set_word(index, 0, self._number)
        self._used = 0

    @property
    def longest_record(self) -> int:
        """The length in bytes of the longest record that fits into an empty segment."""
        return self.segment_bytes - _HEAD - FRAME_BYTES

    @property
    def room(self) -> int:
        """The length of the longest record that `append` can take now; negative before the first segment."""
        return self.longest_record - self._used if self._number else -1

    def append(self, record: bytes) -> bool:
        """Add a record to the segment and return True; if there is no room, write nothing and return False."""
        if len(record) > self.room:
            return False
        index = self._number % NUM_SEGMENTS
        start = self._start(index) + _HEAD + self._used
        _FRAME.pack_into(self._memory, start, len(record), zlib.crc32(record))
        start += FRAME_BYTES
        self._memory[start : start + len(record)] = record
        self._used += FRAME_BYTES + len(record)
        assert _HEAD + self._used <= self.segment_bytes, "a record runs into the next segment"
        # Last, because a reader trusts everything below it: if this process is killed before, the record never was.
        self._set_word(index, 1, self._used)
        return True

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self) -> list[Segment]:
        """Copy the segments of the ring, oldest first. Another process may write meanwhile."""
        found = (self._read_segment(index) for index in range(NUM_SEGMENTS))
        return sorted((item for item in found if item is not None), key=lambda item: item.number)

    def _read_segment(self, index: int) -> Segment | None:
        number, used = self._word(index, 0), min(self._word(index, 1), self.segment_bytes - _HEAD)
        start = self._start(index) + _HEAD
        data = self._memory[start : start + used]
        if number == 0 or self._word(index, 0) != number:
            return None
        return Segment(number, _split(data))

    def _start(self, index: int) -> int:
        return _FIRST + index * self.segment_bytes

    def _word(self, index: int, word: int) -> int:
        return int(_WORD.unpack_from(self._memory, self._start(index) + word * _WORD.size)[0])

    def _set_word(self, index: int, word: int, value: int) -> None:
        _WORD.pack_into(self._memory, self._start(index) + word * _WORD.size, value)


def _split(data: bytes) -> list[bytes]:
    """Split the data of a segment into its records, up to the first one that is not intact."""
    records, start = [], 0
    while start + FRAME_BYTES <= len(data):
        length, checksum = _FRAME.unpack_from(data, start)
        start += FRAME_BYTES
        record = data[start : start + length]
        if len(record) < length or zlib.crc32(record) != checksum:
            break
        records.append(record)
        start += length
    return records


def _anonymous_file() -> int:
    """Open a file without a name, in memory if the system supports it, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-flight-recorder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# --- bundles ---------------------------------------------------------------------------------------------------------

MAGIC = b"penstock-record\n"
DIGEST_BYTES = 16
MAX_BYTES = 2**31  # largest uncompressed content of a bundle
TEXT_FIELDS = {"stop": (), "stop_token_ids": (), "bad_words": (), "bad_words_token_ids": (), "logit_bias": None,
               "logits_processors": None, "suppress_tokens": (), "begin_suppress_tokens": (), "bad_words_ids": (),
               "sequence_bias": (), "forced_bos_token_id": None, "forced_eos_token_id": (),
               "dry_sequence_breakers": DRY_BREAKERS, "dry_sequence_breaker_ids": (),
               "structured_outputs": None}  # fmt: skip


class Bundle(msgspec.Struct, frozen=True):
    """The content of a bundle.

    Attributes:
        reason: why it was made.
        has_text: whether it has the engine's token ids and checksums.
        records: oldest first; the first one is a Begun.
    """

    format: int
    created: float
    reason: str
    has_text: bool
    records: list[Record]


class RawBundle(msgspec.Struct, frozen=True):
    """A Bundle whose records are not decoded, so that it is made in milliseconds while streams continue."""

    format: int
    created: float
    reason: str
    has_text: bool
    records: list[msgspec.Raw]

    def decoded(self) -> Bundle:
        records = [decode(bytes(record)) for record in self.records]
        return Bundle(self.format, self.created, self.reason, self.has_text, records)


def make_bundle(segments: list[Segment], reason: str) -> RawBundle:
    """Make a bundle of a ring's segments. A segment that continues the one before it is added without its Begun record.

    Raises:
        InvalidRequestError: there is nothing to keep, because the engine has not taken a request yet.
    """
    records: list[msgspec.Raw] = []
    previous = 0
    for segment in segments:
        first = decode(segment.records[0]) if segment.records else None
        if not isinstance(first, Begun):
            continue
        # The segment before may be missing, because the recorder emptied it while it was copied.
        joined = first.continued and previous == segment.number - 1 and bool(records)
        records += map(msgspec.Raw, segment.records[1:] if joined else segment.records)
        previous = segment.number
    if not records:
        raise InvalidRequestError("the flight recorder is empty: the engine has taken no request yet")
    return RawBundle(FORMAT, time.time(), reason, True, records)


def pack(bundle: Bundle | RawBundle) -> bytes:
    data = zlib.compress(msgspec.msgpack.encode(bundle), level=1)
    return MAGIC + hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() + data


# --- without the text -------------------------------------------------------------------------------------------------


def without_text(bundle: Bundle) -> Bundle:
    """Copy a bundle without anything that reveals a prompt or an answer, or that could confirm a guess of one."""
    names = _Pseudonyms(os.urandom(32))
    records = [names.of_record(record) for record in bundle.records]
    return msgspec.structs.replace(bundle, has_text=False, records=records)


class _Pseudonyms:
    """Replaces each token by a keyed hash of it and all tokens before it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._prefixes: dict[int, bytes] = {}  # chained hash of the tokens so far, by request
        self._scheduled: list[int] = []  # numbers of the requests in the step planned last

    def of_record(self, record: Record) -> Record:
        replace = msgspec.structs.replace
        match record:
            case Begun():
                self._prefixes.clear()
                return replace(record, requests=[self._of_request(item) for item in record.requests])
            case Planned():
                for number in record.removed:
                    self._prefixes.pop(number, None)
                self._scheduled = record.numbers
                drafts = {index: [0] * len(ids) for index, ids in record.drafts.items()}
                return replace(record, new=[self._of_request(item) for item in record.new], drafts=drafts)
            case Computed():
                rows = zip(self._scheduled, record.token_ids, strict=False)
                ids = [self._hidden(number, ids) for number, ids in rows]
                errors = {index: _shortened(error) for index, error in record.errors.items()}
                return replace(record, token_ids=ids, checksums=[None] * len(ids), scores={}, errors=errors)
            case StepFailed() | EngineFailed():
                return replace(record, error=_shortened(record.error))
        return record

    def _of_request(self, request: Introduced) -> Introduced:
        self._prefixes[request.number] = b""
        ids = self._hidden(request.number, unpack_ids(request.token_ids))
        params: SamplingParams = request.params.settled(**TEXT_FIELDS)
        return msgspec.structs.replace(request, token_ids=pack_ids(ids), params=params)

    def _hidden(self, number: int, ids: list[int]) -> list[int]:
        prefix, found = self._prefixes.get(number, b""), []
        for token_id in ids:
            data = prefix + token_id.to_bytes(8, "little")
            prefix = hashlib.blake2b(data, digest_size=16, key=self._key).digest()
            found.append(int.from_bytes(prefix[:4], "little"))
        self._prefixes[number] = prefix
        return found


def _shortened(error: str) -> str:
    """Reduce an error to its kind, because the rest of its message may contain a user's text."""
    return re.split(r"[:(]", error.strip().splitlines()[-1], maxsplit=1)[0] if error.strip() else ""


# --- the client's end -----------------------------------------------------------------------------------------------


LOGGER = logging.getLogger("penstock")
DEFAULT_BYTES = 32 * 2**20
MIN_BYTES = 2**18
MAX_RING_BYTES = 2**30
MAX_FILES = 16  # bundles in a directory; the oldest are deleted
ERRORS_APART_S = 60.0  # seconds between two bundles caused by failed requests
_numbers = itertools.count(1)  # numbers the bundles of this process, which may have several engines
NAME = re.compile(r"penstock-\d{8}T\d{6}-\d+-\d+\.record")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Options of the flight recorder.

    Attributes:
        flight_recorder: bytes of memory for the last minutes; 0 turns it off.
        record_dir: where bundles are written when an engine dies or a request fails; None writes none.
        record_text: whether bundles hold the token ids of prompts and answers, without which nothing can be recomputed.
    """

    flight_recorder: int = DEFAULT_BYTES
    record_dir: str | None = None
    record_text: bool = True

    def __post_init__(self) -> None:
        check_int("flight_recorder", self.flight_recorder, 0, MAX_RING_BYTES)
        if 0 < self.flight_recorder < MIN_BYTES:
            check_int("flight_recorder", self.flight_recorder, MIN_BYTES, MAX_RING_BYTES)
        check_str("record_dir", self.record_dir, optional=True)
        check_bool("record_text", self.record_text)
        if self.record_dir is not None and not self.flight_recorder:
            raise invalid("record_dir", "the flight recorder is off (flight_recorder = 0)")
        if self.record_dir is not None and not (os.path.isdir(self.record_dir) and os.access(self.record_dir, os.W_OK)):
            raise invalid("record_dir", f"{self.record_dir!r} is not a directory that can be written to")


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """A bundle without its text, and the file of the whole bundle, if there is a directory for bundles."""

    data: bytes
    file: str | None


class RecordKeeper:
    """Makes bundles of one ring."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._ring = Ring.create(options.flight_recorder) if options.flight_recorder else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flight recorder")
        self._last_error = -ERRORS_APART_S
        self._asked: Future[SavedRecord] | None = None  # the last bundle that was asked for

    @property
    def descriptor(self) -> int | None:
        """The ring's file descriptor, for engine processes to inherit; None if the recorder is off."""
        return None if self._ring is None else self._ring.descriptor

    def engine_died(self, why: str) -> None:
        """Write a bundle of the engine's last minutes."""
        if self._ring is not None and self._options.record_dir is not None:
            self._submit(self._ring, f"the engine process died ({why})")

    def request_failed(self, request_id: str) -> None:
        """Write a bundle, unless a failed request has caused one in the last minute."""
        now = time.monotonic()
        if self._ring is None or self._options.record_dir is None or now - self._last_error < ERRORS_APART_S:
            return
        self._last_error = now
        self._submit(self._ring, f"request {request_id} failed")  # the error is in the record, if that has text

    def save(self) -> "Future[SavedRecord]":
        """Make a bundle now.

        Raises:
            InvalidRequestError: the recorder is off or, from the future, the recorder is empty.
            EngineOverloadedError: another bundle is being made.
        """
        if self._ring is None:
            raise InvalidRequestError("the flight recorder is off (--flight-recorder 0)", code="recorder_off")
        if self._asked is not None and not self._asked.done():
            raise EngineOverloadedError("a record is being made already")
        self._asked = self._thread.submit(self._make, self._ring, "asked for")
        return self._asked

    def close(self) -> None:
        """Wait until the bundles in progress are written."""
        self._thread.shutdown()

    def _submit(self, ring: Ring, reason: str) -> None:
        with suppress(RuntimeError):  # the client is being shut down
            self._thread.submit(self._write_logged, ring, reason)

    def _write_logged(self, ring: Ring, reason: str) -> None:
        try:
            file = self._make(ring, reason, shareable=False).file
        except Exception as error:  # a full disk, or an engine that died before its first request
            LOGGER.warning("no record was written: %s", error)
        else:
            LOGGER.warning("%s; its last minutes are in %s (penstock replay)", reason, file)

    def _make(self, ring: Ring, reason: str, *, shareable: bool = True) -> SavedRecord:
        """Make a bundle, and write it if there is a directory. shareable: whether the caller wants its bytes."""
        bundle = make_bundle(ring.read(), reason)
        directory, with_text, file = self._options.record_dir, self._options.record_text, None
        hidden = pack(without_text(bundle.decoded())) if shareable or not with_text else b""
        if directory is not None:
            file = self._write(Path(directory), pack(bundle) if with_text else hidden)
        return SavedRecord(hidden, file)

    def _write(self, directory: Path, data: bytes) -> str:
        """Write a bundle that only this user can read, whole or not at all, and delete the oldest beyond MAX_FILES."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        file = directory / f"penstock-{stamp}-{os.getpid()}-{next(_numbers)}.record"
        partial = file.with_suffix(".partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        ours = sorted((item for item in directory.iterdir() if NAME.fullmatch(item.name)), key=_age)
        for old in ours[:-MAX_FILES]:
            old.unlink(missing_ok=True)
        return str(file)


def _age(file: Path) -> tuple[str, int, int]:
    """Sort bundles by time, then by process and number."""
    _, stamp, process, number = file.stem.split("-")
    return stamp, int(process), int(number)
