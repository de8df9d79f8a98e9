"""Ring: the records of the last minutes, in memory that two processes share and that outlives the writing process.

    | header | segment | segment | ... |        segment:  number, used | length, checksum, record | ...

One process writes. It appends to one segment; when that is full, it empties the oldest segment and continues there.
`used` is set after a record is in place, so a writer that is killed leaves only whole records. A reader copies a
segment, and discards the copy if the segment was emptied meanwhile.
"""

import mmap
import os
import struct
import tempfile
import weakref
import zlib
from dataclasses import dataclass

from penstock.errors import EngineError

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
    """The shared memory. The writing process inherits `descriptor`.

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
        self._set_word(index, 0, 0)
        self._set_word(index, 1, 0)
        self._set_word(index, 0, self._number)
        self._used = 0

    @property
    def longest_record(self) -> int:
        """Return the length of the longest record that fits into an empty segment."""
        return self.segment_bytes - _HEAD - FRAME_BYTES

    @property
    def room(self) -> int:
        """Return the length of the longest record that `append` can take now; negative before the first segment."""
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
        """Return the segments of the ring, oldest first. Another process may write meanwhile."""
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
    """Return the records before the first one that is not intact."""
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
    """Return the descriptor of a file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-flight-recorder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
