"""Output of the commands: text on standard output, everything else on standard error."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from penstock.interface.messages import ModelInfo

DIM, RESET = "\033[2m", "\033[0m"
LOGGER = logging.getLogger("penstock.cli")
LOGGER.setLevel(logging.INFO)


def note(text: str) -> None:
    """Print a line to standard error, dimmed on a terminal, unless --log-level is above info."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    plain = not sys.stderr.isatty()
    print(text if plain else f"{DIM}{text}{RESET}", file=sys.stderr, flush=True)


def show_choices(info: "ModelInfo") -> None:
    """Print which options were chosen automatically, and why."""
    note(f"penstock: {info.model}, {info.dtype}, {info.system_fingerprint}")
    for option, reason in info.choices_made.items():
        note(f"  {option} = {reason}")


def check_writable(path: Path, param: str) -> None:
    """Check that a file can be written before its content is computed. Raise InvalidRequestError if it cannot."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidRequestError(f"{param}: cannot write {str(path)!r}: {error.strerror}", param=param) from None


def handle_signals(*, terminate: bool = False) -> None:
    """Make Ctrl-C raise KeyboardInterrupt. Called when everything has been imported (see `cli.main`).

    With `terminate`, SIGTERM raises SystemExit too, so that unfinished files are removed.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if terminate:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def saying(text: str, after_s: float = 0.5) -> Iterator[None]:
    """Print a note on a terminal if the work inside takes longer than `after_s`, because silence looks like a hang."""
    timer = threading.Timer(after_s, note, [text])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
