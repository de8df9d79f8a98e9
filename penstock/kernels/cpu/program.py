"""Programs: the operations of a forward pass, recorded while they run once and carried out again without its Python.

A line of Python between two kernels starts cold, because weights have streamed through the caches: measured on a
1.1B model, 1.2 ms of Python become 4 ms. In a program all native calls in a row are one, and only what is not native
runs in between.

What a program does is only right if the forward pass did nothing else. So a Recorder watches torch: views and new
memory are kept for the program's life, and any other operation makes the pass one that cannot be recorded.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.cpu.library import RECORDABLE, SIGNATURES, PenstockCall, check_status
from penstock.kernels.ops import AttentionMetadata

Step = Callable[[Sequence[AttentionMetadata]], object]  # something that is not native
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
        self, parts: Sequence[tuple[Callable[[], int], Step | None]], kept: Sequence[Any], result: Tensor
    ) -> None:
        self.result = result
        self._parts = parts
        self._kept = kept  # memory that the parts read and write

    def run(self, attention: Sequence[AttentionMetadata]) -> Tensor:
        """Do it again, with this step's metadata for each cache group.

        Raises:
            ValueError, MemoryError: as library.check_status.
        """
        for native, step in self._parts:
            if status := native():
                check_status(status)
            if step is not None:
                step(attention)
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
        """Take the metadata of this pass, and what carries out native calls."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: str | None = None
        self._attention = attention
        self._replay = replay
        self._parts: list[tuple[Callable[[], int], Step | None]] = []
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

    def step(self, step: Step) -> None:
        """Something that is not native was done, and is to be done again by calling this."""
        self._end_part(step)

    def group(self, meta: AttentionMetadata) -> int:
        """Which cache group this metadata is of."""
        for index, item in enumerate(self._attention):
            if item is meta:
                return index
        self.foreign = "attention metadata of unknown origin"
        return 0

    def unwatched(self) -> "Unwatched":
        """A context in which torch is not watched, for what becomes a step."""
        return Unwatched(self)

    def program(self, result: Tensor) -> Program | None:
        """What was recorded; None where it would not be the whole of it."""
        self._end_part(None)
        return None if self.foreign else Program(self._parts, self._kept, result)

    def _end_part(self, step: Step | None) -> None:
        """The native calls since the last step, and this one."""
        if self.foreign:
            return
        array = (PenstockCall * len(self._calls))(*(_written(name, values) for name, values in self._calls))
        self._kept.append(array)
        self._parts.append((partial(self._replay, ctypes.addressof(array), len(array)), step))
        self._calls = []


class Unwatched:
    """Leaves a Recorder for a while."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.__enter__()  # type: ignore[no-untyped-call]


def _written(name: str, arguments: tuple[int | float | None, ...]) -> PenstockCall:
    types = SIGNATURES[name][1][1:]  # without the context
    words = (_word(value, kind) for value, kind in zip(arguments, types, strict=True))
    return PenstockCall(RECORDABLE.index(name), (ctypes.c_int64 * 16)(*words))


def _word(value: int | float | None, kind: type) -> int:
    """A float as the bits of a double, an address or a number as it is, nothing as 0."""
    if kind is ctypes.c_float:
        word: int = struct.unpack("<q", struct.pack("<d", value))[0]
        return word
    return int(value or 0)
