"""Calls that outlive their connection: the table that runs, limits and records them, and the records of the journal.

A stream has a *lane* for each choice, and each piece of a lane depends on the tokens of its choice alone. A position in
the stream is one number per lane: how many of its pieces the client has. It stays valid if another engine or another
server computes the call again, although the lanes may then interleave differently.

With a journal, a call is on disk before its client gets an answer. Its tokens are written later in groups, and nothing
waits for them: a token that the client has seen but the journal lacks is computed again, and is the same. So a kill
costs only time.
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from penstock.client.input_processor import PromptRequest
from penstock.errors import EngineDeadError
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.server.accounts import Lease, Stock
from penstock.server.api_errors import ApiError, from_exception, not_found, unavailable
from penstock.server.journal import Journal, JournalError

# --- the journal's records --------------------------------------------------------------------------------------------
# Typed msgpack. Only `Begun` is needed to answer a call. The other records save work, and any of them may be lost,
# because the same request gives the same tokens.


class Begun(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A call that has been accepted: everything that its answer depends on.

    Attributes:
        id: of the answer.
        kind: the API, a key of `ServerContext.sources`.
        owner: hash of the key that the call carried; only that key may fetch the answer.
        created: time of acceptance, in seconds since 1970.
        body: the checked body as JSON.
        fingerprint: of the engine that computes it; an engine with another one would give other tokens.
        grace_s: how long the call goes on without a reader; None: forever.
        keep_s: how long the answer may be fetched after the call has ended.
        key: name of its API key, under which it is scheduled.
        priority: its priority, where the scheduling policy uses one.
        timeout_s: how long it may take, counted from `created`.
        adapter: the id of the LoRA adapter that computes it, which names its content; None: the base model.
    """

    id: str
    kind: str
    owner: str
    created: int
    body: bytes
    model: str
    fingerprint: str
    params: SamplingParams
    prompts: list[PromptRequest]
    grace_s: float | None
    keep_s: float
    key: str = ""
    priority: int = 0
    timeout_s: float | None = None
    adapter: str | None = None

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that the call takes."""
        return 1024 + len(self.body) + 8 * sum(len(prompt.token_ids) for prompt in self.prompts)


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Tokens of a choice, beginning at its output position `start`."""

    id: str
    prompt: int
    choice: int
    start: int
    token_ids: list[int]


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The end of a call.

    Attributes:
        at: time of the end, in seconds since 1970.
        frames: the whole stream, packed.
        result: the whole answer as JSON, where the API has one.
    """

    id: str
    at: float
    frames: bytes
    result: bytes | None
    failure: ApiError | None


class Deleted(msgspec.Struct, tag=True, frozen=True):
    """The call has been deleted, and can be fetched no more."""

    id: str


Record = Begun | Tokens | Ended | Deleted
encode_record: Any = msgspec.msgpack.Encoder().encode
decode_record: Any = msgspec.msgpack.Decoder(Record).decode


# --- one call ---------------------------------------------------------------------------------------------------------


Frame = tuple[int, bytes]  # the lane, and the server-sent event without its id
NAMED = b"event: "  # such events have their own sequence numbers, and one of them reports a failure
PIECE = 64  # frames that are packed together
FRAME_BYTES = 100  # of memory that a frame takes beside its text
MAX_LANES = 65  # for up to 64 choices, and one lane for events that belong to no choice
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Frame]).decode


class Source(Protocol):
    """Computes a call, piece by piece."""

    def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the pieces of the stream, and None after each interval without one."""

    def last_frames(self, failure: ApiError | None) -> list[Frame]:
        """Make the frames that end the stream."""

    def result(self, failure: ApiError | None = None, status: str | None = None) -> bytes | None:
        """Encode the whole answer so far as JSON; None if the API has no whole answer. `status` replaces its status."""


class KeptCall:
    """One call: its request, the tokens and the stream so far, and its readers.

    Attributes:
        begun: the accepted request.
        tokens: tokens received so far, by prompt and choice; dropped when the call has ended.
        failure: why it failed, as its readers see it.
        result: the whole answer, where the API has one.
        ended: whether the stream is complete.
        is_lost: whether it ended only because the engine died; the journal then keeps it as unfinished.
        source: computes its stream; None while nothing computes it.
        task: the task that runs the source.
        timer: timer of its removal.
        on_disk: whether its beginning is in the journal.
        num_bytes: estimate of the memory that it takes, as the table has counted it.
        lease: what it holds of its key's account until it has ended; None: it came from the journal and does not run.
    """

    def __init__(self, begun: Begun, lease: Lease | None = None) -> None:
        self.begun = begun
        self.lease = lease
        self.num_bytes = 0
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.failure: ApiError | None = None
        self.result: bytes | None = None
        self.ended = False
        self.ended_at = 0.0
        self.is_lost = False
        self.source: Source | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.on_disk = False
        self.num_readers = 0
        self._packed: list[bytes] = []  # the stream so far, in pieces of PIECE frames, but for
        self._frames: list[Frame] = []  # its last frames
        self._num_frame_bytes = 0
        self._grown = asyncio.Event()

    def measured(self) -> int:
        """Estimate the bytes of memory that the call takes."""
        frames = self._num_frame_bytes + FRAME_BYTES * len(self._frames) + sum(map(len, self._packed))
        tokens = 8 * sum(map(len, self.tokens.values()))
        return self.begun.num_bytes + frames + tokens + len(self.result or b"")

    def note(self, prompt: int, choice: int, start: int, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Add tokens of a choice, some of which may be known. Return where the new ones start, and the new ones.

        Raises ValueError if the tokens contradict the known ones or leave a gap.
        """
        known = self.tokens.setdefault((prompt, choice), [])
        old = known[start : start + len(ids)]
        if start > len(known) or old != list(ids[: len(old)]):
            raise ValueError(f"tokens from {start} on differ from the {len(known)} known ones, or leave a gap")
        fresh = list(ids[len(old) :])
        start = len(known)
        known += fresh
        return start, fresh

    def add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._num_frame_bytes += len(frame[1])
        if len(self._frames) == PIECE:  # events repeat most of their text: this takes a tenth of the memory
            self._packed.append(_packed(self._frames))
            self._frames, self._num_frame_bytes = [], 0
        self._wake()

    def end(self, failure: ApiError | None, result: bytes | None) -> None:
        self.failure, self.result = failure, result
        self.ended, self.ended_at = True, time.time()
        self.source = None  # it refers to the call: without this, both would wait for the garbage collector
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        self._wake()

    def restore(self, ended: Ended) -> None:
        self.failure, self.result = ended.failure, ended.result
        self.ended, self.ended_at = True, ended.at
        self._packed, self._frames = [ended.frames], []

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def read(self, after: Sequence[int], keep_alive_s: float) -> AsyncGenerator[bytes | None, None]:
        """Yield the stream's events, and None after each silent keep-alive interval.

        Args:
            after: per lane, how many pieces the client has; lanes that are not listed begin at 0.

        Raises ApiError at the end of a stream that failed, unless an event has reported the failure.
        """
        position = list(after)
        seen: list[int] = []
        frame = b""
        piece, index = 0, 0
        while True:
            frames = _unpacked(self._packed[piece]) if piece < len(self._packed) else self._frames
            while index < len(frames):
                lane, frame = frames[index]
                index += 1
                missing = 1 + lane
                seen += [0] * (missing - len(seen))
                position += [0] * (missing - len(position))
                seen[lane] += 1
                if seen[lane] > position[lane]:
                    position[lane] = seen[lane]
                    yield self._with_id(position, frame)
            if piece < len(self._packed):  # if it was packed meanwhile, `frames` still has all of it
                piece, index = piece + 1, 0
            elif index == len(self._frames):
                if self.ended:
                    break
                try:
                    async with asyncio.timeout(keep_alive_s):  # Python 3.11's wait_for can lose a cancellation
                        await self._grown.wait()
                except TimeoutError:
                    yield None
        is_reported = frame.startswith(NAMED)
        if self.failure is not None and not is_reported:
            raise self.failure.with_traceback(None)  # each reader raises the same object

    def _with_id(self, position: Sequence[int], frame: bytes) -> bytes:
        if frame.startswith(NAMED):
            return frame
        return f"id: {event_id(self.begun.id, position)}\n".encode() + frame

    def end_record(self) -> Ended:
        """Make the journal's record of the end. Call it in a thread, because packing a long stream takes time."""
        packed = [*self._packed] if not self._frames else [*self._packed, _packed(self._frames)]
        whole = packed[0] if len(packed) == 1 else _packed([frame for piece in packed for frame in _unpacked(piece)])
        return Ended(self.begun.id, self.ended_at, whole, self.result, self.failure)


def _packed(frames: list[Frame]) -> bytes:
    return zlib.compress(_pack(frames), 1)


def _unpacked(piece: bytes) -> list[Frame]:
    return _unpack(zlib.decompress(piece))


def event_id(call_id: str, position: Sequence[int]) -> str:
    """Format an event's id: the call's id, and how many pieces of each lane the client has after this event."""
    return f"{call_id}:{'.'.join(map(str, position))}"


def position_of(last_event_id: str) -> tuple[str, list[int]]:
    """Parse the call's id and the position in a Last-Event-ID. Raise ApiError (400) if it is not such an id."""
    call_id, colon, counts = last_event_id.partition(":")
    parts = counts.split(".") if counts else []
    if not colon or len(parts) > MAX_LANES or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts):
        shown = ascii(last_event_id)[:100]
        raise ApiError(400, f"Last-Event-ID: {shown} is not the id of an event of this server", code="invalid_value")
    return call_id, [int(part) for part in parts]


# --- the table of calls -----------------------------------------------------------------------------------------------


MAX_UNFINISHED = 4096  # kept calls that wait or run; a stock, as the bytes are
FIRST_BYTES = 8192  # of a stream that a new call finds room for, so that it does not fail at once
FIRST_READER_S = 5.0  # least time that a new call waits for its first reader
LOGGER = logging.getLogger("penstock.journal")


class KeptCalls:
    """The kept calls of one server.

    Args:
        journal: path of the file that records the calls; None: they live as long as the process.
        max_bytes: of memory for all kept calls. No key may hold more than is left for the others; of its calls that
            have ended, those that ended first make room.

    Raises InvalidRequestError if the journal cannot be used.
    """

    def __init__(self, journal: str | None = None, *, max_bytes: int = 2**28) -> None:
        self._calls: dict[str, KeptCall] = {}
        self._bytes, self._unfinished = Stock(max_bytes), Stock(MAX_UNFINISHED)
        self._unwritten: dict[tuple[str, int, int], int] = {}  # first token that no record has taken yet
        self.journal = None if journal is None else Journal(journal, self._snapshot)
        for body in () if self.journal is None else self.journal.pop_found():
            self._restore(body)
        self._to_resume = self.unfinished

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def held_bytes(self) -> int:
        """The memory that the calls take, as it is counted against max_bytes."""
        return self._bytes.used

    @property
    def unfinished(self) -> list[KeptCall]:
        """The calls that are waiting or running."""
        return [call for call in self._calls.values() if not call.ended]

    def _restore(self, body: bytes) -> None:
        try:
            record = decode_record(body)
        except (msgspec.DecodeError, ValueError) as error:
            LOGGER.error("the journal has a record that this version cannot read: %s", error)
            return
        if isinstance(record, Begun):
            self._calls[record.id] = KeptCall(record)
            self._calls[record.id].on_disk = True
            self._unfinished.take(record.key, 1)
            return
        call = self._calls.get(record.id)
        if call is None:
            return
        if isinstance(record, Deleted):
            self._forget(self._calls[record.id])
        elif isinstance(record, Ended):
            self._unfinished.take(call.begun.key, -(not call.ended))
            call.restore(record)
            self._count(call)
        elif not call.ended:
            with contextlib.suppress(ValueError):  # a gap: the tokens after it are computed again
                call.note(record.prompt, record.choice, record.start, record.token_ids)

    def status(self) -> dict[str, Any] | None:
        """Describe the journal file for /status; None without a journal."""
        if self.journal is None:
            return None
        unfinished = len(self.unfinished)
        counts = {"calls": len(self), "unfinished": unfinished, "bytes": self.journal.num_bytes}
        return {"path": self.journal.path, **counts, "error": self.journal.error}

    def start(self) -> None:
        """Start writing the journal in the running event loop."""
        if self.journal is not None:
            self.journal.start()

    async def close(self) -> None:
        """Stop all calls; with a journal, the next server continues them."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in self._calls.values():
            if call.timer is not None:
                call.timer.cancel()
        if self.journal is not None:
            await self.journal.close()

    async def suspend(self) -> None:
        """Stop the calls that are in the journal and have no reader: the next server continues them."""
        calls = [call for call in self.unfinished if call.on_disk and not call.num_readers and call.task is not None]
        for call in calls:
            await self._stop(call)

    # --- the life of a call ----------------------------------------------------------------------------------------

    async def begin(self, begun: Begun, lease: Lease | None) -> KeptCall:
        """Accept a call. If it is to outlive its connection, it is on disk on return. Raises ApiError."""
        if not self._unfinished.has(begun.key, 1):
            raise _too_many()
        self._make_room(begun.key, begun.num_bytes + FIRST_BYTES)
        call = self._calls[begun.id] = KeptCall(begun, None if lease is None else lease.share())
        self._unfinished.take(begun.key, 1)
        self._count(call)
        if self.journal is not None and begun.grace_s != 0:
            call.on_disk = True
            self.journal.append(partial(encode_record, begun))
            try:
                await self._synced()
            except BaseException:  # the client may have left meanwhile
                self.remove(call)
                raise
        return call

    def _make_room(self, key: str, num_bytes: int) -> None:
        """Remove what a key has stored, oldest first, until it may hold so much more. Raise ApiError if it may not."""
        if self._bytes.has(key, num_bytes):
            return
        idle = [call for call in self._calls.values() if call.ended and not call.num_readers and call.begun.key == key]
        for call in sorted(idle, key=lambda call: call.ended_at):
            self.remove(call)
            if self._bytes.has(key, num_bytes):
                return
        raise _too_many()

    def _count(self, call: KeptCall) -> None:
        measured = call.measured()
        self._bytes.take(call.begun.key, measured - call.num_bytes)
        call.num_bytes = measured

    def _forget(self, call: KeptCall) -> None:
        if self._calls.pop(call.begun.id, None) is not None:
            self._bytes.take(call.begun.key, -call.num_bytes)
            self._unfinished.take(call.begun.key, -(not call.ended))

    def run(self, call: KeptCall, source: Source) -> None:
        call.source = source
        if call.begun.grace_s is not None and not call.num_readers:
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(max(call.begun.grace_s, FIRST_READER_S), self.remove, call)
        call.task = asyncio.create_task(self._run(call, source), name=call.begun.id)

    async def _run(self, call: KeptCall, source: Source) -> None:
        failure = None
        try:
            async with aclosing(source.frames()) as frames:
                async for frame in frames:
                    if frame is not None:
                        self._make_room(call.begun.key, max(0, call.measured() + len(frame[1]) - call.num_bytes))
                        call.add(frame)
                        self._count(call)
        except Exception as error:
            call.is_lost = isinstance(error, EngineDeadError) and call.on_disk
            failure = from_exception(error)
            if failure.code == "internal_error":
                LOGGER.exception("%s failed", call.begun.id)
        self._end(call, source, failure)

    def _end(self, call: KeptCall, source: Source | None, failure: ApiError | None) -> None:
        for frame in () if source is None else source.last_frames(failure):
            call.add(frame)
        self._finish(call, failure, None if source is None else source.result(failure))
        self._note_end(call)

    def _finish(self, call: KeptCall, failure: ApiError | None, result: bytes | None) -> None:
        if call.begun.id in self._calls:
            self._unfinished.take(call.begun.key, -(not call.ended))
        call.end(failure, result)

    def _note_end(self, call: KeptCall) -> None:
        self._schedule_removal(call)
        if call.is_lost:
            return
        call.tokens.clear()
        if call.begun.id in self._calls:
            self._count(call)
        if self.journal is None or call.begun.id not in self._calls or not call.begun.keep_s:
            return
        if not call.on_disk:
            self.journal.append(partial(encode_record, call.begun))
            call.on_disk = True
        self.journal.append(lambda: encode_record(call.end_record()))

    def pop_restored(self) -> list[KeptCall]:
        """Take the unfinished calls from the journal, once, and set the removal timers of the ended ones."""
        restored, self._to_resume = self._to_resume, []
        for call in list(self._calls.values()):
            if call.ended and call.timer is None:
                self._schedule_removal(call)
        return [call for call in restored if not call.ended]

    def fail(self, call: KeptCall, error: ApiError, source: Source | None) -> None:
        """End a call that can no longer be computed. source: None if its request cannot even be read."""
        call.source = source
        self._end(call, source, error)

    async def cancel(self, call: KeptCall) -> None:
        """Stop computing a call; its output so far is kept as the answer."""
        await self._stop(call)
        if not call.ended:
            self._finish(call, None, None if call.source is None else call.source.result(status="cancelled"))
            self._note_end(call)
            await self._synced()

    async def _stop(self, call: KeptCall) -> None:
        if call.task is not None:
            call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)

    async def delete(self, call: KeptCall) -> None:
        self.remove(call)
        await self._stop(call)
        await self._synced()

    async def _synced(self) -> None:
        """Wait until every record is on disk. Raise ApiError (503) if it cannot be written."""
        try:
            if self.journal is not None:
                await self.journal.synced()
        except JournalError as error:
            raise unavailable(str(error)) from None

    def remove(self, call: KeptCall) -> None:
        """Forget a call; if it is running, cancel it."""
        self._forget(call)
        if call.timer is not None:
            call.timer.cancel()
        if call.task is not None and not call.task.done():
            call.task.cancel()
        if self.journal is not None and call.on_disk:
            self.journal.append(partial(encode_record, Deleted(call.begun.id)))
        if not call.ended:
            call.end(not_found("The answer was deleted.", "not_found", "id"), None)

    def _schedule_removal(self, call: KeptCall) -> None:
        """Schedule the removal of a call without readers for the time after which its client cannot come back to it."""
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        grace_s = call.begun.grace_s
        if call.num_readers or call.begun.id not in self._calls or (grace_s is None and not call.ended):
            return
        wait_s = grace_s or 0.0
        if call.ended:
            wait_s = max(wait_s if call.begun.keep_s else 0.0, call.ended_at + call.begun.keep_s - time.time())
        call.timer = asyncio.get_running_loop().call_later(wait_s, self.remove, call)

    # --- its readers -----------------------------------------------------------------------------------------------

    def get(self, call_id: str, kind: str, owner: str) -> KeptCall:
        """Find a call of this owner. Raise ApiError (404) if there is no such call."""
        call = self._calls.get(call_id)
        if call is None or call.begun.kind != kind or call.begun.owner != owner:
            shown = ascii(call_id)[1:-1][:100]
            raise not_found(f"There is no answer with the id {shown}, or it is no longer kept.", "not_found", "id")
        return call

    async def read(
        self, call: KeptCall, after: Sequence[int], keep_alive_s: float
    ) -> AsyncGenerator[bytes | None, None]:
        """Yield the events of a call after a position, as KeptCall.read does. The call is not removed meanwhile."""
        call.num_readers += 1
        self._schedule_removal(call)
        try:
            async with aclosing(call.read(after, keep_alive_s)) as events:
                async for event in events:
                    yield event
        finally:
            call.num_readers -= 1
            self._schedule_removal(call)

    # --- the journal -----------------------------------------------------------------------------------------------

    def note_output(
        self, call: KeptCall, starts: dict[tuple[int, int], int], index: int, output: RequestOutput
    ) -> None:
        """Record the tokens of an output of prompt `index`. `starts` counts the earlier tokens of this computation."""
        for choice in output.outputs:
            key = (index, choice.index)
            start = starts.get(key, 0)
            starts[key] = start + len(choice.token_ids)
            try:
                start, fresh = call.note(*key, start, choice.token_ids)
            except ValueError as error:
                LOGGER.error("%s: computed again, it differs: %s", call.begun.id, error)
                continue
            place = (call.begun.id, *key)
            if fresh and self.journal is not None and call.on_disk and place not in self._unwritten:
                self._unwritten[place] = start
                self.journal.append(partial(self._tokens_record, place, call.tokens[key]))

    def _tokens_record(self, place: tuple[str, int, int], known: list[int]) -> bytes:
        """Encode the tokens of a choice that the journal lacks. Runs in a thread."""
        # First, because more tokens may arrive meanwhile. They get another record; it is harmless if both have them.
        start = self._unwritten.pop(place, len(known))
        record: bytes = encode_record(Tokens(*place, start, known[start:]))
        return record

    def _snapshot(self) -> Iterable[Callable[[], bytes]]:
        """List all the records that the journal has to hold, as functions that encode them."""
        self._unwritten.clear()
        on_disk = [call for call in self._calls.values() if call.on_disk]
        return [make_body for call in on_disk for make_body in _records(call)]


def _too_many() -> ApiError:
    message = "too many background responses and resumable streams are unfinished or stored; try again later"
    return ApiError(429, message, code="too_many_kept", headers={"Retry-After": "10"})


def _records(call: KeptCall) -> list[Callable[[], bytes]]:
    if call.ended and not call.is_lost:
        return [partial(encode_record, call.begun), lambda: encode_record(call.end_record())]
    tokens = [Tokens(call.begun.id, *key, 0, list(ids)) for key, ids in call.tokens.items()]
    return [partial(encode_record, record) for record in (call.begun, *tokens)]
