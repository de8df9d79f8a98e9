"""Import a user's own Python files, which register models and logits processors.

A file is imported once per process, under a module name made from its path, so two files may have the same name.
"""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import InvalidRequestError

OPTION = "imports"


def import_files(files: Iterable[str]) -> None:
    """Import the files, in order.

    Raises:
        InvalidRequestError: a file is not a Python file, or raises an error; the message names file and line.
    """
    for file in files:
        _import(_path(file).resolve())


def files_fingerprint(files: Iterable[str]) -> str:
    """Return a hash of the files' contents. Raise InvalidRequestError if a file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            digest.update(hashlib.blake2b(_path(file).read_bytes()).digest())
        except OSError as error:
            message = f"{OPTION}: {file!r} cannot be read: {error.strerror}"
            raise InvalidRequestError(message, param=OPTION) from error
    return digest.hexdigest()


def _path(file: str) -> Path:
    return Path(os.path.expanduser(file))  # Path.expanduser raises for an unknown user


def _import(file: Path) -> None:
    name = f"penstock_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}_{file.stem}"
    if name in sys.modules:
        return
    if file.suffix != ".py" or not file.is_file():
        raise InvalidRequestError(f"{OPTION}: {str(file)!r} is not allowed; it must be a Python file", param=OPTION)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidRequestError(f"{OPTION}: {str(file)!r} cannot be imported", param=OPTION)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit() in a file must not end the engine silently
        del sys.modules[name]
        raise InvalidRequestError(f"{OPTION}: {_line_of(file, error)}: {_message(error)}", param=OPTION) from error


def _line_of(file: Path, error: BaseException) -> str:
    """Return the last line of the file in the error's traceback, as FILE:LINE."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, InvalidRequestError) else f"{type(error).__name__}: {text}"
