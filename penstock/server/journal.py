"""Journal: a file of records that survives a kill of the process or of the machine. Knows nothing about their meaning.

    file:    MAGIC, then records one after the other
    record:  MARK | length | crc32 of length and body | body

Records are appended, and made durable in groups: while one fdatasync runs in a thread, later records gather for the
next. When the file has doubled, the records still needed (`snapshot`) are written to a new file that replaces it, so
the file never exceeds twice their size plus MIN_REWRITE_BYTES. The file is also rewritten after any disk error, because
it is then unknown what reached the disk, while memory has everything.

A record that a crash has cut off is dropped when the file is opened. Damage in the middle of the file is reported, and
reading continues at the next whole record.
"""

import asyncio
import contextlib
import errno
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.errors import EngineError, invalid
from penstock.interface.files import open_regular

MAGIC = b"PENSTOCK JOURNAL 1\n"
MARK = b"\xff\xfeJRNL\xfe\xff"  # bytes that neither UTF-8 nor a list of token ids contains
HEADER = struct.Struct(f"<{len(MARK)}sII")
MAX_RECORD_BYTES = 2**28
MIN_REWRITE_BYTES = 2**20  # a smaller file is never rewritten because of its size
GROUP_S = 0.05  # delay before records that no caller waits for are written together
RETRY_S = 1.0  # delay before the next attempt after a disk error
LOGGER = logging.getLogger("penstock.journal")


class JournalError(EngineError):
    """The journal cannot be written at the moment."""


def pack(body: bytes) -> bytes:
    """Put the header of a record before its body."""
    return HEADER.pack(MARK, len(body), _checksum(body)) + body


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(len(body).to_bytes(4, "little")))


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a journal file.

    Attributes:
        bodies: the bodies of the whole records, in order.
        end: where the last whole record ends; the rest was cut off.
        damage: (offset, size in bytes) of each damaged part that was skipped between two records.
    """

    bodies: list[bytes]
    end: int
    damage: list[tuple[int, int]]


def unpack(data: bytes) -> Content:
    """Read the records of a file that begins with MAGIC; the rest of it may be damaged in any way."""
    bodies: list[bytes] = []
    damage: list[tuple[int, int]] = []
    end = len(MAGIC)
    start = end
    while start >= 0:
        body = _record_at(data, start)
        if body is not None:
            if start > end:
                damage.append((end, start - end))
            bodies.append(body)
            start = end = start + HEADER.size + len(body)
        else:
            start = data.find(MARK, start + 1)
    return Content(bodies, end, damage)


def _record_at(data: bytes, start: int) -> bytes | None:
    if len(data) < start + HEADER.size:
        return None
    mark, length, checksum = HEADER.unpack_from(data, start)
    body = data[start + HEADER.size : start + HEADER.size + length] if length <= MAX_RECORD_BYTES else b""
    is_whole = mark == MARK and len(body) == length and _checksum(body) == checksum
    return body if is_whole else None


class Journal:
    """An open journal. Only one process at a time can open it.

    Args:
        path: of the file, which is created if it does not exist.
        snapshot: returns all records that the file still has to hold, as functions that make their bodies; these
            functions run in a thread.

    Attributes:
        error: why the file cannot be written at the moment; None while it can.

    Raises:
        InvalidRequestError: the file is in use by another server, is not a journal, or cannot be read or written.
    """

    def __init__(self, path: str, snapshot: Callable[[], Iterable[Callable[[], bytes]]]) -> None:
        self.path = os.path.realpath(path)
        self.error: str | None = None
        self._snapshot = snapshot
        self._pending: list[Callable[[], bytes]] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._work, self._urgent = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._rewrite_next = False
        self._writer: asyncio.Task[None] | None = None
        try:
            self._file = _open_locked(self.path)
            try:
                self._found = self._load()
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise invalid("journal", f"{self.path}: {error.strerror or error}") from error

    @property
    def num_bytes(self) -> int:
        return self._size

    def _load(self) -> list[bytes]:
        """Read the file and prepare it for appending."""
        with open(self._file, "rb", closefd=False) as file:
            data = file.read()
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise invalid("journal", f"{self.path} is not a journal of Penstock")
        content = unpack(data)
        if content.damage or len(data) < len(MAGIC):
            for offset, size in content.damage:
                LOGGER.error("%s: %d bytes at offset %d are damaged and were skipped", self.path, size, offset)
            self._replace(content.bodies)
        elif content.end < len(data):
            LOGGER.warning("%s: the last %d bytes were cut off by a crash", self.path, len(data) - content.end)
            os.ftruncate(self._file, content.end)
            os.fdatasync(self._file)
        self._size = self._rewritten_size = os.fstat(self._file).st_size
        return content.bodies

    def pop_found(self) -> list[bytes]:
        """Take the bodies of the records that the file held when it was opened; a second call returns none."""
        found, self._found = self._found, []
        return found

    def append(self, make_body: Callable[[], bytes]) -> None:
        """Add a record; `make_body` is called later in a thread. `synced` waits until the record is on disk."""
        self._pending.append(make_body)
        self._work.set()

    async def synced(self) -> None:
        """Wait until every appended record is on disk. Raise JournalError if the file cannot be written."""
        if self.error is not None:
            raise JournalError(self.error)
        if self._closing or self._writer is None:
            raise JournalError("the journal is closed")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._work.set()
        self._urgent.set()
        await future

    def start(self) -> None:
        """Start writing in the running event loop. Nothing is written before."""
        self._writer = asyncio.create_task(self._write(), name="journal")

    async def close(self) -> None:
        """Write the remaining records and release the file for another process."""
        self._closing = True
        self._work.set()
        self._urgent.set()
        if self._writer is not None:
            await self._writer
        self._answer(self._waiting, "the journal is closed")
        os.close(self._file)

    async def _write(self) -> None:
        while not self._closing or (self._pending and self.error is None):
            await self._work.wait()
            if self.error is not None:
                await asyncio.sleep(RETRY_S)
            elif not self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GROUP_S):
                        await self._urgent.wait()
            self._work.clear()
            self._urgent.clear()
            waiting, self._waiting = self._waiting, []
            bodies, self._pending = self._pending, []
            rewrite = self._rewrite_next or self._size > max(MIN_REWRITE_BYTES, 2 * self._rewritten_size)
            # A snapshot replaces the pending records. It has everything that is still needed of them only because
            # nothing is awaited between the two.
            bodies = list(self._snapshot()) if rewrite else bodies
            try:
                await asyncio.to_thread(self._rewrite if rewrite else self._append, bodies)
            except Exception as error:
                self._note_failure(error, waiting)
            else:
                self._note_success(waiting)

    def _note_failure(self, error: Exception, waiting: list["asyncio.Future[None]"]) -> None:
        reason = getattr(error, "strerror", None) or repr(error)
        if self.error is None:
            LOGGER.error("%s cannot be written: %s; requests that need it are refused", self.path, reason)
        self.error = f"the journal cannot be written: {reason}"
        self._rewrite_next = True
        self._work.set()
        self._answer(waiting, self.error)

    def _note_success(self, waiting: list["asyncio.Future[None]"]) -> None:
        if self.error is not None:
            LOGGER.warning("%s can be written again", self.path)
        self.error, self._rewrite_next = None, False
        self._answer(waiting, None)

    @staticmethod
    def _answer(waiting: list["asyncio.Future[None]"], error: str | None) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(JournalError(error))

    # --- in a thread, one call at a time ---------------------------------------------------------------------------

    def _append(self, makers: Iterable[Callable[[], bytes]]) -> None:
        data = b"".join(pack(make_body()) for make_body in makers)
        self._check_own()
        _write_all(self._file, data)
        os.fdatasync(self._file)
        self._size += len(data)

    def _check_own(self) -> None:
        """Raise OSError if another program has removed, replaced or changed the file; it is then written anew."""
        own = os.fstat(self._file)
        try:
            is_there = os.path.samestat(own, os.stat(self.path))
        except FileNotFoundError:
            is_there = False
        if not is_there or own.st_size != self._size:
            raise OSError(errno.ESTALE, "another program has removed, replaced or changed it")

    def _rewrite(self, makers: Iterable[Callable[[], bytes]]) -> None:
        self._replace(make_body() for make_body in makers)
        self._size = self._rewritten_size = os.fstat(self._file).st_size

    def _replace(self, bodies: Iterable[bytes]) -> None:
        """Replace the file with a new one that has these records; a crash leaves either the old or the new file."""
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samestat(os.fstat(self._file), os.stat(self.path)):
                os.close(_open_locked(self.path))  # fails if it is the journal of another server
        temporary = f"{self.path}.new"
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _lock(file, temporary)
            _write_all(file, MAGIC)
            for body in bodies:
                _write_all(file, pack(body))
            os.fsync(file)
            os.rename(temporary, self.path)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(self._file)
        self._file = file
        _sync_directory(self.path)


def _open_locked(path: str) -> int:
    """Open the file, or create it empty, and lock it for this process. Return its descriptor."""
    while True:
        file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            _lock(file, path)
            if stat.S_IMODE(os.fstat(file).st_mode) & 0o077:  # it has users' texts
                LOGGER.warning("%s could be read by other users; it cannot any more", path)
                os.fchmod(file, 0o600)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its owner has replaced the file meanwhile


def _lock(file: int, path: str) -> None:
    import fcntl  # not on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise invalid("journal", f"{path} is in use by another server; give each server a journal of its own") from None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_directory(path: str) -> None:
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
