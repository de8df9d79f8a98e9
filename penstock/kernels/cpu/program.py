"""Programs: the native calls of a forward pass, recorded once and replayed without running its Python.

A line of Python between two kernels starts cold, because weights have streamed through the caches: measured on a
1.1B model, 1.2 ms of Python become 4 ms. A program is one native call. Only the attention metadata changes from step to
step: each cache group has one PenstockAttentionStep, which is rewritten before every run.

A program is correct only if the forward pass did nothing else. So a Recorder watches torch: views and new memory are
kept alive with the program, and any other operation makes the forward pass unrecordable.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.attention import fill_step, new_step
from penstock.kernels.cpu.library import (
    MAX_ARGUMENTS,
    RECORDABLE,
    PenstockAttentionStep,
    PenstockCall,
    check_status,
)
from penstock.kernels.metadata import AttentionMetadata

Replay = Callable[[int, int], int]  # address and number of PenstockCalls -> status
Calls = list[tuple[str, tuple[int | float | None, ...]]]  # function, arguments after the context

HARMLESS = {  # allocate memory or create views, and compute nothing
    "aten::empty.memory_format",
    "aten::new_empty",
    "aten::slice.Tensor",
    "aten::select.int",
    "aten::view",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::detach",
    "aten::unsqueeze",
    "aten::squeeze.dim",
    "aten::split.Tensor",
    "aten::split_with_sizes",
}


class Program:
    """A recorded forward pass, for a fixed number of tokens.

    Attributes:
        result: the tensor it returned; every run overwrites it.
    """

    def __init__(
        self,
        calls: "ctypes.Array[PenstockCall]",
        replay: Replay,
        steps: Sequence[PenstockAttentionStep],
        kept: Sequence[Any],
        result: Tensor,
    ) -> None:
        self.result = result
        self._calls = calls
        self._replay = replay
        self._steps = steps
        self._kept = kept  # memory that the calls read and write

    def run(self, attention: Sequence[AttentionMetadata]) -> Tensor:
        """Replay the pass with the planned metadata of this step for each cache group.

        Raises:
            ValueError, MemoryError: see `library.check_status`.
        """
        for step, meta in zip(self._steps, attention, strict=True):
            fill_step(step, meta)
        if status := self._replay(ctypes.addressof(self._calls), len(self._calls)):
            check_status(status)
        return self.result


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records native calls while it is entered.

    Attributes:
        foreign: an operation that a program cannot contain, or None.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is ever compiled, and True would import the compiler, which takes a second."""
        return False

    def __init__(self, attention: Sequence[AttentionMetadata], replay: Replay) -> None:
        """Start with the planned metadata of this pass and the function that replays native calls."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: str | None = None
        self._attention = attention
        self._replay = replay
        self._steps = [new_step(meta) for meta in attention]
        self._calls: Calls = []
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in HARMLESS:
            self._kept.append(result)
        else:
            self.foreign = func.name()
        return result

    def call(self, name: str, arguments: tuple[int | float | None, ...]) -> None:
        """Record the call of a native function; arguments without the context."""
        self._calls.append((name, arguments))
        if name not in RECORDABLE:
            self.foreign = name

    def keep(self, *memory: object) -> None:
        """Keep the owners of memory that native calls use alive."""
        self._kept += memory

    def step(self, meta: AttentionMetadata) -> PenstockAttentionStep | None:
        """Return the step of the cache group of this metadata, or None if the metadata is not that of this pass."""
        for step, item in zip(self._steps, self._attention, strict=True):
            if item is meta:
                return step
        self.foreign = "attention metadata of unknown origin"
        return None

    def program(self, result: Tensor) -> Program | None:
        """Return the program, or None if it would be incomplete."""
        if self.foreign:
            return None
        calls = (PenstockCall * len(self._calls))(*(_recorded_call(name, values) for name, values in self._calls))
        return Program(calls, self._replay, self._steps, self._kept, result)


def _recorded_call(name: str, arguments: tuple[int | float | None, ...]) -> PenstockCall:
    types = ABI.functions[name][1][1:]  # without the context
    words = (_word(value, kind) for value, kind in zip(arguments, types, strict=True))
    return PenstockCall(RECORDABLE.index(name), (ctypes.c_int64 * MAX_ARGUMENTS)(*words))


def _word(value: int | float | None, kind: type) -> int:
    """Return a float as the bits of a double, an integer or address unchanged, None as 0."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("<q", struct.pack("<d", value))[0]
        return word
    return int(value or 0)
