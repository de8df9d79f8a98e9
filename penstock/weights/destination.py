"""A directory that becomes a model all at once, or stays as it was.

Files have temporary names while they are written. When all of them are on disk, they are renamed in the order in which
they were created; config.json comes last, after the other renames are on disk. So an interrupted run never looks
complete, and a later run removes the files that a killed run has left.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.spec.config_file import CONFIG, read_config

COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
              "merges.txt", "chat_template*", "*.jinja")  # fmt: skip
UNFINISHED = ".unfinished"  # suffix of a file's name while it is written


class Destination:
    """A directory to fill in a `with` block; if the block fails, the files written are removed.

    The directory must not exist, or must be empty except for the unfinished files of a killed run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = False  # whether this object created the directory
        self._files: list[Path] = []  # the files written here, by their final names
        self._handle = -1

    def __enter__(self) -> "Destination":
        """Create and lock the directory. Raise InvalidRequestError if that fails, or the directory is not empty."""
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self._refused(f"cannot be made: {error.strerror or error}") from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Rename the files, or remove them after an error. Raise ModelLoadError if they cannot be written."""
        try:
            if error is None:
                self._rename_all()
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
        """Yield a new file to write; afterwards it is on disk under its temporary name."""
        file = self.path / name
        self._files.append(file)  # before it is created, so that it is removed after an interrupt at any moment
        try:
            stream = _unfinished(file).open("xb")
        except FileExistsError:  # another process created it
            self._files.remove(file)
            raise
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def copy(self, file: Path) -> None:
        """Copy a file into the directory. Raise ModelLoadError if it cannot be read."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ModelLoadError(f"{file}: cannot be read: {error.strerror or error}") from None
        with self.file(file.name) as stream:
            stream.write(content)

    def copy_companions(self, source: Path) -> None:
        """Copy tokenizer, chat template, defaults and, last, config.json (made from params.json if it is missing)."""
        for file in sorted({file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}):
            self.copy(file)
        if (source / CONFIG).exists():
            self.copy(source / CONFIG)
            return
        with self.file(CONFIG) as stream:
            stream.write(json.dumps(read_config(source), indent=2).encode() + b"\n")

    def require(self, num_bytes: int) -> None:
        """Raise InvalidRequestError if the disk has less than num_bytes free."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if num_bytes > free:
            raise self._refused(f"has {free / 2**20:,.1f} MiB free; the weights need {num_bytes / 2**20:,.1f} MiB")

    def _open(self) -> None:
        if self.path.is_symlink() and not self.path.exists():
            raise self._refused("is a dangling link; remove it, or give another directory")
        if not self.path.is_dir():
            self.path.mkdir(parents=True)
            self._made = True
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock()
        found = list(self.path.iterdir())
        if not all(file.name.endswith(UNFINISHED) and file.is_file() for file in found):
            raise self._refused("is not empty; give a new directory, or an empty one")
        for file in found:
            file.unlink()

    def _lock(self) -> None:
        """Lock out other processes until this one ends, if the file system supports locks."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused("is being filled by another process") from None
        except OSError:
            pass

    def _rename_all(self) -> None:
        *others, last = self._files
        for file in others:
            _unfinished(file).rename(file)
        os.fsync(self._handle)
        _unfinished(last).rename(last)
        os.fsync(self._handle)

    def _remove(self) -> None:
        """Remove only the files written here; config.json goes first, because it makes the directory a model."""
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
