"""Calls that outlive the connection that made them: their streams are kept, and read from any position, by id.

What a stream says of a choice depends on the tokens of that choice alone, piece by piece. So a position in it is one
number per choice (a *lane*): how many of its pieces the client has. It holds across a new computation of the same call,
by another engine or another server, although the lanes then interleave in another way.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from penstock.server.api_errors import ApiError
from penstock.server.records import Begun, Ended, Failure

Frame = tuple[int, bytes]  # its lane, and the server-sent event without its id
NAMED = b"event: "  # such events carry a number of their own, and one of them tells of a failure
MAX_LANES = 65  # choices of a stream that can be continued, and one lane for what belongs to none
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Frame]).decode


class Source(Protocol):
    """Computes a call, piece by piece."""

    def frames(self) -> AsyncGenerator[Frame | None, None]:
        """Yield the pieces of the stream; None where nothing came for a while."""

    def last_frames(self, failure: Failure | None) -> list[Frame]:
        """Return what ends the stream."""

    def result(self, failure: Failure | None = None, status: str | None = None) -> bytes | None:
        """Return the whole answer as JSON, as it is now; None where the API gives none. `status` replaces its own."""


class KeptCall:
    """One call: what was asked, the tokens and the stream so far, and its readers.

    Attributes:
        begun: what was asked.
        tokens: received so far, by prompt and choice; once it has ended, its frames are all that is needed.
        failure: why it failed, as its readers see it.
        result: the whole answer, where the API has one.
        ended: nothing more comes.
        is_lost: it ended for want of an engine only, and the journal keeps it as unfinished.
        source: gives its stream; None while nobody computes it.
        task: computes it.
        timer: of its removal.
        on_disk: its beginning is in the journal.
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
        self._packed = b""  # takes the place of the frames, once a journal has them
        self._num_frame_bytes = 0
        self._grown = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Return roughly how much memory it takes."""
        return self.begun.num_bytes + self._num_frame_bytes + len(self._packed) + len(self.result or b"")

    def known_tokens(self, prompt: int, choice: int) -> list[int]:
        """Return the tokens of a choice, a list that grows."""
        return self.tokens.setdefault((prompt, choice), [])

    def note(self, prompt: int, choice: int, start: int, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Take tokens of a choice, of which some may be known. Returns the new ones and where they start.

        Raises ValueError if they contradict what is known, or leave a gap.
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
        """Note that nothing more comes."""
        self.failure, self.result = failure, result
        self.ended, self.ended_at = True, time.time()
        self._wake()

    def restore(self, ended: Ended) -> None:
        """Take the end that a journal remembers."""
        self.failure, self.result = ended.failure, ended.result
        self.ended, self.ended_at = True, ended.at
        self._packed, self._frames = ended.frames, []

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _all_frames(self) -> list[Frame]:
        return _unpack(zlib.decompress(self._packed)) if self._packed else self._frames

    async def read(self, after: Sequence[int], keep_alive_s: float) -> AsyncGenerator[bytes | None, None]:
        """Yield the stream's events; None after each silent keep-alive interval.

        Args:
            after: per lane, how many pieces the client has; lanes that are not listed begin at 0.

        Raises ApiError at the end of a stream that failed.
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
        """Return what a journal has to hold of its end. For a thread: packing a long stream takes a while."""
        if not self._packed:
            self._packed = zlib.compress(_pack(self._frames), 1)
            self._frames, self._num_frame_bytes = [], 0
        return Ended(self.begun.id, self.ended_at, self._packed, self.result, self.failure)


def event_id(call_id: str, position: Sequence[int]) -> str:
    """Return the id of an event: the call, and after it how many pieces of each lane the client then has."""
    return f"{call_id}:{'.'.join(map(str, position))}"


def position_of(last_event_id: str) -> tuple[str, list[int]]:
    """Return the call's id and the position in a Last-Event-ID. Raise ApiError (400) if it is none of ours."""
    call_id, colon, counts = last_event_id.partition(":")
    parts = counts.split(".") if counts else []
    if not colon or len(parts) > MAX_LANES or not all(p.isascii() and p.isdigit() and len(p) < 10 for p in parts):
        shown = ascii(last_event_id)[:100]
        raise ApiError(400, f"Last-Event-ID: {shown} is not the id of an event of this server", code="invalid_value")
    return call_id, [int(part) for part in parts]
