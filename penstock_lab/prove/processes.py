"""What proofs do to processes, and the side effects that they suppress."""

import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def send_signal(pid: int | None, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def no_log() -> Iterator[None]:
    """Keep the client's warnings of deaths, which are intended here, from the terminal."""
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def no_core_dumps() -> Iterator[None]:
    """Let processes that start meanwhile leave no core file, which would hold the whole model."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
