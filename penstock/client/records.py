"""RecordKeeper: the client's end of the flight recorder. It owns the ring that engines write to, and makes bundles.

The memory belongs to the client, so it outlives a killed engine. Bundles are made in a thread, one after another.
"""

import itertools
import logging
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.errors import EngineOverloadedError, InvalidRequestError, check_bool, check_int, check_str
from penstock.recorder.bundle import make_bundle, pack, without_text
from penstock.recorder.ring import Ring

LOGGER = logging.getLogger("penstock")
DEFAULT_BYTES = 32 * 2**20
MIN_BYTES = 2**18
MAX_BYTES = 2**30
MAX_FILES = 16  # bundles in a directory; the oldest are deleted
ERRORS_APART_S = 60.0  # seconds between two bundles caused by failed requests
_numbers = itertools.count(1)  # numbers the bundles of this process, which may have several engines
NAME = re.compile(r"penstock-\d{8}T\d{6}-\d+-\d+\.record")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What the flight recorder keeps.

    Attributes:
        flight_recorder: bytes of memory for the last minutes; 0 turns it off.
        record_dir: where bundles are written when an engine dies or a request fails; None writes none.
        record_text: whether bundles hold the token ids of prompts and answers, without which nothing can be recomputed.
    """

    flight_recorder: int = DEFAULT_BYTES
    record_dir: str | None = None
    record_text: bool = True

    def __post_init__(self) -> None:
        check_int("flight_recorder", self.flight_recorder, 0, MAX_BYTES)
        if 0 < self.flight_recorder < MIN_BYTES:
            check_int("flight_recorder", self.flight_recorder, MIN_BYTES, MAX_BYTES)
        check_str("record_dir", self.record_dir, optional=True)
        check_bool("record_text", self.record_text)
        if self.record_dir is not None and not self.flight_recorder:
            raise InvalidRequestError(
                "record_dir: the flight recorder is off (flight_recorder = 0)", param="record_dir"
            )
        if self.record_dir is not None and not (os.path.isdir(self.record_dir) and os.access(self.record_dir, os.W_OK)):
            raise InvalidRequestError(
                f"record_dir: {self.record_dir!r} is not a directory that can be written to", param="record_dir"
            )


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
        """Return the ring's file descriptor, for engine processes to inherit; None if the recorder is off."""
        return None if self._ring is None else self._ring.descriptor

    def engine_died(self, why: str) -> None:
        """Write a bundle of what the engine did last."""
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
        """Make a bundle, write it if there is a directory, and return it. shareable: whether the caller wants its
        bytes."""
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
