"""NativeCalls: the context of the native library that all operations of an engine share, and the way they call it."""

import ctypes
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from penstock.errors import EngineError, InvalidRequestError
from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.arguments import TYPES
from penstock.kernels.cpu.library import LEVELS, check_status, chosen_level, load_library, why_missing
from penstock.kernels.cpu.program import Program, Recorder
from penstock.kernels.metadata import AttentionMetadata
from penstock.validation import check_choice

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class NativeCalls:
    """Threads and kernels of one instruction level; one call runs at a time.

    Attributes:
        dtype: type of weights and of the inputs of products.
        level: name of the instruction level, which determines the bits of results.
        threads: computing threads, the caller's included.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, *, threads: int = 1, level: str | None = None) -> None:
        """Start the threads. level: None means `chosen_level()`.

        Raises:
            InvalidRequestError: there is no native library, or this machine does not have the level.
            EngineError: the threads cannot be started.
        """
        library, level = load_library(), level or chosen_level()
        if library is None or level is None:
            raise InvalidRequestError(f"kernels: 'cpu' is not installed: {why_missing()}", param="kernels")
        check_choice("level", level, LEVELS[: library.penstock_best_level() + 1])
        context = library.penstock_context_new(LEVELS.index(level), threads)
        if not context:
            raise EngineError(f"the native kernels cannot start at level {level} with {threads} threads")
        weakref.finalize(self, library.penstock_context_free, context).atexit = False
        self.dtype = dtype
        self.level = level
        self.threads = threads
        self._type = TYPES[dtype]
        self._context: int = context
        self._library = library
        self._native: dict[str, Callable[..., int]] = {name: getattr(library, name) for name in ABI.functions}
        self._recorder: Recorder | None = None

    def _call(self, name: str, used: tuple[object, ...], *arguments: int | float | None) -> None:
        """Call a native function; `used` owns the memory that its arguments point to.

        Raises:
            ValueError, MemoryError: see `library.check_status`.
        """
        if self._recorder is not None:
            self._recorder.call(name, arguments)
            self._recorder.keep(*used)
        if status := self._native[name](self._context, *arguments):
            check_status(status)

    def record(
        self, forward: Callable[[], Tensor], attention: Sequence[AttentionMetadata]
    ) -> tuple[Tensor, Program | None]:
        recorder = Recorder(attention, partial(self._native["penstock_replay"], self._context))
        recorder.keep(self)
        self._recorder = recorder
        try:
            with recorder:
                result = forward()
        finally:
            self._recorder = None
        return result, recorder.program(result)

    # --- measurements -------------------------------------------------------------------------------------------------

    def kernel_seconds(self) -> float:
        """Return the seconds spent in operations so far; the rest of a step is Python and torch."""
        seconds: float = self._library.penstock_busy_seconds(self._context)
        return seconds

    def limit_read(self, memory: Tensor) -> float:
        """Return the seconds that all threads together need to read this memory once."""
        seconds: float = self._library.penstock_limit_read(self._context, memory.data_ptr(), memory.nbytes)
        return seconds

    def limit_multiply(self, kind: int, iterations: int) -> tuple[int, float]:
        """Multiply in registers with all threads; return operations and seconds. kind: Kind of native/abi.h."""
        operations = ctypes.c_int64()
        at = ctypes.addressof(operations)
        seconds = self._library.penstock_limit_multiply(self._context, kind, iterations, at)
        return operations.value, seconds


def remembered(known: dict[Key, Value], key: Key, limit: int, make: Callable[[], Value]) -> Value:
    """Return the value of a key; if it is unknown, make and keep it, and forget all others once there are `limit`."""
    value = known.get(key)
    if value is None:
        if len(known) >= limit:
            known.clear()
        value = known[key] = make()
    return value
