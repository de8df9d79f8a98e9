"""Measurements of the native kernels: what their context has counted, the limits of the machine below them, and the
text of the key of an attention plan."""

import ctypes

from penstock.kernels.attention.plan import CHOICES
from penstock.kernels.cpu.calls import NativeCalls
from penstock.kernels.cpu.library import PenstockSpan


def kernel_seconds(ops: NativeCalls) -> float:
    """Read the seconds spent in operations so far. The rest of a step is Python and torch."""
    seconds: float = ops.library.penstock_busy_seconds(ops.context)
    return seconds


def expert_counts(ops: NativeCalls) -> tuple[int, int]:
    """Read what `experts` has read and computed: its weights, once per call, and the (row, expert) pairs."""
    counts = (ctypes.c_int64 * 2)()
    ops.library.penstock_expert_counts(ops.context, ctypes.addressof(counts))
    return counts[0], counts[1]


def trace(ops: NativeCalls, spans: "ctypes.Array[PenstockSpan] | None") -> int:
    """Write the spans of all further calls to `spans`; None stops. Return the number of calls since the last
    `trace`."""
    at, capacity = (None, 0) if spans is None else (ctypes.addressof(spans), len(spans))
    calls: int = ops.library.penstock_trace(ops.context, at, capacity)
    return calls


def limit_read(ops: NativeCalls, loop: int, memory: int, num_bytes: int) -> float:
    """Time all threads together as they read some memory once, with one of READ_LOOPS loops; in seconds."""
    seconds: float = ops.library.penstock_limit_read(ops.context, loop, memory, num_bytes)
    return seconds


def limit_multiply(ops: NativeCalls, kind: int, iterations: int) -> tuple[int, float]:
    """Multiply in registers with all threads, and return operations and seconds. kind: Kind of native/abi.h."""
    operations = ctypes.c_int64()
    seconds = ops.library.penstock_limit_multiply(ops.context, kind, iterations, ctypes.addressof(operations))
    return operations.value, seconds


def decode_key(key: int) -> dict[str, str]:
    """Decode the choice of each field.

    Raises:
        ValueError: no plan has this key.
    """
    digits = str(key)
    if len(digits) != 1 + len(CHOICES) or digits[0] != "1":
        raise ValueError(f"{key} is not the key of an attention plan")
    chosen = {}
    for (name, choices), digit in zip(CHOICES.items(), digits[1:], strict=True):
        if int(digit) >= len(choices):
            raise ValueError(f"{key} is not the key of an attention plan: {name} has no choice {digit}")
        chosen[name] = list(choices)[int(digit)]
    return chosen


def describe_key(key: int) -> str:
    """Describe the key in one line of text.

    Raises:
        ValueError: no plan has this key.
    """
    texts = (CHOICES[name][choice] for name, choice in decode_key(key).items())
    return ", ".join(text for text in texts if text)
