"""KeptCalls: the table of calls that outlive their connection. Runs them, limits them, and records them in a journal.

With a journal, a call is on disk before its client gets an answer. Its tokens are written later in groups, and nothing
waits for them: a token that the client has seen but the journal lacks is computed again, and is the same. So a kill
costs only time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from penstock.errors import EngineDeadError
from penstock.interface.outputs import RequestOutput
from penstock.server.api_errors import ApiError, from_exception, not_found, unavailable
from penstock.server.journal import Journal, JournalError
from penstock.server.kept_calls import KeptCall, Source
from penstock.server.records import Begun, Deleted, Ended, Failure, Tokens, decode, encode, failure_of

MAX_UNFINISHED = 4096  # kept calls that wait or run
FIRST_READER_S = 5.0  # least time that a new call waits for its first reader
LOGGER = logging.getLogger("penstock.journal")


class KeptCalls:
    """The kept calls of one server.

    Args:
        journal: path of the file that records the calls; None: they live as long as the process.
        max_bytes: of memory for all kept calls. Those that ended first make room for new ones.

    Raises InvalidRequestError if the journal cannot be used.
    """

    def __init__(self, journal: str | None = None, *, max_bytes: int = 2**28) -> None:
        self._calls: dict[str, KeptCall] = {}
        self._max_bytes = max_bytes
        self._unwritten: dict[tuple[str, int, int], int] = {}  # first token that no record has taken yet
        self.journal = None if journal is None else Journal(journal, self._snapshot)
        for body in () if self.journal is None else self.journal.take_found():
            self._restore(body)
        self._to_resume = self.unfinished

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def unfinished(self) -> list[KeptCall]:
        """Return the calls that are waiting or running."""
        return [call for call in self._calls.values() if not call.ended]

    def _restore(self, body: bytes) -> None:
        try:
            record = decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            LOGGER.error("the journal has a record that this version cannot read: %s", error)
            return
        if isinstance(record, Begun):
            self._calls[record.id] = KeptCall(record)
            self._calls[record.id].on_disk = True
            return
        call = self._calls.get(record.id)
        if call is None:
            return
        if isinstance(record, Deleted):
            del self._calls[record.id]
        elif isinstance(record, Ended):
            call.restore(record)
        elif not call.ended:
            with contextlib.suppress(ValueError):  # a gap: the tokens after it are computed again
                call.note(record.prompt, record.choice, record.start, record.token_ids)

    def status(self) -> dict[str, Any] | None:
        """Return what /status reports about the journal file; None without a journal."""
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

    async def begin(self, begun: Begun) -> KeptCall:
        """Accept a call. If it is to outlive its connection, it is on disk on return. Raises ApiError."""
        self._make_room(begun.num_bytes)
        call = self._calls[begun.id] = KeptCall(begun)
        if self.journal is not None and begun.grace_s != 0:
            call.on_disk = True
            self.journal.append(partial(encode, begun))
            try:
                await self._synced()
            except BaseException:  # the client may have left meanwhile
                self.remove(call)
                raise
        return call

    def _make_room(self, num_bytes: int) -> None:
        calls = self._calls.values()
        too_much = sum(call.num_bytes for call in calls) + num_bytes - self._max_bytes
        idle = [call for call in calls if call.ended and not call.num_readers] if too_much > 0 else []
        for call in sorted(idle, key=lambda call: call.ended_at):
            if too_much <= 0:
                break
            too_much -= call.num_bytes
            self.remove(call)
        if too_much > 0 or len(self.unfinished) >= MAX_UNFINISHED:
            message = "too many background responses and resumable streams are unfinished; try again later"
            raise ApiError(429, message, code="too_many_kept", headers={"Retry-After": "10"})

    def run(self, call: KeptCall, source: Source) -> None:
        """Start computing a call in a separate task."""
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
                        call.add(frame)
        except Exception as error:
            call.is_lost = isinstance(error, EngineDeadError) and call.on_disk
            failure = failure_of(from_exception(error))
            if failure.code == "internal_error":
                LOGGER.exception("%s failed", call.begun.id)
        self._end(call, source, failure)

    def _end(self, call: KeptCall, source: Source | None, failure: Failure | None) -> None:
        for frame in () if source is None else source.last_frames(failure):
            call.add(frame)
        call.end(failure, None if source is None else source.result(failure))
        self._note_end(call)

    def _note_end(self, call: KeptCall) -> None:
        self._schedule_removal(call)
        if call.is_lost:
            return
        call.tokens.clear()
        if self.journal is None or call.begun.id not in self._calls or not call.begun.keep_s:
            return
        if not call.on_disk:
            self.journal.append(partial(encode, call.begun))
            call.on_disk = True
        self.journal.append(lambda: encode(call.end_record()))

    def take_restored(self) -> list[KeptCall]:
        """Return, once, the unfinished calls from the journal. The ended ones get their removal timers now."""
        restored, self._to_resume = self._to_resume, []
        for call in list(self._calls.values()):
            if call.ended and call.timer is None:
                self._schedule_removal(call)
        return [call for call in restored if not call.ended]

    def fail(self, call: KeptCall, error: ApiError, source: Source | None) -> None:
        """End a call that can no longer be computed. source: None if its request cannot even be read."""
        call.source = source
        self._end(call, source, failure_of(error))

    async def cancel(self, call: KeptCall) -> None:
        """Stop computing a call; its output so far is kept as the answer."""
        await self._stop(call)
        if not call.ended:
            call.end(None, None if call.source is None else call.source.result(status="cancelled"))
            self._note_end(call)
            await self._synced()

    async def _stop(self, call: KeptCall) -> None:
        if call.task is not None:
            call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)

    async def delete(self, call: KeptCall) -> None:
        """Stop and forget a call."""
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
        self._calls.pop(call.begun.id, None)
        if call.timer is not None:
            call.timer.cancel()
        if call.task is not None and not call.task.done():
            call.task.cancel()
        if self.journal is not None and call.on_disk:
            self.journal.append(partial(encode, Deleted(call.begun.id)))
        if not call.ended:
            call.end(failure_of(not_found("The answer was deleted.", "not_found", "id")), None)

    def _schedule_removal(self, call: KeptCall) -> None:
        """Schedule the removal of a call without readers for the time when no client may come back to it."""
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
        """Return a call of this owner. Raise ApiError (404) if there is no such call."""
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
                self.journal.append(partial(self._take_tokens, place, call.known_tokens(*key)))

    def _take_tokens(self, place: tuple[str, int, int], known: list[int]) -> bytes:
        """Return a record of the tokens of a choice that the journal lacks. Runs in a thread."""
        start = self._unwritten.pop(place, len(known))
        record: bytes = encode(Tokens(*place, start, known[start:]))
        return record

    def _snapshot(self) -> Iterable[Callable[[], bytes]]:
        """Return all the records that the journal has to hold, as functions that encode them."""
        self._unwritten.clear()
        on_disk = [call for call in self._calls.values() if call.on_disk]
        return [make_body for call in on_disk for make_body in _records(call)]


def _records(call: KeptCall) -> list[Callable[[], bytes]]:
    if call.ended and not call.is_lost:
        return [partial(encode, call.begun), lambda: encode(call.end_record())]
    tokens = [Tokens(call.begun.id, *key, 0, list(ids)) for key, ids in call.tokens.items()]
    return [partial(encode, record) for record in (call.begun, *tokens)]
