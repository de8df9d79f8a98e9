"""The records of the flight recorder, and the bundle: the records of a ring in one file, to keep or to send.

A step has two records, Planned before it is computed and Computed after it, so that the last record before the engine
dies names the step in which it died. A request has a number from its introduction to the executor until its removal.
Records are typed msgpack, compact: arrays without field names, columns for objects.

    "penstock-record\\n" | BLAKE2b of the rest, 16 bytes | zlib of one msgpack object

In a bundle without text, each token id is replaced by a keyed hash of the whole prefix that it ends. The random key is
not kept, so only the sharing of prefixes can be seen. Such a bundle has no checksums of logits, because with them
anyone with the same model could confirm a guess of a prompt. The laboratory reads bundles and computes them again.
"""

import hashlib
import os
import re
import time
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engine.ring import Segment
from penstock.errors import InvalidRequestError
from penstock.interface.logits_params import DRY_BREAKERS
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup, SamplerState

FORMAT = 3  # incremented with every change to a record


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
    """Return token ids as 4 bytes each, which is two hundred times faster than a list of numbers."""
    return array("I", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids packed by pack_ids. Raise ValueError if the length is not a multiple of 4."""
    return array("I", data).tolist()


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
        joined = first.continued and previous == segment.number - 1 and bool(records)
        records += map(msgspec.Raw, segment.records[1:] if joined else segment.records)
        previous = segment.number
    if not records:
        raise InvalidRequestError("the flight recorder is empty: the engine has taken no request yet")
    return RawBundle(FORMAT, time.time(), reason, True, records)


def pack(bundle: Bundle | RawBundle) -> bytes:
    """Return a bundle as the bytes of its file."""
    data = zlib.compress(msgspec.msgpack.encode(bundle), level=1)
    return MAGIC + hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() + data


# --- without the text -------------------------------------------------------------------------------------------------


def without_text(bundle: Bundle) -> Bundle:
    """Return the bundle without anything that reveals a prompt or an answer, or that could confirm a guess of one."""
    names = _Pseudonyms(os.urandom(32))
    records = [names.of_record(record) for record in bundle.records]
    return msgspec.structs.replace(bundle, has_text=False, records=records)


@dataclass(slots=True)
class _Prefix:
    """The tokens of one request so far, as a chained hash."""

    state: bytes = b""


class _Pseudonyms:
    """Replaces each token by a keyed hash of it and all tokens before it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._prefixes: dict[int, _Prefix] = {}
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
        self._prefixes[request.number] = _Prefix()
        ids = self._hidden(request.number, unpack_ids(request.token_ids))
        params: SamplingParams = request.params.settled(**TEXT_FIELDS)
        return msgspec.structs.replace(request, token_ids=pack_ids(ids), params=params)

    def _hidden(self, number: int, ids: list[int]) -> list[int]:
        prefix = self._prefixes.setdefault(number, _Prefix())
        found = []
        for token_id in ids:
            data = prefix.state + token_id.to_bytes(8, "little")
            prefix.state = hashlib.blake2b(data, digest_size=16, key=self._key).digest()
            found.append(int.from_bytes(prefix.state[:4], "little"))
        return found


def _shortened(error: str) -> str:
    """Return only the kind of an error, because the rest of its message may contain a user's text."""
    return re.split(r"[:(]", error.strip().splitlines()[-1], maxsplit=1)[0] if error.strip() else ""
