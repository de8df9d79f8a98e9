"""Calls that outlive their connection. Their streams are kept, and can be read from any position by the call's id.

A stream has a *lane* for each choice, and each piece of a lane depends on the tokens of its choice alone. A position in
the stream is one number per lane: how many of its pieces the client has. It stays valid if another engine or another
server computes the call again, although the lanes may then interleave differently.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from penstock.server.api_errors import ApiError
from penstock.server.records import Begun, Ended, Failure

Frame = tuple[int, bytes]  # the lane, and the server-sent event without its id
NAMED = b"event: "  # such events have their own sequence numbers, and one of them reports a failure
MAX_LANES = 65  # for up to 64 choices, and one lane for events that belong to no choice
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Frame]).decode


class Source(Protocol):
    """Computes a call, piece by piece."""

    def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the pieces of the stream, and None when nothing came for a while."""

    def last_frames(self, failure: Failure | None) -> list[Frame]:
        """Return the frames that end the stream."""

    def result(self, failure: Failure | None = None, status: str | None = None) -> bytes | None:
        """Return the whole answer so far as JSON; None if the API has no whole answer. `status` replaces its status."""


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
    """

    def __init__(self, begun: Begun) -> None:
        self.begun = begun
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.failure: Failure | None = None
        self.result: bytes | None = None
        self.ended = False
        self.ended_at = 0.0
        self.is_lost = False
        self.source: Source | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.on_disk = False
        self.num_readers = 0
        self._frames: list[Frame] = []
        self._packed = b""  # replaces the frames once a journal has them
        self._num_frame_bytes = 0
        self._grown = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Return roughly how much memory the call takes."""
        return self.begun.num_bytes + self._num_frame_bytes + len(self._packed) + len(self.result or b"")

    def known_tokens(self, prompt: int, choice: int) -> list[int]:
        """Return the list of a choice's tokens, which `note` extends."""
        return self.tokens.setdefault((prompt, choice), [])

    def note(self, prompt: int, choice: int, start: int, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Add tokens of a choice, some of which may be known. Return where the new ones start, and the new ones.

        Raises ValueError if the tokens contradict the known ones or leave a gap.
        """
        known = self.known_tokens(prompt, choice)
        old = known[start : start + len(ids)]
        if start > len(known) or old != list(ids[: len(old)]):
            raise ValueError(f"tokens from {start} on differ from the {len(known)} known ones, or leave a gap")
        fresh = list(ids[len(old) :])
        start = len(known)
        known += fresh
        return start, fresh

    def add(self, frame: Frame) -> None:
        """Add a piece of the stream."""
        self._frames.append(frame)
        self._num_frame_bytes += len(frame[1])
        self._wake()

    def end(self, failure: Failure | None, result: bytes | None) -> None:
        """Record that the stream is complete."""
        self.failure, self.result = failure, result
        self.ended, self.ended_at = True, time.time()
        self._wake()

    def restore(self, ended: Ended) -> None:
        """Restore the end of the call from its journal record."""
        self.failure, self.result = ended.failure, ended.result
        self.ended, self.ended_at = True, ended.at
        self._packed, self._frames = ended.frames, []

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _all_frames(self) -> list[Frame]:
        return _unpack(zlib.decompress(self._packed)) if self._packed else self._frames

    async def read(self, after: Sequence[int], keep_alive_s: float) -> AsyncGenerator[bytes | None, None]:
        """Yield the stream's events, and None after each silent keep-alive interval.

        Args:
            after: per lane, how many pieces the client has; lanes that are not listed begin at 0.

        Raises ApiError at the end of a stream that failed, unless an event has reported the failure.
        """
        position = list(after)
        seen: list[int] = []
        frames, index = self._all_frames(), 0
        while True:
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
            if self.ended:
                if index == len(frames := self._all_frames()):
                    break
                continue
            try:
                async with asyncio.timeout(keep_alive_s):  # Python 3.11's wait_for can lose a cancellation
                    await self._grown.wait()
            except TimeoutError:
                yield None
        is_told = bool(frames) and frames[-1][1].startswith(NAMED)
        if self.failure is not None and not is_told:
            raise self.failure.as_error()

    def _with_id(self, position: Sequence[int], frame: bytes) -> bytes:
        if frame.startswith(NAMED):
            return frame
        return f"id: {event_id(self.begun.id, position)}\n".encode() + frame

    def end_record(self) -> Ended:
        """Return the journal's record of the end. Call it in a thread, because packing a long stream takes time."""
        if not self._packed:
            self._packed = zlib.compress(_pack(self._frames), 1)
            self._frames, self._num_frame_bytes = [], 0
        return Ended(self.begun.id, self.ended_at, self._packed, self.result, self.failure)


def event_id(call_id: str, position: Sequence[int]) -> str:
    """Return an event's id: the call's id, and how many pieces of each lane the client has after this event."""
    return f"{call_id}:{'.'.join(map(str, position))}"


def position_of(last_event_id: str) -> tuple[str, list[int]]:
    """Return the call's id and the position from a Last-Event-ID. Raise ApiError (400) if it is not such an id."""
    call_id, colon, counts = last_event_id.partition(":")
    parts = counts.split(".") if counts else []
    if not colon or len(parts) > MAX_LANES or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts):
        shown = ascii(last_event_id)[:100]
        raise ApiError(400, f"Last-Event-ID: {shown} is not the id of an event of this server", code="invalid_value")
    return call_id, [int(part) for part in parts]
