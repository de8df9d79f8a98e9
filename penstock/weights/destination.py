"""A directory that becomes a model all at once, or stays what it was.

Files have unfinished names while they are written. When all of them are on the disk they get their own, in the order
they were made, the last when the others are there for good. So whatever interrupts the work, nobody takes the rest for
the whole, and a later run clears away what a killed one has left.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from penstock.errors import InvalidRequestError, ModelLoadError

UNFINISHED = ".unfinished"  # the end of a file's name while it is written


class Destination:
    """A new or empty directory to be filled within `with`; what was written goes away again if that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = False  # whether the directory is ours
        self._files: list[Path] = []  # that we wrote, by the names they shall have
        self._handle = -1

    def __enter__(self) -> "Destination":
        """Take the directory.

        Raises:
            InvalidRequestError: it cannot be made, is not empty, or somebody else is filling it.
        """
        try:
            self._take()
        except OSError as error:
            self._close()
            raise self._refused(f"cannot be made: {error.strerror or error}") from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Name the files, or remove them.

        Raises:
            ModelLoadError: the disk does not take them.
        """
        try:
            if error is None:
                self._name_all()
        except BaseException as failure:
            error = failure
        if error is not None:
            self._remove()
        self._close()
        if isinstance(error, OSError):
            raise ModelLoadError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        if error is not None and kind is None:
            raise error

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file to write; on the disk when this is over."""
        file = self.path / name
        with _unfinished(file).open("xb") as stream:
            self._files.append(file)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def require(self, num_bytes: int) -> None:
        """Refuse early what will not find room.

        Raises:
            InvalidRequestError: the disk has less than that.
        """
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if num_bytes > free:
            raise self._refused(f"has {free / 2**20:,.1f} MiB free; the weights need {num_bytes / 2**20:,.1f} MiB")

    def _take(self) -> None:
        if self.path.is_symlink() and not self.path.exists():
            raise self._refused("is a link that leads nowhere")
        if not self.path.is_dir():
            self.path.mkdir(parents=True)
            self._made = True
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock()
        found = list(self.path.iterdir())
        if not all(file.name.endswith(UNFINISHED) and file.is_file() for file in found):
            raise self._refused("is not empty")
        for file in found:
            file.unlink()

    def _lock(self) -> None:
        """Keep others out while this process lives, where the file system can."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused("is being filled by another process") from None
        except OSError:
            pass

    def _name_all(self) -> None:
        *others, last = self._files
        for file in others:
            _unfinished(file).rename(file)
        os.fsync(self._handle)
        _unfinished(last).rename(last)
        os.fsync(self._handle)

    def _remove(self) -> None:
        """What was written here, and nothing else; the last file first, for it makes the others a model."""
        for file in reversed(self._files):
            for name in (file, _unfinished(file)):
                with suppress(OSError):
                    name.unlink()
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _refused(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"dst: {str(self.path)!r} {reason}", param="dst")


def _unfinished(file: Path) -> Path:
    return file.with_name(file.name + UNFINISHED)
