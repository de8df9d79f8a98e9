"""A server whose event loop is watched: `python -m penstock_lab.prove.watched FILE serve ...` is `penstock serve ...`.

A timer beats in the loop. What a beat is late by is how long the loop was held: by a callback, by a system call that
waits, or by another thread that keeps the interpreter's lock. The time for which the loop's thread waited for a core is
not counted, because a busy machine is not the server's fault. The longest hold is written to FILE, which is shared with
the process that attacks.
"""

import asyncio
import contextlib
import mmap
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from penstock_lab.prove.proof import Subject
from penstock_lab.prove.servers import Server, serve, wait_until

BEAT_S = 0.005
HANGS_S = 60.0  # a loop that has been held for so long is not waited for
SCHEDULED = "/proc/thread-self/schedstat"  # ns of computing, ns of waiting for a core, and a count


class Watch:
    """The longest hold of a server's event loop, and the number of beats, as its process writes them to a shared file.

    path: of a file of 16 bytes.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._shared = memoryview(mmap.mmap(file.fileno(), 16)).cast("d")

    def note(self, held_s: float) -> None:
        """Count a beat that was late. Called by the server."""
        self._shared[0] = max(self._shared[0], held_s)
        self._shared[1] += 1

    def begin(self) -> None:
        """Forget the longest hold so far, once the loop is free."""
        self._await_beats()
        self._shared[0] = 0.0

    def longest_s(self) -> float:
        """Wait until the loop is free, and return the longest hold since `begin`."""
        self._await_beats()
        return self._shared[0]

    def _await_beats(self) -> None:
        """Wait for the end of the hold that may be going on: the second beat from now."""
        after = self._shared[1] + 2
        wait_until(lambda: self._shared[1] >= after, HANGS_S, "a beat of the server's event loop")


def beat_in(loop: asyncio.AbstractEventLoop, watch: Watch) -> None:
    """Beat in a loop as soon as it runs."""
    loop.call_soon(lambda: _Beat(loop, watch))


class _Beat:
    def __init__(self, loop: asyncio.AbstractEventLoop, watch: Watch) -> None:
        self._loop, self._watch = loop, watch
        try:
            self._file = os.open(SCHEDULED, os.O_RDONLY)
        except OSError:  # another system: a busy machine makes the loop look slower than it is
            self._file = -1
        self._again()

    def _waited_for_core_s(self) -> float:
        return 0.0 if self._file < 0 else int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def _again(self) -> None:
        self._at, self._waited_s = time.monotonic(), self._waited_for_core_s()
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        waited_s = self._waited_for_core_s() - self._waited_s
        self._watch.note(time.monotonic() - self._at - BEAT_S - waited_s)
        self._again()


@contextmanager
def serve_watched(subject: Subject, *flags: str) -> Iterator[tuple[Server, Watch]]:
    """Run a watched server, as `serve` runs a plain one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(16))
        file.flush()
        with serve(subject, *flags, program=("penstock_lab.prove.watched", file.name)) as server:
            yield server, Watch(file.name)


def main() -> None:
    watch, make = Watch(sys.argv[1]), uvloop.new_event_loop

    def watched() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = make()
        beat_in(loop, watch)
        return loop

    uvloop.new_event_loop = watched
    sys.argv[1:2] = []
    with contextlib.suppress(KeyboardInterrupt):
        runpy.run_module("penstock", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
