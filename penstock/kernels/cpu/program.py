"""Programs: the operations of a forward pass, recorded while they run once and carried out again without its Python.

A line of Python between two kernels starts cold, because weights have streamed through the caches: measured on a
1.1B model, 1.2 ms of Python become 4 ms. A program is one native call. What changes from step to step is where the
sequences stand: each cache group has one PenstockAttentionStep, which is written anew before every run.

What a program does is only right if the forward pass did nothing else. So a Recorder watches torch: views and new
memory are kept for the program's life, and any other operation makes the pass one that cannot be recorded.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu.attention import fill_step
from penstock.kernels.cpu.library import (
    MAX_ARGUMENTS,
    RECORDABLE,
    SIGNATURES,
    PenstockAttentionStep,
    PenstockCall,
    check_status,
)
from penstock.kernels.metadata import AttentionMetadata

Replay = Callable[[int, int], int]  # carries out PenstockCalls, given their address and number; 0 is success
Calls = list[tuple[str, tuple[int | float | None, ...]]]  # function, arguments after the context

HARMLESS = {  # these compute nothing: they make memory, or look at it in another way
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
    """What a forward pass did, for as many tokens as it had.

    Attributes:
        result: what it returned; every run writes it anew.
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
        """Do it again, with this step's metadata for each cache group, planned.

        Raises:
            ValueError, MemoryError: as library.check_status.
        """
        for step, meta in zip(self._steps, attention, strict=True):
            fill_step(step, meta)
        if status := self._replay(ctypes.addressof(self._calls), len(self._calls)):
            check_status(status)
        return self.result


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what happens while it is entered.

    Attributes:
        foreign: an operation that a program would leave out, or None.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is ever compiled, and skipping would first import the compiler, which takes a second."""
        return False

    def __init__(self, attention: Sequence[AttentionMetadata], replay: Replay) -> None:
        """Take the metadata of this pass, planned, and what carries out native calls."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: str | None = None
        self._attention = attention
        self._replay = replay
        self._steps = [PenstockAttentionStep() for _ in attention]
        for step, meta in zip(self._steps, attention, strict=True):
            fill_step(step, meta)
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
        """A native function was called."""
        self._calls.append((name, arguments))
        if name not in RECORDABLE:
            self.foreign = name

    def keep(self, *memory: object) -> None:
        """What the native calls read beside tensors."""
        self._kept += memory

    def step(self, meta: AttentionMetadata) -> PenstockAttentionStep | None:
        """Where this metadata's cache group is told how a step stands; None for metadata of unknown origin."""
        for step, item in zip(self._steps, self._attention, strict=True):
            if item is meta:
                return step
        self.foreign = "attention metadata of unknown origin"
        return None

    def program(self, result: Tensor) -> Program | None:
        """What was recorded; None where it would not be the whole of it."""
        if self.foreign:
            return None
        calls = (PenstockCall * len(self._calls))(*(_written(name, values) for name, values in self._calls))
        return Program(calls, self._replay, self._steps, self._kept, result)


def _written(name: str, arguments: tuple[int | float | None, ...]) -> PenstockCall:
    types = SIGNATURES[name][1][1:]  # without the context
    words = (_word(value, kind) for value, kind in zip(arguments, types, strict=True))
    return PenstockCall(RECORDABLE.index(name), (ctypes.c_int64 * MAX_ARGUMENTS)(*words))


def _word(value: int | float | None, kind: type) -> int:
    """A float as the bits of a double, an address or a number as it is, nothing as 0."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("<q", struct.pack("<d", value))[0]
        return word
    return int(value or 0)
