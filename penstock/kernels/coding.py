"""Coded weights: values in the codes of a checkpoint's own format, which no one quantises a second time. No torch.

A weight [N, K] is cut along K into *blocks* of so many elements, and each block into *groups*. Its values are

    value[n, k] = scales[n, b] * steps[n, g] * level(codes[n, k]) + mins[n, b] * step_mins[n, g]

with b = k // block and g = k // group, times column_scales[n] where a format has them. level(code) is code - zero, or
levels[code] where the format has a table. Steps that a format lacks count as 1, and so do step_mins where it has mins.
Every format that Penstock reads is a row of this table (docs/quantization.md lists them), for example

    format          bits  group  block  zero  steps         mins   step_mins
    Q4_0, Q8_0      4, 8  32     32     8, 128
    Q4_1            4     32     32     0                   yes
    Q4_K, Q5_K      4, 6  32     256    0     unsigned      yes    yes
    Q6_K, Q3_K      6, 4  16     256    32, 4 signed
    AWQ, GPTQ       4, 8  any    = group 0                  -scale zero points
    MXFP4           4     32     32     table of E2M1
    FP8             8     -      128    table of 256 numbers

Arithmetic. If all levels are integers, a product is computed in integers: activations become int8 slices, as for int8
weights (native/products/products.h), the products of a group are summed exactly, multiplied by the group's step and
summed exactly over the block; the block's sum is converted to float32, multiplied by its scale, and added to the total
of its leaf, with each operation rounded separately. The sum of step_mins times the sums of the activations is exact
too; it is multiplied by `mins` and added after it. So all instruction levels give the same bits. Two slices q0 and q1
are joined (Coding.joins) where the sums of 254 q0 + q1 fit in an int32: the total is then that of this operand, and the
leaf's is total * (1/254) * scale. If a level is not an integer (FP8, NF4), activations keep the model's type, and a
block's products are added in float32 in ascending k; for FP8, activations below 2^-73 count as 0, and those from 2^68
on as infinite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from penstock.kernels.tensors import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, Array, as_array

CODE_BITS = (4, 6, 8)  # in which a code can be stored
SCALE_TYPES = ("float16", "bfloat16", "float32")
MAX_JOINED_BLOCK = 256  # elements: so many products of 254 q0 + q1 and codes up to 255 fit in an int32


class PartRows(Protocol):
    """One array of a coded weight, read in pieces like a kernels.ops.RowSource, but of any type."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> Array: ...


@dataclass(frozen=True, slots=True)
class Coding:
    """The form in which the values of a weight are stored.

    Attributes:
        name: the format's own name, for messages and plans: "Q4_K", "AWQ".
        bits: bits in which a code is kept, 4, 6 or 8; a code is less than 2 ** bits.
        group: elements of K that share a step. It divides `block`.
        block: elements of K that share a scale. None: the whole row, whose scale is in column_scales (and there are no
            scales, steps and mins).
        zero: the code of the value 0, if there is no table.
        levels: the value of each code; () for code - zero.
        scale_dtype: the type that holds scales and mins exactly, one of SCALE_TYPES.
        steps, mins, step_mins, column_scales: whether the format has them.
        order: whether it stores the columns of K in another order (GPTQ's act-order): stored column i is column
            order[i] of the weight.
    """

    name: str
    bits: int
    group: int = 32
    block: int | None = 32
    zero: int = 0
    levels: tuple[float, ...] = ()
    scale_dtype: str = "float16"
    steps: bool = False
    mins: bool = False
    step_mins: bool = False
    column_scales: bool = False
    order: bool = False

    def __post_init__(self) -> None:
        block = self.block
        assert self.bits in CODE_BITS, self
        assert self.scale_dtype in SCALE_TYPES, self
        assert len(self.levels) in (0, 16, 256), self
        assert self.mins or not self.step_mins, self
        if block is None:
            assert self.column_scales, self
            assert not self.steps, self
            assert not self.mins, self
        else:
            assert block % self.group == 0, self

    @property
    def is_integer(self) -> bool:
        """Tell whether every level is an integer of 8 bits, so that products are exact in integers."""
        return all(level == int(level) and -128 <= level <= 127 for level in self.levels)

    def joins(self, slices: int) -> bool:
        """Tell whether the int8 slices of an activation are multiplied as one integer of 16 bits."""
        short = self.block is not None and self.block <= MAX_JOINED_BLOCK
        return self.is_integer and slices == 2 and short and not self.steps

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """List shape and type of every array of a weight [N, K], by the names that CodedRows.parts has.

        codes [N, K] uint8; scales, mins [N, K / block] scale_dtype; steps [N, K / group] int8; step_mins [N, K / group]
        uint8; column_scales [N] float32; order [K] int32. K need not be a multiple of block: the last one may be short.
        """
        n, k = shape
        groups = -(-k // self.group)
        result: dict[str, tuple[tuple[int, ...], str]] = {"codes": ((n, k), "uint8")}
        if self.block is not None:
            result["scales"] = ((n, -(-k // self.block)), self.scale_dtype)
        if self.steps:
            result["steps"] = ((n, groups), "int8")
        if self.mins:
            result["mins"] = ((n, -(-k // (self.block or k))), self.scale_dtype)
        if self.step_mins:
            result["step_mins"] = ((n, groups), "uint8")
        if self.column_scales:
            result["column_scales"] = ((n,), "float32")
        return result | ({"order": ((k,), "int32")} if self.order else {})


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of neighbouring bytes, and the values of 8 bits that they belong to, which are 0 before:

    value[to + i * stride] |= (byte[first + i] >> right & mask) << left    for i < count
    """

    first: int
    count: int
    to: int = 0
    stride: int = 1
    right: int = 0
    left: int = 0
    mask: int = 255


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a file stores a block, with all its parts in neighbouring bytes.

    Attributes:
        codes, steps, step_mins: where their bits are.
        scale: the first byte of the scale, a float16 number.
        min: the first byte of the min, a float16 number; None: there is none.
        code_offset, step_offset: what is added to each code and step, modulo 256.
        is_exponent: the scale is one byte e and stands for 2^(e - 128), as bfloat16.
        is_subtracted: the min is stored with the opposite sign.
    """

    codes: tuple[Bits, ...]
    scale: int = 0
    min: int | None = None
    steps: tuple[Bits, ...] = ()
    step_mins: tuple[Bits, ...] = ()
    code_offset: int = 0
    step_offset: int = 0
    is_exponent: bool = False
    is_subtracted: bool = False

    def unpack(self, coding: Coding, stored: Array) -> dict[str, Array]:
        """Take blocks [rows, blocks, bytes] apart, into the arrays that Coding.parts lists."""
        assert coding.block is not None, coding

        def values(fields: tuple[Bits, ...], size: int, offset: int = 0) -> Array:
            found: Array = np.zeros((*stored.shape[:2], (coding.block or 0) // size), UINT8)
            for item in fields:
                part = stored[..., item.first : item.first + item.count] >> item.right & item.mask
                found[..., item.to : item.to + item.count * item.stride : item.stride] |= part << item.left
            return (found + UINT8.type(offset % 256)).reshape(len(stored), -1)

        def half(first: int) -> Array:
            return np.ascontiguousarray(stored[..., first : first + 2]).view(FLOAT16)[..., 0]

        parts: dict[str, Array] = {"codes": values(self.codes, 1, self.code_offset)}
        if self.is_exponent:
            exponents = stored[..., self.scale].astype(INT32) - 128
            parts["scales"] = np.ldexp(FLOAT32.type(1.0), exponents).astype(BFLOAT16)
        else:
            parts["scales"] = half(self.scale)
        if self.min is not None:
            parts["mins"] = -half(self.min) if self.is_subtracted else half(self.min)
        if self.steps:
            parts["steps"] = values(self.steps, coding.group, self.step_offset).view(INT8)
        if self.step_mins:
            parts["step_mins"] = values(self.step_mins, coding.group)
        return parts


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A coded weight as a kernels.ops.RowSource: `read` gives its values in float32, `read_parts` its arrays.

    Attributes:
        parts: the arrays that Coding.parts lists, each readable in pieces. `order` is not by rows: it is read whole.
        form: None, or how `parts` has all of them in one array instead, `blocks` [rows, blocks, bytes of a block].
    """

    coding: Coding
    parts: Mapping[str, PartRows]
    form: BlockForm | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.form is None:
            return tuple(self.parts["codes"].shape)
        rows, blocks, _ = self.parts["blocks"].shape
        return rows, blocks * (self.coding.block or 0)

    def read_stored(self, start: int, stop: int) -> dict[str, Array]:
        """Read rows start .. stop-1 of every array in `parts`, and all of `order`."""
        return {
            name: as_array(part.read(0, part.shape[0]) if name == "order" else part.read(start, stop))
            for name, part in self.parts.items()
        }

    def read_parts(self, start: int, stop: int) -> dict[str, Array]:
        """Read rows start .. stop-1 of every array that Coding.parts lists, and all of `order`."""
        stored = self.read_stored(start, stop)
        return stored if self.form is None else self.form.unpack(self.coding, stored["blocks"])

    def read(self, start: int, stop: int) -> Array:
        """Decode the values of rows start .. stop-1, [stop - start, K] float32."""
        return decode(self.coding, self.read_parts(start, stop))

    def map_rows(self, change: Callable[[PartRows], PartRows]) -> "CodedRows":
        """Apply a change of the weight's rows (a permutation, a range) to every array that has rows."""
        changed = {name: part if name == "order" else change(part) for name, part in self.parts.items()}
        return replace(self, parts=changed)


def decode(coding: Coding, parts: Mapping[str, Array]) -> Array:
    """Compute the values of rows of a coded weight, [rows, K] float32, as the module docstring defines them.

    Each operation is rounded to float32: step times level is exact, then times scale, then plus mins * step_mins.
    """
    codes = parts["codes"]
    k = codes.shape[1]
    if coding.levels:
        values = np.asarray(coding.levels, FLOAT32)[codes]
    else:
        values = codes.astype(FLOAT32) - FLOAT32.type(coding.zero)
    if coding.steps:
        values *= _over_k(parts["steps"].astype(FLOAT32), coding.group, k)
    if coding.block is not None:
        values *= _over_k(parts["scales"].astype(FLOAT32), coding.block, k)
    if coding.mins:
        offsets = _over_k(parts["mins"].astype(FLOAT32), coding.block or k, k)
        if coding.step_mins:
            offsets = offsets * _over_k(parts["step_mins"].astype(FLOAT32), coding.group, k)
        values += offsets
    if coding.column_scales:
        values *= parts["column_scales"].astype(FLOAT32)[:, None]
    if coding.order:
        stored, values = values, np.empty_like(values)
        values[:, parts["order"]] = stored
    return values


def _over_k(values: Array, size: int, k: int) -> Array:
    """Repeat values [rows, ceil(k / size)] for each of their `size` elements of K: [rows, k]."""
    return np.repeat(values, size, axis=1)[:, :k]
