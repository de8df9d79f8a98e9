"""A time limit for a user's own code in the engine process, which would hold up the streams of everybody else.

In a process of ours (`install`) the limit interrupts Python code with an alarm signal. Code that never comes back to
Python, in a library for instance, cannot be interrupted: the client then kills the silent engine, and tries its
requests alone. In a user's own process nothing is interrupted; only the time is measured.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_armed = False  # whether the alarm is for a call that is under way


class TimeLimitError(BaseException):
    """A call took too long. No Exception, so that the code itself does not catch it by mistake."""


def install() -> None:
    """Let `call_limited` interrupt what it calls, in the main thread of this process; takes SIGALRM."""
    signal.signal(signal.SIGALRM, _expire)


def _expire(number: int, frame: FrameType | None) -> None:
    global _armed
    if _armed:  # else the call has just ended
        _armed = False
        raise TimeLimitError


def call_limited(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return function(*args).

    Raises:
        TimeLimitError: it took longer than `seconds`; it was interrupted then, if that is possible here.
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
