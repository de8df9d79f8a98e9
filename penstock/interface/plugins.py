"""Users' own code: Python files that are imported, what they register, and a limit on the time that it takes.

    @penstock.register_logits_processor("only_even")
    def only_even(logits, args):                      # logits [1, V] float32, one row
        logits[:, 1::2] = float("-inf")
        return logits

    SamplingParams(logits_processors=("only_even",))              # or {"only_even": args}, in this order

A function with a third parameter also gets the token ids so far, prompt and answer. It runs on one row at a time,
before masks, bias, penalties and temperature; log-probabilities are those of the unchanged logits. It must keep no
state between calls, because then the answer to one request could depend on other requests. It gets copies, and a
failure (an exception, a wrong result, more than 2 seconds for a token) ends only the request of that row.

The engine of AsyncLLM and `penstock serve` is another process, which gets the files through the engine option
`imports`. A file is imported once per process, under a module name made from its path, so two files may have the same
name. Files may register models, too.
"""

import hashlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from penstock.errors import EXTRAS, InvalidRequestError, check_installed, check_str, invalid, missing

OPTION = "imports"  # the engine option that names the files
LogitsProcessor = TypeVar("LogitsProcessor", bound=Callable[..., Any])
MAX_NAME_LENGTH = 64
WITHOUT_IDS, WITH_IDS = 2, 3  # number of parameters

PROCESSORS: dict[str, Callable[..., Any]] = {}


def register_logits_processor(name: str) -> Callable[[LogitsProcessor], LogitsProcessor]:
    """Make a decorator that registers a function as the logits processor with this name.

    Raises:
        InvalidRequestError: another function has the name, or the parameters are neither (logits, args) nor (logits,
            args, token_ids).
    """
    check_str("name", name, max_length=MAX_NAME_LENGTH)

    def decorate(function: LogitsProcessor) -> LogitsProcessor:
        known = PROCESSORS.get(name)
        if known is not None and _origin(known) != _origin(function):
            raise invalid("name", f"another logits processor {name!r} is registered already")
        if _num_parameters(function) not in (WITHOUT_IDS, WITH_IDS):
            raise invalid(
                "name", f"the logits processor {name!r} must take (logits, args) or (logits, args, token_ids)"
            )
        check_installed("name", f"the logits processor {name!r}", "torch")  # it gets tensors
        PROCESSORS[name] = function
        return function

    return decorate


def takes_ids(function: Callable[..., Any]) -> bool:
    return _num_parameters(function) == WITH_IDS


def check_registered(names: Iterable[str]) -> None:
    """Check that every name is registered.

    Raises:
        InvalidRequestError: a name is not; the message lists the registered ones.
    """
    unknown = next((name for name in names if name not in PROCESSORS), None)
    if unknown is not None:
        known = ", ".join(sorted(PROCESSORS)) or "none; the engine option `imports` names files that register some"
        raise invalid("logits_processors", f"{unknown!r} is not registered; there are {known}")


def _num_parameters(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in kinds for item in inspect.signature(function).parameters.values())


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Find file and name of a function: the same if a file runs twice, as a program and as an import."""
    code = getattr(function, "__code__", None)
    file = str(Path(code.co_filename).resolve()) if code is not None else ""
    return file, getattr(function, "__qualname__", repr(function))


# --- files -----------------------------------------------------------------------------------------------------------


def import_files(files: Iterable[str]) -> None:
    """Import the files, in order.

    Raises:
        InvalidRequestError: a file is not a Python file, or raises an error; the message names file and line.
    """
    for file in files:
        _import(_path(file).resolve())


def files_fingerprint(files: Iterable[str]) -> str:
    """Hash the contents of the files. Raise InvalidRequestError if a file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            digest.update(hashlib.blake2b(_path(file).read_bytes()).digest())
        except OSError as error:
            raise invalid(OPTION, f"{file!r} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _path(file: str) -> Path:
    return Path(os.path.expanduser(file))  # Path.expanduser raises for an unknown user


def _import(file: Path) -> None:
    name = f"penstock_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}_{file.stem}"
    if name in sys.modules:
        return
    if file.suffix != ".py" or not file.is_file():
        raise invalid(OPTION, f"{str(file)!r} is not allowed; it must be a Python file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise invalid(OPTION, f"{str(file)!r} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit() in a file must not end the engine silently
        del sys.modules[name]
        raise invalid(OPTION, f"{_line_of(file, error)}: {_message(error)}") from error


def _line_of(file: Path, error: BaseException) -> str:
    """Find the last line of the file in the error's traceback, as FILE:LINE."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{file}:{lines[-1]}" if lines else str(file)


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return missing("it", error.name)
    text = " ".join(str(error).split())
    return text if isinstance(error, InvalidRequestError) else f"{type(error).__name__}: {text}"


# --- the time limit --------------------------------------------------------------------------------------------------
# Slow code of a user's would hold up the streams of all users. In Penstock's own processes (`install_time_limit`), an
# alarm signal interrupts it where it is Python. Code that never returns to Python, for instance in a library, cannot be
# interrupted: the client then kills the silent engine, and tries its requests one at a time. In a user's own process
# nothing is interrupted; only the time is measured.

_armed = False  # whether a call is under way that the alarm may interrupt


class TimeLimitError(BaseException):
    """A call took too long. It is not an Exception, so that the called code does not catch it by mistake."""


def install_time_limit() -> None:
    """Let `call_limited` interrupt what it calls in the main thread of this process. It uses SIGALRM."""
    signal.signal(signal.SIGALRM, _expire)


def _expire(number: int, frame: FrameType | None) -> None:
    global _armed
    if _armed:  # otherwise the call has just ended
        _armed = False
        raise TimeLimitError


def call_limited(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Call function(*args) and return its result.

    Raises:
        TimeLimitError: the call took longer than `seconds`; it was interrupted if that is possible here.
    """
    global _armed
    is_main = threading.current_thread() is threading.main_thread()
    can_interrupt = is_main and signal.getsignal(signal.SIGALRM) is _expire
    started = time.monotonic()
    try:
        if can_interrupt:
            _armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
        result = function(*args)
    finally:
        if can_interrupt:
            _armed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    if time.monotonic() - started > seconds:
        raise TimeLimitError
    return result
