"""Tensors of two kinds, numpy's arrays (ml_dtypes adds bfloat16) and torch's tensors; Arena, the buffers of results.

A backend works with one kind, given by the dtype it was made with. The native kernels need only an address, a shape and
a type, so they serve the bundled families with arrays. A process that serves one of them does not import torch, which
takes seconds and 200 MB. Torch's tensors are for the reference backend and for models of a user's own.

A forward pass writes its results to buffers that are kept from step to step. Each kind of result has a slot, which all
decoder layers share: one layer's result is consumed before the next layer writes its own. A slot grows when a step has
more rows than any step before, so in the long run a step allocates nothing. Results of few rows are always at the same
address, so that a recorded program stays valid. A model's result is in a slot, too, and is overwritten when the model
runs again.
"""

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Tensor: TypeAlias = Any  # an Array or a torch.Tensor; layers pass it on and never compute with it
ArrayType: TypeAlias = np.dtype[Any]
Dtype: TypeAlias = Any  # an ArrayType or a torch.dtype
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

FLOAT32, BFLOAT16, FLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
INT8, INT16, INT32, INT64 = np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.int64)
UINT8, BOOL, FLOAT64 = np.dtype(np.uint8), np.dtype(np.bool_), np.dtype(np.float64)
NAMES = {str(dtype): dtype for dtype in (FLOAT32, BFLOAT16, FLOAT16, INT8, INT16, INT32, INT64, UINT8, BOOL, FLOAT64)}

ALIGNMENT = 64  # bytes, for the memory that `empty` returns
OWN_PAGES = 2**18  # bytes; arrays at least this large get pages of their own; far smaller than a huge page
FIXED_ROWS = 64  # maximum number of rows that are always at the same address, on the CPU
LOGITS_ROWS = 128  # prompt positions whose logits exist at once: 64 MiB for a vocabulary of 128k

Allocate = Callable[[tuple[int, ...], str], Tensor]  # shape and name of a type -> memory, like Ops.empty

_array_types: dict[Dtype, ArrayType] = {dtype: dtype for dtype in NAMES.values()}


def array_type(dtype: Dtype) -> ArrayType:
    """Find the np.dtype of the same type. Raise KeyError if numpy has no such type."""
    found = _array_types.get(dtype)
    if found is None:
        found = _array_types[dtype] = NAMES[str(dtype).removeprefix("torch.")]
    return found


def is_torch(dtype: Dtype) -> bool:
    """Tell whether tensors of this dtype are torch's."""
    return not isinstance(dtype, np.dtype)


def dtype_of(name: str, kind: Dtype) -> Dtype:
    """Find the type with this name ("bfloat16"), of the same kind as the dtype `kind`."""
    return getattr(sys.modules["torch"], name) if is_torch(kind) else NAMES[name]


def empty(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    """Allocate uninitialised aligned memory as a tensor of the dtype's kind.

    A large array gets pages of its own, huge pages where the system has them, because products read weights page after
    page. On the heap, a freed large array would also leave a hole: small arrays fill it, and the next large array no
    longer fits. Raise MemoryError if no memory is left.
    """
    if is_torch(dtype):
        return as_torch(empty(shape, array_type(dtype)))
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < OWN_PAGES:
        memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
        start = -address_of(memory) % ALIGNMENT
        return memory[start : start + num_bytes].view(dtype).reshape(shape)
    return np.frombuffer(_pages(num_bytes), dtype=dtype).reshape(shape)  # the array keeps the mapping alive


def _pages(num_bytes: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"not enough memory for an array of {num_bytes} bytes") from error
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages provides small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Buffers:
    """Allocates arrays that are soon freed again, and gives the pages of freed ones to the next ones.

    The system clears every new page, which takes longer than to copy rows of a file into it.
    """

    KEPT = 3  # so many freed arrays' pages, the largest ones

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: ArrayType) -> Array:
        """Allocate as `empty` does."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < OWN_PAGES:
            found: Array = empty(shape, dtype)
            return found
        pages = min((pages for pages in self._free if len(pages) >= num_bytes), key=len, default=None)
        if pages is None:
            pages = _pages(num_bytes)
        else:
            self._free.remove(pages)
        whole = np.frombuffer(pages, dtype=dtype, count=math.prod(shape))  # the base of all its views
        weakref.finalize(whole, self._take_back, pages).atexit = False
        return whole.reshape(shape)

    def clear(self) -> None:
        """Give the pages back to the system."""
        self._free.clear()

    def _take_back(self, pages: mmap.mmap) -> None:
        self._free = sorted([pages, *self._free], key=len, reverse=True)[: self.KEPT]


def address_of(tensor: Tensor) -> int:
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def as_array(tensor: Tensor) -> Array:
    """View a tensor of either kind as an array. It shares the tensor's memory if that is on the CPU."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu()
    if array_type(tensor.dtype) is not BFLOAT16:
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.view(dtype_of("int16", tensor.dtype)).numpy()).view(BFLOAT16)


def as_torch(array: Tensor) -> Tensor:
    """View a tensor of either kind as a torch.Tensor; an array shares its memory."""
    import torch

    if not isinstance(array, np.ndarray):
        return array
    if array.dtype != BFLOAT16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(INT16)).view(torch.bfloat16)


def as_kind_of(tensor: Tensor, array: Array) -> Tensor:
    """View an array as a tensor of the kind that `tensor` has; for another device, it is copied there."""
    return array if isinstance(tensor, np.ndarray) else as_torch(array).to(tensor.device)


def columns_of(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join arrays, or tensors of the kind of `like`, along their columns, as a tensor of that kind."""
    if isinstance(parts[0], np.ndarray):
        return as_kind_of(like, np.concatenate(parts, axis=1))
    return sys.modules["torch"].cat(list(parts), 1)


def put_where(rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the rows of an array or a tensor that a mask chooses; on a device, the host need not know which."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source, where=rows[:, None])
    else:
        target.copy_(sys.modules["torch"].where(rows[:, None], as_torch(source), target))


def put(array: Tensor, tensor: Tensor) -> None:
    """Copy an array or a tensor to a tensor, unless it is what `as_array` returned for it and shares its memory."""
    if address_of(tensor) != address_of(array):
        tensor[:] = array if isinstance(tensor, np.ndarray) else as_torch(array)


def tree_sum(parts: Sequence[Array], out: Array) -> Array:
    """Add a power of two of parts as a binary tree: the upper levels of the tree over a weight's leaves."""
    assert len(parts) in (2, 4, 8), "the parts of a sum are those of a tree, or its bits would depend on their number"
    if len(parts) == 2:
        return np.add(parts[0], parts[1], out=out)
    half = len(parts) // 2
    left = tree_sum(parts[:half], np.empty_like(out)) if half > 1 else parts[0]
    return np.add(left, tree_sum(parts[half:], np.empty_like(out)) if half > 1 else parts[1], out=out)


def contiguous(tensor: Tensor) -> Tensor:
    """Copy a tensor whose rows are not neighbours; return others as they are."""
    return np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor.contiguous()


def rounded(array: Array, dtype: Dtype) -> Array:
    """Round contiguous values to another type, to the nearest, ties to even; the array itself if it has the type."""
    return np.ascontiguousarray(array.astype(array_type(dtype), copy=False)).reshape(array.shape)


class Slot:
    """A buffer [rows, *columns] for results of one kind, passed as `out=`: fixed memory for up to `fixed` rows, and
    memory that grows for more."""

    def __init__(self, columns: tuple[int, ...], dtype: str, allocate: Allocate, fixed: int) -> None:
        self.columns = columns
        self._name = dtype
        self._allocate = allocate
        self._few = allocate((fixed, *columns), dtype)
        self._many = self._few
        self._rows = self._fixed = fixed
        self._last = self._few

    @property
    def dtype(self) -> Dtype:
        return self._few.dtype

    @property
    def row_bytes(self) -> int:
        return int(self._few.nbytes) // self._fixed

    def __call__(self, rows: int) -> Tensor:
        """View the first `rows` rows. Tensors returned earlier share the memory unless the slot has grown since."""
        if rows != self._rows:
            if rows > self._many.shape[0]:
                self._many = self._allocate((rows, *self.columns), self._name)
            self._last = (self._few if rows <= self._fixed else self._many)[:rows]
            self._rows = rows
        return self._last


class Arena:
    """Slots by name, one arena per model. Its users must not need two results of one slot at the same time."""

    def __init__(self, allocate: Allocate, fixed: int = FIXED_ROWS) -> None:
        self._allocate, self._fixed = allocate, fixed
        self._slots: dict[tuple[str, tuple[int, ...], str], Slot] = {}

    def slot(self, name: str, columns: tuple[int, ...], dtype: str) -> Slot:
        """Get or make the slot with this name, for results with these columns and of the type that `dtype` names."""
        key = name, columns, dtype
        if key not in self._slots:
            self._slots[key] = Slot(columns, dtype, self._allocate, self._fixed)
        return self._slots[key]

    @property
    def slots(self) -> frozenset[Slot]:
        return frozenset(self._slots.values())
