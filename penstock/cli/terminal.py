"""Output of the commands: text on standard output, everything else on standard error."""

import logging
import shutil
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import invalid

if TYPE_CHECKING:
    from penstock.interface.messages import ModelInfo

DIM, RESET = "\033[2m", "\033[0m"
MAX_INDENT = 64  # characters of a line that are looked at for a fence of code
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


def size_text(num_bytes: int) -> str:
    """Write bytes in MiB, or in GiB from one on."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


class WordWrap:
    """Writes text to standard output as it comes. On a terminal, lines end between words; code keeps its lines.

    A word is held back until it is complete, or until `finish`.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._word = ""
        self._column = 0
        self._line = ""  # the beginning of the current line of the text
        self._in_code = False

    def write(self, text: str) -> None:
        if not self._is_terminal:
            sys.stdout.write(text)
        else:
            for character in text:
                self._add(character)
        sys.stdout.flush()

    def finish(self) -> None:
        """Write what is held back, and end the line."""
        self._flush()
        print(flush=True)

    def _add(self, character: str) -> None:
        if character == "\n":
            self._flush()
            sys.stdout.write("\n")
            if self._line.lstrip().startswith("```"):
                self._in_code = not self._in_code
            self._column, self._line = 0, ""
            return
        self._line += character if len(self._line) < MAX_INDENT else ""
        if self._in_code:
            sys.stdout.write(character)
        elif character == " " or _width(character) == 2:  # between wide characters, any place is one for a break
            self._flush()
            self._put(character)
        else:
            self._word += character

    def _flush(self) -> None:
        if self._word:
            self._put(self._word)
            self._word = ""

    def _put(self, text: str) -> None:
        """Write a word, on a line of its own if it does not fit; a space at the edge is dropped."""
        width, columns = sum(map(_width, text)), shutil.get_terminal_size().columns
        if self._column and self._column + width > columns:
            sys.stdout.write("\n")
            self._column = 0
            if text == " ":
                return
        sys.stdout.write(text)
        self._column = (self._column + width) % columns if width > columns else self._column + width


def _width(character: str) -> int:
    """Count the columns of a character on a terminal."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf", "Cc"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def check_writable(path: Path, param: str) -> None:
    """Check that a file can be written before its content is computed. Raise InvalidRequestError if it cannot."""
    try:
        path.open("a").close()
    except OSError as error:
        raise invalid(param, f"cannot write {str(path)!r}: {error.strerror}") from None


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
