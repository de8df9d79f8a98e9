"""TorchWatch: records what a forward pass on torch's tensors does besides native calls.

A program runs on memory that does not move. So each result of torch's is written to memory lent by a TorchPool, and the
program runs the same functions again with the same tensors; views are made once. As in eager torch, memory is used
again as soon as nobody refers to it: whatever reads it has run by then, in the program too. All programs of an engine
share the pool, because one runs at a time.
"""

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.tensors import UINT8, Array, empty

EMPTY = {f"aten::{name}" for name in ("empty.memory_format", "new_empty", "empty_like", "empty_strided")}
MADE = {"aten::lift", "aten::lift_fresh"}  # torch.tensor's result, which every pass makes anew
COPIES = {"aten::_to_copy", "aten::clone"}  # which Tensor.copy_ computes in place
ONCE = {  # what a function cannot be, if running it again is to do the same with other values
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
SMALLEST = 64  # bytes


class TorchPool:
    """Memory for the results of torch's functions in programs, in blocks whose sizes are powers of two."""

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}  # by address
        self._free: dict[int, list[Array]] = {}  # by size

    def lend(self, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        """Make a tensor, whose block is free again when the tensor and all its views are gone."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        size = max(SMALLEST, 1 << (span * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            block = empty((size,), UINT8)
            self._blocks[block.ctypes.data] = block
        lent = block[:]  # the tensor's storage keeps it alive
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).as_strided(tuple(shape), tuple(strides))

    def has(self, value: object) -> bool:
        """Tell whether a value is a tensor whose memory is lent."""
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._blocks

    def fixed(self, value: Tensor) -> Tensor:
        """Make a tensor of the same memory that does not keep it from being lent again; other memory is kept."""
        block = self._blocks.get(value.untyped_storage().data_ptr())
        if block is None:
            return value
        whole = torch.from_numpy(block).view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


class TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches torch while it is entered.

    Args:
        pool: lends the memory of results.
        record: called with each function to be run again; None: there may be none.
        refuse: called with the name of a function that cannot be run again.
        is_paused: tells whether what torch does now is not part of the pass.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import the compiler, which takes a second."""
        return False

    def __init__(
        self,
        pool: TorchPool,
        record: Callable[[Callable[[], object]], None] | None,
        refuse: Callable[[str], None],
        is_paused: Callable[[], bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool, self._record, self._refuse, self._is_paused = pool, record, refuse, is_paused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused():
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:  # a function that is made of others is watched in theirs
                return func.decompose(*args, **kwargs)
        result, name = func(*args, **kwargs), func.name()
        if name in EMPTY:
            return self._pool.lend(result.shape, result.stride(), result.dtype)
        results = result if isinstance(result, list | tuple) else (result,)
        if not all(isinstance(item, Tensor) for item in results):
            self._refuse(name)
            return result
        is_mutable = func._schema.is_mutable
        if not is_mutable and name not in MADE and all(_is_view(item, args) for item in results):
            return result
        if self._record is None or ONCE & {*func.tags}:
            self._refuse(name)
            return result
        fixed_args = self._fixed(args)
        fixed_kwargs = {key: self._fixed(value) for key, value in kwargs.items()}
        if is_mutable:
            self._record(partial(func._op, *fixed_args, **fixed_kwargs))
            return result
        kept = [self._pool.lend(item.shape, item.stride(), item.dtype) for item in results]
        again = _again(func, fixed_args, fixed_kwargs, results, [self._pool.fixed(item) for item in kept])
        self._record(again)
        return type(result)(kept) if isinstance(result, list | tuple) else kept[0]

    def _fixed(self, value: Any) -> Any:
        """Replace tensors in an argument."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._fixed, value))
        return self._pool.fixed(value) if isinstance(value, Tensor) else value


def _is_view(result: Tensor, args: tuple[Any, ...]) -> bool:
    address = _address(result)
    return address is not None and any(isinstance(item, Tensor) and _address(item) == address for item in args)


def _address(value: Tensor) -> int | None:
    """Return where a tensor's memory begins; None if it is of a subclass that has none of its own."""
    try:
        return value.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any, kept: list[Tensor]
) -> Callable[[], object]:
    """Make what computes a function again, into the memory that is kept for its results, and fill that memory."""
    if func.name() in COPIES:
        again: Callable[[], object] = partial(kept[0].copy_, args[0])
    else:
        again = partial(_computed, func._op, args, kwargs, kept)
        variant = _out_variant(func)
        if variant is not None:
            into = partial(variant._op, *args, **kwargs, out=kept[0])
            into()
            if _have_same_bits(results[0], kept[0]):
                return into
    again()
    return again


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: list[Tensor]) -> None:
    results = func(*args, **kwargs)
    for target, value in zip(kept, [results] if isinstance(results, Tensor) else results, strict=True):
        target.copy_(value)


@cache
def _out_variant(func: Any) -> Any:
    """Find the overload of a function that writes its one result to memory that it is given."""
    packet = func.overloadpacket
    wanted = [(item.name, str(item.type)) for item in func._schema.arguments]
    for name in packet.overloads():
        found = getattr(packet, name)
        arguments = found._schema.arguments
        outs = [item.name for item in arguments if item.is_out]
        if outs == ["out"] and wanted == [(item.name, str(item.type)) for item in arguments if not item.is_out]:
            return found
    return None


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(item.contiguous().reshape(-1).view(torch.uint8) for item in (one, other)))
