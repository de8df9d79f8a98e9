"""Bundle: the records of a ring in one file, to keep or to send.

    "penstock-record\\n" | BLAKE2b of the rest, 16 bytes | zlib of one msgpack object

In a bundle without text, each token id is replaced by a keyed hash of the whole prefix that it ends. The random key is
not kept, so only the sharing of prefixes can be seen. Such a bundle has no checksums of logits, because with them
anyone with the same model could confirm a guess of a prompt.
"""

import hashlib
import os
import re
import time
import zlib
from dataclasses import dataclass

import msgspec

from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import DRY_BREAKERS, SamplingParams
from penstock.recorder.records import (
    FORMAT,
    Begun,
    Computed,
    EngineFailed,
    Introduced,
    Planned,
    Record,
    StepFailed,
    decode,
    pack_ids,
    unpack_ids,
)
from penstock.recorder.ring import Segment

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


def unpack(data: bytes) -> Bundle:
    """Return the bundle in the bytes of a file.

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
    """Return the bundle in a file, of which no more is read than a bundle can have.

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
        raise InvalidRequestError(f"bundle: {path}: {error.strerror}", param="bundle") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("bundle:", f"bundle: {path}:", 1), param="bundle") from None


class _Version(msgspec.Struct):
    format: int


def _broken(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"bundle: {why}", param="bundle")


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
