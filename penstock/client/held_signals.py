"""HeldSignals: keeps the handlers of signals from running in the middle of a change of state.

Python runs a handler between any two instructions of the main thread. What it raises (KeyboardInterrupt of Ctrl-C, the
TimeoutError of a program's alarm) would leave a step half done, or pass for an error of the model.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which take 50 microseconds per step
import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
SIGNALS = [int(number) for number in sorted(signal.valid_signals())]


class HeldSignals:
    """A block in which the handlers of signals do not run. They run at its end, once each, and may raise then.

    A second Ctrl-C is not held, so that it can end a step that hangs. Handlers are called by the main thread
    only, so in other threads there is nothing to hold. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[int] = []
        self._is_holding = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_holding = True
        try:
            for number in SIGNALS:
                if callable(handler := _signal.getsignal(number)):
                    self._handlers[number] = handler
                    _signal.signal(number, self._take)
        except BaseException:  # of a handler that is not held yet
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._take:
                    _signal.signal(number, handler)
        finally:  # a handler that is back already may have raised; those that are not are called by `_take` from now on
            self._is_holding = False
            self._call_handlers()

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Note a signal that is held, or call its handler."""
        is_repeated = number in self._arrived
        if not self._is_holding or (is_repeated and number == signal.SIGINT):
            self._arrived = [other for other in self._arrived if other != number]
            self._handlers[number](number, frame)
        elif not is_repeated:
            self._arrived.append(number)

    def _call_handlers(self) -> None:
        if self._arrived:
            number = self._arrived.pop(0)
            try:
                self._handlers[number](number, inspect.currentframe())
            finally:
                self._call_handlers()
