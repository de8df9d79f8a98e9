"""Measuring in turns: what is compared runs under the same conditions, a batch of calls at a time.

Also the size of the ring that operands rotate over, so that no cache keeps them from one call to the next.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.bench.machine import MachineLimits

RING_BYTES = 256 * 2**20  # operands that are gone through before one comes again
ROUNDS = 5
ROUND_SECONDS = 0.04  # that one turn of a call should take


class Turn:
    """A call that is measured again and again, a batch of calls at a time.

    call: takes the number of the call, which picks its place in a ring of so many operands.
    """

    def __init__(self, call: Callable[[int], Any], ring: int) -> None:
        self._call = call
        self._next = 0
        self._seconds: list[float] = []
        once = self._time(1)  # also the first touch of the memory
        self._calls = max(1, min(int(ROUND_SECONDS / max(once, 1e-7)), ring * 4))

    def take(self) -> None:
        self._seconds.append(self._time(self._calls))

    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self._seconds)

    def _time(self, calls: int) -> float:
        started = time.perf_counter()
        for index in range(self._next, self._next + calls):
            self._call(index)
        self._next += calls
        return (time.perf_counter() - started) / calls


def take_turns(turns: Sequence[Turn], limits: MachineLimits, kind: str) -> list[float]:
    """Median seconds of a call of each; the machine's limits are probed in between."""
    for _ in range(ROUNDS):
        limits.probe(kind)
        for turn in turns:
            turn.take()
    return [turn.median() for turn in turns]


def ring_length(operand_bytes: int) -> int:
    """How many operands make a ring."""
    return RING_BYTES // operand_bytes + 1
