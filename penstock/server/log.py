"""The server's log on standard error, written by a thread: a pipe that nobody reads, or a stopped terminal, must not
hold up the event loop and with it every stream.
"""

import logging
import os
import queue
import select
import sys
import threading
from contextlib import suppress

STDERR = 2
MAX_LINES = 8192  # that wait to be written; those that come after them are dropped and counted
PATIENCE_S = 1.0  # how long the end of the process waits for a reader
LOGGER = logging.getLogger("penstock")


class BackgroundLog(logging.Handler):
    """Writes log records to a file descriptor from a thread. Logging never blocks.

    It does not write through sys.stderr, whose lock a blocked thread would hold: Python could then not exit.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes | threading.Event] = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if not self._tell_of_dropped() or not self._put(f"{line}\n".encode(errors="backslashreplace")):
            self._num_dropped += 1

    def flush(self) -> None:
        """Wait until everything so far has been written, or nobody has read it for a while."""
        written = threading.Event()
        self.acquire()
        try:
            is_queued = self._tell_of_dropped() and self._put(written)
        finally:
            self.release()
        if is_queued:
            written.wait(PATIENCE_S)

    def _tell_of_dropped(self) -> bool:
        """Write how many lines are missing here, if any are. Return False if there is no room for that either."""
        note = f"log lines dropped here, because standard error was not read: {self._num_dropped}\n"
        if self._num_dropped and self._put(note.encode()):
            self._num_dropped = 0
        return not self._num_dropped

    def _put(self, item: bytes | threading.Event) -> bool:
        with suppress(queue.Full):
            self._waiting.put_nowait(item)
            return True
        return False

    def _write(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            with suppress(OSError):  # the reader has gone, or the disk is full: there is no other place to say so
                while item:
                    item = item[os.write(self._descriptor, item) :]


def log_to_stderr(level: str) -> None:
    """Send log lines to standard error, unless the process has configured logging already.

    level: of Penstock's own lines; of other libraries only warnings and errors are logged.
    """
    root = logging.getLogger()
    if not LOGGER.handlers and not root.handlers:
        root.addHandler(BackgroundLog(STDERR))
        LOGGER.setLevel(level.upper())


def print_last(text: str) -> None:
    """Print a line to standard error after all log lines, unless nobody reads there: the process has to end."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    if select.select([], [STDERR], [], PATIENCE_S)[1]:
        print(text, file=sys.stderr, flush=True)
