"""CpuLinear: a packed weight for native products, in its own memory or in tensors of a mapped file.

native/abi.h describes the layout. Python allocates the memory and reads rows piece by piece; `penstock_pack_rows`
quantises and packs them.
"""

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.cpu.calls import address
from penstock.kernels.cpu.library import ABI, MAX_LEAVES, PenstockWeight
from penstock.kernels.metadata import own
from penstock.kernels.ops import PLAIN, PackedLinear, Packing, RowSource
from penstock.kernels.scheme import GROUP_SIZES
from penstock.kernels.tensors import (
    ALIGNMENT,
    BFLOAT16,
    FLOAT32,
    INT16,
    UINT8,
    Array,
    ArrayType,
    Dtype,
    Tensor,
    address_of,
    array_type,
    as_array,
    dtype_of,
    empty,
    rounded,
)

PANEL = ABI.constants["PANEL"]  # columns that are packed together
K_UNIT = ABI.constants["K_UNIT"]  # leaves are padded to a multiple of this
MAX_INTEGER_LEAF = 2**16  # elements; a longer sum of products of two bytes may overflow an int32
SLICE_BYTES = 2**24  # bytes of rows that are read at once while a weight is packed
F32, BF16, INT8, INT4, INT4_A16 = list(ABI.enums["Kind"].values())[:5]
FLOAT_KINDS = {FLOAT32: F32, BFLOAT16: BF16}
PANEL_BYTES = {F32: 128, BF16: 64, INT8: 32, INT4: 16, INT4_A16: 16}  # per element of K

Pack = Callable[["CpuLinear", Array, int], None]  # weight, rows, index of the first row


@dataclass(frozen=True)
class Layout:
    """The memory layout of a weight [n, k].

    Attributes:
        kind: Kind of native/abi.h.
        leaf_ends: ends of the leaves of K, the last at k.
        group_size, slices: those of the scheme, or 0.
        gated: the first half of the rows is the gate, the second half is up.
    """

    n: int
    k: int
    kind: int
    leaf_ends: tuple[int, ...]
    group_size: int
    slices: int
    gated: bool

    @classmethod
    def of(cls, shape: Sequence[int], dtype: Dtype, packing: Packing = PLAIN) -> "Layout":
        """Lay out a weight of this shape.

        Raises:
            ValueError: the shape or the leaves are invalid.
            NotSupportedError: a leaf is too long for integer sums.
        """
        n, k = shape if len(shape) == 2 else (0, 0)
        ends, scheme, gated = packing.leaf_ends or (k,), packing.scheme, packing.gated
        if n < 1 or k < 1 or (gated and n % 2):
            raise ValueError(f"a weight of the shape {list(shape)} cannot be packed{' for a gate' if gated else ''}")
        lengths = [end - start for start, end in itertools.pairwise((0, *ends))]
        if len(ends) > MAX_LEAVES or ends[-1] != k or min(lengths) < 0:
            raise ValueError(f"{k} elements cannot be cut into leaves that end at {list(ends)}")
        if scheme is None:
            return cls(n, k, FLOAT_KINDS[array_type(dtype)], ends, 0, 0, gated)
        if scheme.slices and max(lengths) > MAX_INTEGER_LEAF:
            raise NotSupportedError(
                f"quantization: {scheme.name} sums at most {MAX_INTEGER_LEAF} products, and this model has {k}",
                param="quantization",
            )
        if scheme.group_size not in (None, *GROUP_SIZES):
            raise ValueError(f"group size {scheme.group_size}; supported are {', '.join(map(str, GROUP_SIZES))}")
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

    def arrays(self) -> dict[str, tuple[tuple[int, ...], ArrayType]]:
        """List shape and type of every array except the bias."""
        arrays: dict[str, tuple[tuple[int, ...], ArrayType]] = {}
        arrays["values"] = ((self.panels, PANEL_BYTES[self.kind] * self.padded_k), UINT8)
        if self.kind == INT8:
            arrays["column_scales"] = ((self.panels * PANEL,), FLOAT32)
        if self.group_size:  # int16: bits of bfloat16
            arrays["group_scales"] = ((self.panels, self.padded_k // self.group_size, PANEL), INT16)
        return arrays

    def num_bytes(self, *, bias: bool) -> int:
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays().values())
        return sum(sizes) + (self.panels * PANEL * FLOAT32.itemsize if bias else 0)

    def columns(self) -> Array:
        """Compute the weight's row that each packed column holds, or -1 for padding: [panels * 32] int64."""
        column = np.arange(self.panels * PANEL)
        if not self.gated:
            return np.where(column < self.n, column, -1)
        half, within = self.n // 2, column % PANEL
        index = column // PANEL * (PANEL // 2) + within % (PANEL // 2)
        row = np.where(within < PANEL // 2, index, index + half)
        return np.where(index < half, row, -1)

    def parts(self) -> list[range]:
        """Split the rows into ranges that may be packed together: all rows, or gate rows and up rows."""
        return [range(self.n // 2), range(self.n // 2, self.n)] if self.gated else [range(self.n)]


class CpuLinear:
    """A PenstockWeight and the tensors it points to.

    Attributes:
        shape: shape of the weight, [N, K].
        depth: K.
        outputs: columns of a product: N, or N / 2 if gated.
        weight, address: the PenstockWeight and its address.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Use the arrays of a layout, optionally with a bias in the order of the packed columns.

        Raises:
            ValueError: the arrays do not fit the layout or are not aligned.
        """
        expected = layout.arrays()
        if "bias" in tensors:
            expected["bias"] = ((layout.panels * PANEL,), FLOAT32)
        if set(tensors) != set(expected):
            raise ValueError(f"a packed weight needs {', '.join(expected)}; given are {', '.join(tensors) or 'none'}")
        for name, (shape, dtype) in expected.items():
            if address(tensors[name], shape, dtype, name) % ALIGNMENT:
                raise ValueError(f"{name}: its address must be a multiple of {ALIGNMENT}")
        self.layout = layout
        self.shape = (layout.n, layout.k)
        self.depth = layout.k
        self.gated = layout.gated
        self.outputs = layout.n // 2 if layout.gated else layout.n
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._tensors = dict(tensors)
        self.weight = PenstockWeight(
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
            **{name: address_of(tensor) for name, tensor in self._tensors.items()},
        )
        self.address = ctypes.addressof(self.weight)

    def state(self) -> dict[str, Tensor]:
        """Collect the arrays without copying them."""
        return dict(self._tensors)

    def take_scales(self) -> Array | None:
        """Take the scale of each column [N], and set it to 1 in the weight; None if the weight has no such scales."""
        if "column_scales" not in self._tensors:
            return None
        scales = as_array(self._tensors["column_scales"])
        own = scales[: self.layout.n].copy()
        scales[:] = 1
        return own


def own_linear(weight: PackedLinear, *, gated: bool) -> CpuLinear:
    """Check that a weight was packed by this backend, and is gated or not.

    Raises:
        TypeError: another backend packed the weight.
        ValueError: the weight is gated and must not be, or the other way round.
    """
    linear = own(weight, CpuLinear)
    if linear.gated is not gated:
        packed, used = ("with", "without") if linear.gated else ("without", "with")
        raise ValueError(f"a weight packed {packed} a gate cannot be used {used} one")
    return linear


def pack(layout: Layout, source: RowSource, bias: Tensor | None, dtype: Dtype, pack_rows: Pack) -> CpuLinear:
    """Pack a weight, reading a few rows at a time. Weight and bias are first rounded to dtype, which also gives the
    kind of the packed tensors."""
    tensors = {name: empty(shape, dtype_of(str(element), dtype)) for name, (shape, element) in layout.arrays().items()}
    if bias is not None:
        tensors["bias"] = empty((layout.panels * PANEL,), dtype_of("float32", dtype))
        as_array(tensors["bias"])[:] = _in_columns(layout, rounded(rounded(as_array(bias), dtype), FLOAT32))
    packed = CpuLinear(layout, tensors)
    at_once = max(PANEL, SLICE_BYTES // (layout.k * 4) // PANEL * PANEL)
    for part in layout.parts():
        for start in range(part.start, part.stop, at_once):
            rows = source.read(start, min(start + at_once, part.stop))
            pack_rows(packed, rounded(as_array(rows), dtype), start)
    return packed


def _in_columns(layout: Layout, bias: Array) -> Array:
    """Arrange bias [N] as [panels * 32] in the order of the packed columns, with 0 for padding."""
    if bias.shape != (layout.n,):
        raise ValueError(f"bias: {list(bias.shape)}, but [{layout.n}] is needed")
    columns = layout.columns()
    return np.where(columns < 0, np.float32(0.0), bias[np.maximum(columns, 0)])


class NativeExperts:
    """The experts of a layer as arrays of PenstockWeight, which keep the weights and their memory alive.

    Attributes:
        count: number of experts.
        depth, outputs: columns of the input and of the output.
        gate_up, down: addresses of the arrays [count].
    """

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        """Check and copy the weights.

        Raises:
            ValueError: the numbers of weights differ, or not all experts have the same shapes.
            TypeError: a weight was packed by another backend.
        """
        gates = [own_linear(item, gated=True) for item in gate_up]
        downs = [own_linear(item, gated=False) for item in down]
        shapes = {(gate.shape, plain.shape) for gate, plain in zip(gates, downs, strict=True)}
        if len(shapes) != 1 or gates[0].outputs != downs[0].depth or gates[0].depth != downs[0].outputs:
            raise ValueError(f"experts: weights of these shapes do not follow each other: {sorted(shapes)}")
        self.count, self.depth, self.outputs = len(gates), gates[0].depth, downs[0].outputs
        self._weights = gates, downs
        self._arrays = _array(gates), _array(downs)
        self.gate_up, self.down = (ctypes.addressof(array) for array in self._arrays)


def _array(weights: list[CpuLinear]) -> "ctypes.Array[PenstockWeight]":
    return (PenstockWeight * len(weights))(*(item.weight for item in weights))
