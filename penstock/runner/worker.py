"""Worker: a thread that works on items, one after the other, beside the model's step. One that takes too long is given
up, with the thread.

What counts is the thread's processor time: an item is not to blame for a thread that gets no processor.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Worker(Generic[Item]):
    """Calls `work` with items, in a thread of its own, which begins with the first of them."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._name, self._work = name, work
        self._thread: _Thread[Item] | None = None

    def start(self, items: Sequence[Item]) -> None:
        """Begin to work on these. Those that were started before have been waited for."""
        if self._thread is None:
            self._thread = _Thread(self._name, self._work)
        self._thread.start(items)

    def wait(self, limit_s: float) -> list[Item]:
        """Wait until all is done. Return the items that were given up: of each the work took about `limit_s` of
        processor time from now on, or from its beginning, and was not done.

        Raises what the work has raised; the items after that one are not begun.
        """
        given_up = list[Item]()
        while self._thread is not None and not self._thread.ends_within(limit_s):
            item, others = self._thread.give_up()
            given_up.append(item)
            self._thread = None
            self.start(others)
        return given_up


class _Thread(Generic[Item]):
    """A thread with a clock."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(1, name, self._note_clock)
        self._clock: int | None = None
        self._lock = threading.Lock()
        self._items: Sequence[Item] = ()
        self._index, self._began_s = 0, 0.0  # of the item in work
        self._is_given_up = False
        self._done: Future[None] | None = None

    def _note_clock(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def _clock_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def start(self, items: Sequence[Item]) -> None:
        self._done = self._pool.submit(self._run, items)

    def _run(self, items: Sequence[Item]) -> None:
        self._items = items
        for index, item in enumerate(items):
            with self._lock:
                if self._is_given_up:
                    return
                self._index, self._began_s = index, self._clock_s()
            self._work(item)

    def ends_within(self, limit_s: float) -> bool:
        since_s, done, self._done = self._clock_s(), self._done, None
        while done is not None:
            try:
                done.result(limit_s)
                return True
            except TimeoutError:
                if self._clock_s() - max(since_s, self._began_s) > 0.9 * limit_s:
                    return False
        return True

    def give_up(self) -> tuple[Item, Sequence[Item]]:
        """Begin no other item. Return the one in work, and those after it."""
        with self._lock:
            self._is_given_up = True
            self._pool.shutdown(wait=False)
            return self._items[self._index], self._items[self._index + 1 :]
