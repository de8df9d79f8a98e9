"""CpuLinear: a weight as the native products read it, in memory of its own or over tensors of a mapped file.

native/abi.h has the layout. Python decides how much memory a weight takes and reads its rows piece by piece;
`penstock_pack_rows` quantises them and puts them in their places.
"""

import contextlib
import ctypes
import itertools
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.errors import NotSupportedError
from penstock.kernels.cpu.library import MAX_LEAVES, PenstockWeight
from penstock.kernels.ops import PackedLinear, RowSource
from penstock.quant.scheme import GROUP_SIZES, Scheme

PANEL = 32  # columns that are packed together
K_UNIT = 64  # leaves are padded to a multiple of this
ALIGNMENT = 64  # bytes
MAX_INTEGER_LEAF = 2**16  # more products of two bytes than this may leave the range of an int32 sum
SLICE_BYTES = 2**24  # rows that are read at once while a weight is packed
HUGE_PAGE = 2**21
FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # native/abi.h, Kind
INT8, INT4, INT4_A16 = 2, 3, 4
PANEL_BYTES = {0: 128, 1: 64, INT8: 32, INT4: 16, INT4_A16: 16}  # for one element of K

Pack = Callable[["CpuLinear", Tensor, int], None]  # weight, rows, the number of the first of them


@dataclass(frozen=True)
class Layout:
    """Where everything of a weight [n, k] is.

    Attributes:
        kind: native/abi.h, Kind.
        leaf_ends: where the leaves of K end, the last at k.
        group_size, slices: of the scheme; 0 where there is none.
        gated: the first half of the rows are a gate's, the second half what it lets through.
    """

    n: int
    k: int
    kind: int
    leaf_ends: tuple[int, ...]
    group_size: int
    slices: int
    gated: bool

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, scheme: Scheme | None, leaf_ends: Sequence[int], gated: bool
    ) -> "Layout":
        """The layout of a weight of that shape.

        Raises:
            ValueError: a shape or leaves that no weight can have.
            NotSupportedError: a leaf is too long to be summed as integers.
        """
        n, k = shape if len(shape) == 2 else (0, 0)
        ends = tuple(leaf_ends) or (k,)
        if n < 1 or k < 1 or (gated and n % 2):
            raise ValueError(f"a weight of the shape {list(shape)} cannot be packed{' for a gate' if gated else ''}")
        lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
        if len(ends) > MAX_LEAVES or ends[-1] != k or min(lengths) < 0:
            raise ValueError(f"{k} elements cannot be cut into leaves that end at {list(ends)}")
        if scheme is None:
            return cls(n, k, FLOAT_KINDS[dtype], ends, 0, 0, gated)
        if scheme.slices and max(lengths) > MAX_INTEGER_LEAF:
            raise NotSupportedError(
                f"quantization: {scheme.name} sums at most {MAX_INTEGER_LEAF} products, and this model has {k}",
                param="quantization",
            )
        if scheme.group_size not in (None, *GROUP_SIZES):
            raise ValueError(f"no groups of {scheme.group_size}; there are {', '.join(map(str, GROUP_SIZES))}")
        kind = INT8 if scheme.weight_bits == 8 else INT4 if scheme.slices else INT4_A16
        return cls(n, k, kind, ends, scheme.group_size or 0, scheme.slices, gated)

    @cached_property
    def padded_leaf_ends(self) -> tuple[int, ...]:
        unit, ends, total = max(K_UNIT, self.group_size), [], 0
        for start, end in itertools.pairwise((0, *self.leaf_ends)):
            total += -(-(end - start) // unit) * unit
            ends.append(total)
        return tuple(ends)

    @property
    def padded_k(self) -> int:
        return self.padded_leaf_ends[-1]

    @property
    def panels(self) -> int:
        return -(-self.n // PANEL) if not self.gated else -(-(self.n // 2) // (PANEL // 2))

    def arrays(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every array but the bias."""
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        arrays["values"] = ((self.panels, PANEL_BYTES[self.kind] * self.padded_k), torch.uint8)
        if self.kind == INT8:
            arrays["column_scales"] = ((self.panels * PANEL,), torch.float32)
        if self.group_size:  # int16 stands for the bits of a bfloat16
            arrays["group_scales"] = ((self.panels, self.padded_k // self.group_size, PANEL), torch.int16)
        return arrays

    def columns(self) -> Tensor:
        """Which row of the weight each packed column is, -1 for padding: [panels * 32] int64."""
        column = torch.arange(self.panels * PANEL)
        if not self.gated:
            return column.masked_fill(column >= self.n, -1)
        half, within = self.n // 2, column % PANEL
        index = column // PANEL * (PANEL // 2) + within % (PANEL // 2)
        row = torch.where(within < PANEL // 2, index, index + half)
        return row.masked_fill(index >= half, -1)

    def parts(self) -> list[range]:
        """The rows that may be packed together: all, or the gate's and then the others."""
        return [range(self.n // 2), range(self.n // 2, self.n)] if self.gated else [range(self.n)]


class CpuLinear:
    """A PenstockWeight and the tensors it points to.

    Attributes:
        shape: of the weight, [N, K].
        depth: K.    outputs: columns of a product, which are N, or N / 2 where gated.
        weight, address: the PenstockWeight, and where it is.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Take the arrays of a layout, with a bias in the order of the packed columns or without.

        Raises:
            ValueError: they are not the layout's, or not aligned.
        """
        expected = layout.arrays()
        if "bias" in tensors:
            expected["bias"] = ((layout.panels * PANEL,), torch.float32)
        if set(tensors) != set(expected):
            raise ValueError(f"a packed weight of {', '.join(expected)}, and given are {', '.join(tensors) or 'none'}")
        for name, (shape, dtype) in expected.items():
            _check_array(name, tensors[name], shape, dtype)
        self.layout = layout
        self.shape = (layout.n, layout.k)
        self.depth = layout.k
        self.gated = layout.gated
        self.outputs = layout.n // 2 if layout.gated else layout.n
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._tensors = dict(tensors)
        self.weight = _structure(layout, self._tensors)
        self.address = ctypes.addressof(self.weight)

    def state(self) -> dict[str, Tensor]:
        """The arrays, not copied."""
        return dict(self._tensors)


def own_linear(weight: PackedLinear, *, gated: bool) -> CpuLinear:
    """The weight as one of this backend, packed for a gate or without.

    Raises:
        TypeError, ValueError: it is not.
    """
    if type(weight) is not CpuLinear:
        raise TypeError(f"a weight packed by another backend: {type(weight).__name__}")
    if weight.gated is not gated:
        raise ValueError(f"a weight packed {'for' if weight.gated else 'without'} a gate is used otherwise")
    return weight


def pack(layout: Layout, source: RowSource, bias: Tensor | None, dtype: torch.dtype, pack_rows: Pack) -> CpuLinear:
    """Pack a weight, reading a few rows at a time. Weight and bias are rounded to dtype before anything else."""
    tensors = {name: empty(shape, element) for name, (shape, element) in layout.arrays().items()}
    if bias is not None:
        tensors["bias"] = _in_columns(layout, bias.to(dtype).float())
    packed = CpuLinear(layout, tensors)
    at_once = max(PANEL, SLICE_BYTES // (layout.k * 4) // PANEL * PANEL)
    for part in layout.parts():
        for start in range(part.start, part.stop, at_once):
            rows = source.read(start, min(start + at_once, part.stop))
            pack_rows(packed, rows.to(dtype).contiguous(), start)
    return packed


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for an array. A large one is asked for in huge pages: a product walks through it page after page."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the mapping as long as it lives


def _in_columns(layout: Layout, bias: Tensor) -> Tensor:
    """bias [N] -> [panels * 32] in the order of the packed columns, 0 where there is no row."""
    if bias.shape != (layout.n,):
        raise ValueError(f"bias: {list(bias.shape)} where [{layout.n}] is needed")
    columns = layout.columns()
    return bias[columns.clamp(min=0)].masked_fill(columns < 0, 0.0)


def _check_array(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype} where {list(shape)} {dtype} is needed")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name}: it must begin at a multiple of {ALIGNMENT} bytes")


def _structure(layout: Layout, tensors: Mapping[str, Tensor]) -> PenstockWeight:
    return PenstockWeight(
        n=layout.n,
        k=layout.k,
        padded_k=layout.padded_k,
        panels=layout.panels,
        kind=layout.kind,
        slices=layout.slices,
        group_size=layout.group_size,
        gated=int(layout.gated),
        leaves=len(layout.leaf_ends),
        leaf_ends=(ctypes.c_int64 * MAX_LEAVES)(*layout.leaf_ends),
        padded_leaf_ends=(ctypes.c_int64 * MAX_LEAVES)(*layout.padded_leaf_ends),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
