"""CpuLinear: a packed weight for native products, in its own memory or in tensors of a mapped file. NativeExperts and
NativeLora: what native functions read of mixtures and of LoRA adapters.

native/abi.h describes the layout. Python allocates the memory and reads rows piece by piece; `penstock_pack_rows`
quantises and packs them.
"""

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from penstock.errors import unsupported
from penstock.kernels.coding import SCALE_TYPES, BlockForm, CodedRows, Coding
from penstock.kernels.cpu.calls import address, type_code
from penstock.kernels.cpu.library import ABI, MAX_LEAVES, PenstockBits, PenstockBlockForm, PenstockLora, PenstockWeight
from penstock.kernels.metadata import own
from penstock.kernels.ops import PLAIN, LoraTable, PackedLinear, Packing, RowSource
from penstock.kernels.scheme import GROUP_SIZES
from penstock.kernels.tensors import (
    ALIGNMENT,
    BFLOAT16,
    FLOAT32,
    INT8,
    INT16,
    INT32,
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
MAX_LEVELS = ABI.constants["MAX_LEVELS"]
MAX_INTEGER_LEAF = 2**16  # elements; a longer sum of products of two bytes may overflow an int32
SLICE_BYTES = 2**24  # bytes of rows that are read at once while a weight is packed
F32, BF16, KIND_INT8, INT4, INT4_A16, CODED, CODED_FLOAT = list(ABI.enums["Kind"].values())[:7]
FLOAT_KINDS = {FLOAT32: F32, BFLOAT16: BF16}
STORED_BITS = {F32: 32, BF16: 16, KIND_INT8: 8, INT4: 4, INT4_A16: 4}  # of a weight that is not coded
MAX_GROUP = 32  # elements whose products are summed before they are multiplied by a step
GRANULE = 16  # every group is a multiple
LARGEST_OPERAND = 127
ZERO_POINT = 128  # of stored int8 weights
MINIFLOAT_MANTISSAS = (3, 2)  # bits, of E4M3 and E5M2

# weight, rows (or what CodedRows.read_stored returns), index of the first row
Pack = Callable[["CpuLinear", Any, int], None]


@dataclass(frozen=True)
class Layout:
    """The memory layout of a weight [n, k].

    Attributes:
        kind: Kind of native/abi.h.
        leaf_ends: ends of the leaves of K, the last at k.
        group_size, slices: those of the scheme, or 0.
        gated: the first half of the rows is the gate, the second half is up.
        coding: how the weight is coded, or None.
        block_size: elements of K that share a scale of the coding; 0 without blocks.
    """

    n: int
    k: int
    kind: int
    leaf_ends: tuple[int, ...]
    group_size: int
    slices: int
    gated: bool
    coding: Coding | None = None
    block_size: int = 0

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
        if packing.coding is not None:
            return _coded_layout(n, k, ends, packing, packing.coding)
        if scheme is None:
            return cls(n, k, FLOAT_KINDS[array_type(dtype)], ends, 0, 0, gated)
        if scheme.slices and max(lengths) > MAX_INTEGER_LEAF:
            raise unsupported(
                "quantization", f"{scheme.name} sums at most {MAX_INTEGER_LEAF} products, and this model has {k}"
            )
        if scheme.group_size not in (None, *GROUP_SIZES):
            raise ValueError(f"group size {scheme.group_size}; supported are {', '.join(map(str, GROUP_SIZES))}")
        kind = KIND_INT8 if scheme.weight_bits == 8 else INT4 if scheme.slices else INT4_A16
        return cls(n, k, kind, ends, scheme.group_size or 0, scheme.slices, gated)

    @cached_property
    def padded_leaf_ends(self) -> tuple[int, ...]:
        unit, ends, total = math.lcm(K_UNIT, self.group_size or K_UNIT), [], 0
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

    @property
    def stored_bits(self) -> int:
        return STORED_BITS[self.kind] if self.coding is None else self.coding.bits

    def arrays(self) -> dict[str, tuple[tuple[int, ...], ArrayType]]:
        """Return shape and type of every array except the bias. int16: the bits of a type of 16 bits."""
        arrays: dict[str, tuple[tuple[int, ...], ArrayType]] = {}
        arrays["values"] = ((self.panels, PANEL * self.stored_bits // 8 * self.padded_k), UINT8)
        coding = self.coding
        if self.kind == KIND_INT8 or (coding is not None and coding.column_scales):
            arrays["column_scales"] = ((self.panels * PANEL,), FLOAT32)
        if coding is None:
            if self.group_size:
                arrays["group_scales"] = ((self.panels, self.padded_k // self.group_size, PANEL), INT16)
            return arrays
        parts = coding.parts((self.n, self.k))
        lengths = [end - start for start, end in itertools.pairwise((0, *self.padded_leaf_ends))]
        for name in ("scales", "mins"):
            if name in parts:
                blocks = sum(-(-length // self.block_size) for length in lengths)
                dtype = FLOAT32 if coding.scale_dtype == "float32" else INT16
                arrays[name] = ((self.panels, blocks, PANEL), dtype)
        if coding.steps:
            arrays["steps"] = ((self.panels, self.padded_k // self.group_size, PANEL), INT8)
        if coding.step_mins:
            arrays["step_mins"] = ((self.panels, self.padded_k // self.group_size // 2, 2 * PANEL), UINT8)
        if coding.order:
            arrays["order"] = ((self.k,), INT32)
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


def _coded_layout(n: int, k: int, ends: tuple[int, ...], packing: Packing, coding: Coding) -> Layout:
    """Return the layout of a coded weight, after checking that the kernels can multiply it exactly.

    Raises:
        ValueError: a leaf does not end where a block does.
        NotSupportedError: the kernels do not support the coding.
    """
    integer, bits, zero = coding.is_integer, coding.bits, coding.zero
    plain = integer and bits == 8 and coding.block is None and zero == ZERO_POINT and not coding.levels
    block = coding.block or 0
    if any(end % block for end in ends[:-1] if block):
        raise ValueError(f"{coding.name}: leaves that end at {list(ends)} cut blocks of {block}")
    block = min(block, -(-k // K_UNIT) * K_UNIT)
    group = coding.group if coding.steps else MAX_GROUP if block % MAX_GROUP == 0 else GRANULE
    levels = coding.levels or (-zero, _largest_code(coding) - zero)
    distance = max(abs(level) for level in levels) if integer else 0
    if bits == 6 and zero > GRANULE and not coding.steps:
        group = GRANULE  # sums of more products would not fit in 16 bits
    step = 128 if coding.steps else 1
    longest = block or max(end - start for start, end in itertools.pairwise((0, *ends)))
    reasons = {
        f"blocks of {coding.block}": block % GRANULE,
        f"steps for groups of {coding.group}": group not in (GRANULE, MAX_GROUP),
        f"{len(levels)} levels of {bits} bits": coding.levels and (bits == 6 or (integer and bits == 8)),
        f"codes of {bits} bits with the zero {zero}": bits == 6 and zero and group * zero > 512,
        "steps and mins of levels that are not integers": not integer and (coding.steps or coding.mins),
        "steps of mins only": coding.step_mins and not (coding.steps and block % (2 * group) == 0),
        f"sums of {longest} products": integer and longest * step * distance * LARGEST_OPERAND >= 2**31,
        f"sums of {longest} activations": coding.mins and longest * 255 * LARGEST_OPERAND >= 2**31,
        f"{packing.slices} slices": integer and packing.slices not in (1, 2, 3),
    }
    for reason, holds in reasons.items():
        if holds:
            raise unsupported("quantization", f"{coding.name}: {reason} are not supported")
    if not integer and bits == 8:
        _minifloat(coding)
    kind = KIND_INT8 if plain else CODED if integer else CODED_FLOAT
    slices = packing.slices if integer else 0
    return Layout(n, k, kind, ends, 0 if plain else group, slices, packing.gated, coding, block)


def _largest_code(coding: Coding) -> int:
    """Return the largest code. Those of 6 bits have 5 (Q5_K), or are as far above a zero as below (Q5_0, Q6_K)."""
    return 2**coding.bits - 1 if coding.bits != 6 else 2 * coding.zero - 1 if coding.zero else 31


def _coding_fields(layout: Layout, coding: Coding) -> dict[str, Any]:
    """Return the fields of a PenstockWeight that describe a coding (native/abi.h)."""
    levels, fields = coding.levels, {"code_bits": coding.bits, "block_size": layout.block_size, "zero": coding.zero}
    fields["joined"] = int(coding.joins(layout.slices))
    fields["scale_type"] = SCALE_TYPES.index(coding.scale_dtype)
    fields["largest_code"] = _largest_code(coding)
    if len(levels) == MAX_LEVELS:
        zero = int(-min(levels)) if layout.kind == CODED else 0
        return fields | {"has_levels": 1, "zero": zero, "levels": (ctypes.c_float * MAX_LEVELS)(*levels)}
    return fields | _minifloat(coding) if levels else fields


def _minifloat(coding: Coding) -> dict[str, Any]:
    """Return the fields that give the levels of a type of 8 bits: sign, exponent and mantissa.

    Raises:
        NotSupportedError: the levels are not those of such a type.
    """
    levels, codes = np.array(coding.levels), np.arange(128, dtype=np.uint32)
    largest = int(np.flatnonzero(np.isfinite(levels[:128]))[-1])
    positive, negative = levels[: largest + 1], levels[128 : 129 + largest]
    for bits in MINIFLOAT_MANTISSAS:
        values = (codes << (23 - bits)).view(np.float32).astype(np.float64)[: largest + 1]
        factor = positive[largest] / values[largest]
        if np.array_equal(values * factor, positive) and np.array_equal(-positive, negative):
            return {"mantissa_bits": bits, "factor": factor, "largest_code": largest}
    raise unsupported("quantization", f"the levels of {coding.name} are not supported")


@cache
def native_form(form: BlockForm, size: int) -> tuple[PenstockBlockForm, Any]:
    """Return a form of blocks of `size` bytes for native calls, and the array that it points to."""
    bits = [PenstockBits(*astuple(item)) for item in (*form.codes, *form.steps, *form.step_mins)]
    array = (PenstockBits * len(bits))(*bits)
    native = PenstockBlockForm(
        bits=ctypes.addressof(array),
        codes=len(form.codes),
        steps=len(form.steps),
        step_mins=len(form.step_mins),
        code_offset=form.code_offset,
        step_offset=form.step_offset,
        bytes=size,
        scale=form.scale,
        min=form.min or 0,
        is_exponent=form.is_exponent,
        is_subtracted=form.is_subtracted,
    )
    return native, array


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
            **({} if layout.coding is None else _coding_fields(layout, layout.coding)),
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
    kind of the packed tensors. Of a coded weight, pack_rows is given the stored arrays of its rows."""
    tensors = {name: empty(shape, dtype_of(str(element), dtype)) for name, (shape, element) in layout.arrays().items()}
    if bias is not None:
        tensors["bias"] = empty((layout.panels * PANEL,), dtype_of("float32", dtype))
        as_array(tensors["bias"])[:] = _in_columns(layout, rounded(rounded(as_array(bias), dtype), FLOAT32))
    packed = CpuLinear(layout, tensors)
    row_bytes = layout.k * (4 if layout.coding is None else 1)
    at_once = max(PANEL, SLICE_BYTES // row_bytes // PANEL * PANEL)
    for part in layout.parts():
        for start in range(part.start, part.stop, at_once):
            stop = min(start + at_once, part.stop)
            if layout.coding is None:
                pack_rows(packed, rounded(as_array(source.read(start, stop)), dtype), start)
                continue
            assert isinstance(source, CodedRows), source
            parts = source.read_stored(start, stop)
            if layout.coding.order and start == 0:
                as_array(tensors["order"])[:] = parts["order"]
            pack_rows(packed, parts, start)
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


class NativeLora:
    """A LoraTable as a structure for native functions. It keeps the tensors that it points to alive."""

    def __init__(self, table: LoraTable, dtype: ArrayType) -> None:
        """Check the table. Raise ValueError if a tensor has another shape or type than LoraTable says."""
        slots, pieces, rank, depth = table.a.shape
        columns, ends = table.piece_ends[-1], ABI.constants["MAX_PIECES"]
        if len(table.piece_ends) != pieces or pieces > ends or len(table.leaf_ends) not in (1, 2, 4, 8):
            raise ValueError(f"piece_ends, leaf_ends: {table.piece_ends}, {table.leaf_ends} for {pieces} pieces")
        self.table = table
        self.struct = PenstockLora(n=columns, k=depth, max_rank=rank, slots=slots, pieces=pieces)
        self.struct.leaves, self.struct.type = len(table.leaf_ends), type_code(dtype)
        self.struct.piece_ends[:pieces] = table.piece_ends
        self.struct.leaf_ends[: len(table.leaf_ends)] = table.leaf_ends
        self.struct.a = address(table.a, (slots, pieces, rank, depth), dtype, "a")
        self.struct.b = address(table.b, (slots, -(-columns // 16), rank, 16), dtype, "b")
        for name in ("factors", "offsets"):
            setattr(self.struct, name, address(getattr(table, name), (slots, columns), FLOAT32, name))
        for name in ("ranks", "scaled"):
            setattr(self.struct, name, address(getattr(table, name), (slots,), INT32, name))
        self.address = ctypes.addressof(self.struct)
