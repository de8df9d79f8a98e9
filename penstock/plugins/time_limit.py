"""A time limit for a user's own code in the engine process, where slow code would hold up the streams of all users.

In Penstock's own processes (`install`), the limit interrupts Python code with an alarm signal. Code that never returns
to Python, for instance in a library, cannot be interrupted: the client then kills the silent engine, and tries its
requests one at a time. In a user's own process nothing is interrupted; only the time is measured.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_armed = False  # whether a call is under way that the alarm may interrupt


class TimeLimitError(BaseException):
    """A call took too long. It is not an Exception, so that the called code does not catch it by mistake."""


def install() -> None:
    """Let `call_limited` interrupt what it calls in the main thread of this process. It uses SIGALRM."""
    signal.signal(signal.SIGALRM, _expire)


def _expire(number: int, frame: FrameType | None) -> None:
    global _armed
    if _armed:  # otherwise the call has just ended
        _armed = False
        raise TimeLimitError


def call_limited(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return function(*args).

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
