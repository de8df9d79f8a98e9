"""NativeCalls: the context of the native library that all operations of an engine share, and how they call it."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.errors import EngineError, InvalidRequestError
from penstock.kernels.cpu.arguments import TYPES
from penstock.kernels.cpu.library import LEVELS, SIGNATURES, check_status, chosen_level, load_library, why_missing
from penstock.kernels.cpu.program import Program, Recorder
from penstock.kernels.metadata import AttentionMetadata
from penstock.validation import check_choice


class NativeCalls:
    """Threads and kernels of one instruction level, which carry out one call at a time.

    Attributes:
        dtype: type of weights and of what products read.
        level: name of the instruction level, which decides the bits.
        threads: that compute, the caller's included.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, *, threads: int = 1, level: str | None = None) -> None:
        """Start the threads. Without a level it is the machine's best, or the one that the environment forces.

        Raises:
            InvalidRequestError: there is no native library, or no such level.
            EngineError: the threads cannot be had.
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
        self._native: dict[str, Callable[..., int]] = {name: getattr(library, name) for name in SIGNATURES}
        self._recorder: Recorder | None = None

    def _call(self, name: str, used: tuple[object, ...], *arguments: int | float | None) -> None:
        """Carry out one native function; `used` are the owners of the memory behind its arguments.

        Raises:
            ValueError, MemoryError: as library.check_status.
        """
        if self._recorder is not None:
            self._recorder.call(name, arguments)
            self._recorder.keep(*used)
        if status := self._native[name](self._context, *arguments):
            check_status(status)

    def record(
        self, forward: Callable[[], Tensor], attention: Sequence[AttentionMetadata]
    ) -> tuple[Tensor, Program | None]:
        """Run a forward pass and write down what it did; see `kernels.ops.RecordingOps`."""
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
        """Seconds that operations have taken so far; the rest of a step is Python and torch."""
        seconds: float = self._library.penstock_busy_seconds(self._context)
        return seconds

    def limit_read(self, memory: Tensor) -> float:
        """Seconds that all threads need to read this memory once."""
        seconds: float = self._library.penstock_limit_read(self._context, memory.data_ptr(), memory.nbytes)
        return seconds

    def limit_multiply(self, kind: int, iterations: int) -> tuple[int, float]:
        """Multiply in registers with all threads, kind 0 float32, 1 bfloat16, 2 int8: operations, and seconds."""
        operations = ctypes.c_int64()
        at = ctypes.addressof(operations)
        seconds = self._library.penstock_limit_multiply(self._context, kind, iterations, at)
        return operations.value, seconds
