"""Job: work on some items, one after the other, in a thread beside the model's step. An item that takes too long is
given up, with its thread.

What counts is the thread's processor time: an item is not to blame for a thread that gets no processor.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Job(Generic[Item]):
    """Calls `work` with each item, in a thread of its own, from now on."""

    def __init__(self, items: Sequence[Item], work: Callable[[Item], None]) -> None:
        self._items, self._work = items, work
        self._done: Future[None] = Future()
        self._lock = threading.Lock()
        self._index, self._began_s = 0, 0.0  # of the item in work, on the thread's clock
        self._given_up = False
        self._clock: int | None = None
        threading.Thread(target=self._run, name="penstock job", daemon=True).start()

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            for index, item in enumerate(self._items):
                with self._lock:
                    if self._given_up:
                        break
                    self._index, self._began_s = index, self._clock_s()
                self._work(item)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    def _clock_s(self) -> float:
        """Return the processor time of the thread; 0 before it begins, and once it has ended."""
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:
            return 0.0

    def ends_within(self, limit_s: float) -> bool:
        """Wait until all is done. False if an item takes about so much processor time from now on, or more.

        Raises what `work` has raised; the items after that one are not begun.
        """
        since_s = self._clock_s()
        while True:
            try:
                self._done.result(limit_s)
                return True
            except TimeoutError:
                if self._clock_s() - max(since_s, self._began_s) > 0.9 * limit_s:
                    return False

    def give_up(self) -> tuple[Item, Sequence[Item]]:
        """Begin no other item. Return the one in work, and those after it."""
        with self._lock:
            self._given_up = True
            return self._items[self._index], self._items[self._index + 1 :]
