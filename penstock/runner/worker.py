"""Worker: a thread that works on items, one after the other, beside the model's step. An item that takes too long is
given up together with the thread.

The limit is processor time, so a thread that waits for a core does not use it up.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Worker(Generic[Item]):
    """Calls `work` with items, in a thread of its own that is started with the first items."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._name, self._work = name, work
        self._thread: _Thread[Item] | None = None

    def start(self, items: Sequence[Item]) -> None:
        """Begin to work on these items. The caller has waited for the items before."""
        if self._thread is None:
            self._thread = _Thread(self._name, self._work)
        self._thread.start(items)

    def wait(self, limit_s: float) -> list[Item]:
        """Wait until all items are done or given up. Return those given up.

        An item is given up if it is not done after about `limit_s` of processor time, counted from this call or from
        the item's start, whichever is later.

        Raises whatever `work` raised; the items after that one are not begun.
        """
        given_up = list[Item]()
        while self._thread is not None and not self._thread.ends_within(limit_s):
            item, others = self._thread.give_up()
            given_up.append(item)
            self._thread = None
            self.start(others)
        return given_up


class _Thread(Generic[Item]):
    """A thread and the clock of its processor time."""

    def __init__(self, name: str, work: Callable[[Item], None]) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(1, name, self._note_clock)
        self._clock: int | None = None
        self._lock = threading.Lock()
        self._items: Sequence[Item] = ()
        self._index, self._began_s = 0, 0.0  # the current item, and the clock when it began
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
        """Begin no further item. Return the current item and those after it."""
        with self._lock:
            self._is_given_up = True
            self._pool.shutdown(wait=False)
            return self._items[self._index], self._items[self._index + 1 :]
