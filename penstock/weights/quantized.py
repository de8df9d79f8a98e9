"""Coded weights in safetensors files: AWQ, GPTQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes.

A checkpoint of these formats holds several tensors for each quantised weight. QuantizedCheckpoint presents them as one,
under the name of the float weight and with its shape, and gives its rows as CodedRows (kernels/coding.py). Tensors that
the quantiser left alone are what they are: floats. FORMATS has a row for each way of storing a weight. Which one a
weight has is seen from the tensors that stand beside its codes.

    format                  codes                      beside it                              value
    AWQ                     qweight [K, N/8] int32     qzeros, scales [K/g, N]                scale (code - zero)
    GPTQ, 2 to 8 bits       qweight [K bits/32, N]     qzeros, scales [K/g, N], g_idx [K]     scale (code - zero)
    pack-quantized          weight_packed              weight_scale [N, K/g], zero_point      scale (code - zero)
    int8, FP8               weight [N, K]              weight_scale: one, [N], blocks         scale level
    MXFP4, MXFP8            ..., two codes per byte    exponents per 32 elements              2^(e - 127) level
    NVFP4                   ..., two codes per byte    FP8 scales per 16, one for all         scale scale_2 level
    NF4, FP4                weight, two per byte       absmax per 64, itself quantised        absmax quant_map[code]
    LLM.int8                weight [N, K] int8         SCB [N]                                SCB / 127 code

Formats that store columns (AWQ, GPTQ) are read once per tensor and transposed while they are packed. Everything else is
read row by row.
"""

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from penstock.errors import ModelLoadError, shown
from penstock.kernels.coding import CODE_BITS, CodedRows, Coding, PartRows
from penstock.kernels.tensors import BFLOAT16, FLOAT16, FLOAT32, INT32, UINT8, Array
from penstock.spec.quantization import KEY, WHOLE_ROW, Quantization
from penstock.spec.text_part import IMAGE_TENSORS
from penstock.weights.rows import TransposedRows
from penstock.weights.safetensors import Checkpoint, FileRows, TensorEntry, num_bytes

SCALE_TYPES = ("F32", "F16", "BF16")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that nibble i holds
E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the format's numbers, so that they are integers
FP4_LEVELS = (*E2M1, *(-level for level in E2M1))
FP8_NUMBERS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
EXPONENTS = ("U8", "F8_E8M0")
FIRST_INVALID = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}  # from this code on, without its sign, they are not finite
NO_EXPONENT = 255  # not a number in E8M0
MAX_STATE = 2**16  # bytes of a quant_state


def _fp8_levels(dtype: str) -> tuple[float, ...]:
    """Return the number of every code; infinity for codes that are not finite, which no weight may have."""
    numbers = np.arange(256, dtype=np.uint8).view(FP8_NUMBERS[dtype]).astype(FLOAT32)
    return tuple(np.where(np.isfinite(numbers), numbers, np.inf).tolist())


FP8 = {
    dtype: Coding(dtype.replace("F8", "FP8"), 8, levels=_fp8_levels(dtype), scale_dtype="float32")
    for dtype in FP8_NUMBERS
}
MXFP4 = Coding("MXFP4", 4, levels=FP4_LEVELS, scale_dtype="bfloat16")
NVFP4 = Coding("NVFP4", 4, 16, 16, levels=FP4_LEVELS, column_scales=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a coded weight, computed piece by piece."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Array]


class Weight:
    """The tensors that hold one coded weight, or one slice of a stacked one, by their names in the row of FORMATS."""

    def __init__(self, name: str, entries: Mapping[str, TensorEntry], index: int | None, quantization: Quantization):
        self.name, self.quantization = name, quantization
        self.entries = {key: entry if index is None else entry.slice(index) for key, entry in entries.items()}

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def fail(self, key: str, allowed: str) -> ModelLoadError:
        """Return the error for a tensor of the wrong type or shape."""
        entry = self.entries[key]
        place = f"{entry.file.name}: the {key} of {self.name}"
        return ModelLoadError(f"{place} are {entry.dtype} {list(entry.shape)}; they must {allowed}")

    def dtype(self, key: str, *allowed: str) -> str:
        """Return the type of a tensor. Raise ModelLoadError if it is not an allowed one (default: a float)."""
        found, types = self.entries[key].dtype, allowed or SCALE_TYPES
        if found not in types:
            raise self.fail(key, f"be {' or '.join(types)}")
        return found

    def rows(self, key: str, *shape: int, of: str = "") -> FileRows:
        """Return a tensor of a type, with a shape; the file may have it flat, or with further axes of one element."""
        self.dtype(key, *([of] if of else []))
        entry = self.entries[key]
        found, wanted = ([size for size in given if size != 1] for given in (entry.shape, shape))
        if found != wanted and (len(found) > 1 or math.prod(found) != math.prod(wanted)):
            raise self.fail(key, f"have the shape {list(shape)}")
        return FileRows(self.name, replace(entry, shape=shape))

    def whole(self, key: str, count: int, of: str = "") -> Array:
        """Return all of a small tensor, flat."""
        return self.rows(key, count, of=of).read(0, count)

    def matrix(self, key: str, *types: str) -> tuple[int, int]:
        """Return the shape of a matrix of a type."""
        self.dtype(key, *types)
        shape = self.entries[key].shape
        if len(shape) != 2 or not math.prod(shape):
            raise self.fail(key, "be a matrix")
        return shape[0], shape[1]

    def columns(self, key: str) -> int:
        """Return the number of scales in each row; a file with one for each row may leave the axis out."""
        shape = self.entries[key].shape
        return shape[1] if len(shape) == 2 else 1

    def bits(self, found: int) -> int:
        """Check the width of a code, as seen from the tensors, against the configuration."""
        allowed = self.quantization.bits or range(2, 9)
        if found not in allowed:
            raise ModelLoadError(f"{self.name} has codes of {found} bits; its configuration says {list(allowed)}")
        return found

    def group(self, k: int, count: int) -> int:
        """Return the number of elements that share a scale, if there are `count` scales for k elements."""
        sizes = [size or k for size in self.quantization.groups] or [-(-k // max(count, 1))]
        for size in sizes:
            if -(-k // size) == count:
                return min(size, k)
        raise ModelLoadError(
            f"{self.name} has {count} scales for {k} elements; its configuration says groups of {sizes}"
        )


def _held(shape: tuple[int, ...], compute: Callable[[], Array]) -> Part:
    """Return an array that is computed whole when it is first read."""
    whole: Callable[[], Array] = functools.cache(compute)
    return Part(shape, lambda start, stop: whole()[start:stop])


def _changed(rows: PartRows, change: Callable[[Array], Array], columns: int) -> Part:
    """Return rows of another array, each changed."""
    return Part((rows.shape[0], columns), lambda start, stop: change(rows.read(start, stop)))


def _repeated(rows: PartRows, count: int, n: int) -> Part:
    """Return each row of another array `count` times, n rows in all."""

    def read(start: int, stop: int) -> Array:
        first = start // count
        values = np.repeat(rows.read(first, -(-stop // count)), count, axis=0)
        return values[start - first * count : stop - first * count]

    return Part((n, *rows.shape[1:]), read)


def _same(n: int, value: Callable[[], Array]) -> Part:
    """Return n times one number."""
    return _held((n,), lambda: np.full(n, value().item(), FLOAT32))


def unpack(words: Array, bits: int) -> Array:
    """Return the codes, uint8, of a stream of bits along the last axis: the lowest bits of a word come first."""
    packed = np.ascontiguousarray(words).view(UINT8)
    if bits == 8:
        return packed
    if 8 % bits:
        flags = np.unpackbits(packed, axis=-1, bitorder="little")
        flags = flags[..., : flags.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
        return np.packbits(flags, axis=-1, bitorder="little")[..., 0]
    shifts = np.arange(0, 8, bits, dtype=UINT8)
    return ((packed[..., None] >> shifts) & UINT8.type(2**bits - 1)).reshape(*packed.shape[:-1], -1)


def _width(bits: int) -> int:
    """Return the bits in which codes of so many bits are kept."""
    return next(width for width in CODE_BITS if width >= bits)


def _integers(name: str, bits: int, group: int, k: int, scale_dtype: str, *, symmetric: bool) -> Coding:
    """Choose how integers of K elements are kept, with their scales and, unless `symmetric`, zero points by group.

    What a zero point differs from the middle of the codes becomes a minimum. Times the scale, it takes up to 19 bits.
    """
    coding = Coding(name, _width(bits), group, group, 2 ** (bits - 1), scale_dtype=scale_dtype)
    if not symmetric:
        return replace(coding, mins=True, scale_dtype="float32")
    return coding if group < k else replace(coding, group=32, block=None, scale_dtype="float32", column_scales=True)


def _grouped(
    name: str, bits: int, group: int, parts: dict[str, PartRows], zeros: PartRows | None, order: Array | None = None
) -> CodedRows:
    """Make a weight from integer codes and their scales and zero points by group.

    parts: codes and scales, in the type of the file. zeros: None if it is always in the middle of the codes.
    """
    codes, scales = parts["codes"], parts["scales"]
    (n, k), count = codes.shape, scales.shape[1]
    coding = _integers(name, bits, group, k, str(scales.read(0, 0).dtype), symmetric=zeros is None)
    if coding.column_scales:
        parts = {"codes": codes, "column_scales": Part((n,), lambda a, b: _float32(scales.read(a, b)[:, 0]))}
    elif zeros is not None:
        kept = zeros

        def offsets(start: int, stop: int) -> Array:
            return (FLOAT32.type(coding.zero) - _float32(kept.read(start, stop))) * _float32(scales.read(start, stop))

        parts |= {"scales": _changed(scales, _float32, count), "mins": Part((n, count), offsets)}
    if order is None:
        return CodedRows(coding, parts)
    columns = order
    parts["codes"] = _changed(codes, lambda rows: rows[:, columns], k)
    parts["order"] = Part((k,), lambda start, stop: columns[start:stop])
    return CodedRows(replace(coding, order=True), parts)


def _float32(values: Array) -> Array:
    return values.astype(FLOAT32)


def _awq(weight: Weight) -> CodedRows:
    (k, words), (count, n) = weight.matrix("codes", "I32"), weight.matrix("scales")
    group, inverse = weight.group(k, count), np.argsort(AWQ_ORDER)
    turned = TransposedRows(weight.rows("codes", k, n // 8, of="I32"))

    def codes(start: int, stop: int) -> Array:
        first = start // 8
        nibbles = unpack(turned.read(first, -(-stop // 8))[..., None], weight.bits(4))  # [words, K, 8]
        rows = nibbles[..., inverse].transpose(0, 2, 1).reshape(-1, k)
        return rows[start - first * 8 : stop - first * 8]

    def zeros() -> Array:
        packed = weight.rows("zeros", count, words, of="I32").read(0, count)
        return unpack(packed, 4).reshape(count, words, 8)[..., inverse].reshape(count, n).T

    scales = TransposedRows(weight.rows("scales", count, n))
    return _grouped(
        "AWQ", weight.bits(4), group, {"codes": Part((n, k), codes), "scales": scales}, _held((n, count), zeros)
    )


def _gptq(weight: Weight) -> CodedRows:
    (words, n), (count, _), allowed = weight.matrix("codes", "I32"), weight.matrix("scales"), weight.quantization.bits
    k = math.prod(weight.entries["g_idx"].shape) if "g_idx" in weight else 32 * words // (allowed or (4,))[0]
    bits = weight.bits(32 * words // max(k, 1))
    if k * bits != 32 * words:
        raise weight.fail("codes", f"hold {k} codes of {bits} bits in each column")
    group, symmetric = weight.group(k, count), weight.quantization.symmetric
    turned = TransposedRows(weight.rows("codes", words, n, of="I32"))

    def read_zeros() -> Array:
        stored = unpack(weight.rows("zeros", count, n * bits // 32, of="I32").read(0, count), bits)
        found = ((stored + UINT8.type(weight.quantization.zero_offset)) & UINT8.type(2**bits - 1)).T
        if symmetric and bool((found != 2 ** (bits - 1)).any()):
            raise ModelLoadError(f"{weight.name} has zero points of its own, though {KEY} says sym = true")
        return found

    zeros = _held((n, count), read_zeros)

    def codes(start: int, stop: int) -> Array:
        if symmetric:
            zeros.read(0, 0)  # only to be checked
        return unpack(turned.read(start, stop), bits)

    parts: dict[str, PartRows] = {"codes": Part((n, k), codes)}
    parts["scales"] = TransposedRows(weight.rows("scales", count, n))
    return _grouped(f"GPTQ int{bits}", bits, group, parts, None if symmetric else zeros, _order(weight, k, group))


def _order(weight: Weight, k: int, group: int) -> Array | None:
    """Return the columns in the order of their groups; None if they are in this order already."""
    if "g_idx" not in weight:
        return None
    groups = weight.whole("g_idx", k, of="I32")
    order = np.argsort(groups, kind="stable").astype(INT32)
    if not np.array_equal(groups[order], np.arange(k) // group):
        raise ModelLoadError(f"{weight.name} has a g_idx that does not put {group} columns into each group")
    return None if np.array_equal(order, np.arange(k)) else order


def _packed(weight: Weight) -> CodedRows:
    """Read integers of compressed-tensors. Their zero points are packed along the rows."""
    n, words = weight.matrix("codes", "I32")
    k = int(weight.whole("shape", 2, of="I64")[1])
    bits = weight.bits(next((bits for bits in range(2, 9) if -(-max(k, 0) * bits // 32) == words), 0))
    count = weight.columns("scales")
    group = weight.group(k, count)
    codes = _changed(weight.rows("codes", n, words, of="I32"), lambda rows: unpack(rows, bits)[:, :k], k)

    def zeros() -> Array:
        packed = weight.rows("zeros", -(-n * bits // 32), count, of="I32")
        return unpack(packed.read(0, packed.shape[0]).T, bits)[:, :n].T

    held = _held((n, count), zeros) if "zeros" in weight else None
    return _grouped(
        f"int{bits}", bits, group, {"codes": codes, "scales": _scales(weight, n, count)}, held, _order(weight, k, group)
    )


def _scales(weight: Weight, n: int, count: int) -> PartRows:
    """Return scales [n, count], of which the file may have only one."""
    only = math.prod(weight.entries["scales"].shape) == 1
    return _repeated(weight.rows("scales", 1, 1), n, n) if only else weight.rows("scales", n, count)


def _int8(weight: Weight) -> CodedRows:
    n, k = weight.matrix("codes", "I8")
    count = weight.columns("scales")
    parts: dict[str, PartRows] = {"codes": _changed(weight.rows("codes", n, k, of="I8"), _biased, k)}
    parts["scales"], zeros = _scales(weight, n, count), None
    if "zeros" in weight:
        only = math.prod(weight.entries["zeros"].shape) == 1
        stored = weight.rows("zeros", *((1, 1) if only else (n, count)), of="I8")
        zeros = _repeated(_changed(stored, _biased, count), n if only else 1, n)
    return _grouped("int8", weight.bits(8), weight.group(k, count), parts, zeros)


def _biased(rows: Array) -> Array:
    """Return signed integers as codes whose middle is 128."""
    return rows.view(UINT8) ^ UINT8.type(128)


def _scb(weight: Weight) -> CodedRows:
    """LLM.int8 of bitsandbytes: each row has its largest absolute value."""
    n, k = weight.matrix("codes", "I8")
    weight.bits(8)
    if "layout" in weight and weight.whole("layout", 1, of="U8").item() != 0:
        raise ModelLoadError(f"{weight.name} is stored in the order of a GPU's tiles; save it again in rows")
    codes = _changed(weight.rows("codes", n, k, of="I8"), _biased, k)
    largest = weight.rows("scales", n, of="F32")
    columns = Part((n,), lambda start, stop: largest.read(start, stop) / FLOAT32.type(127))
    coding = Coding("LLM.int8", 8, block=None, zero=128, column_scales=True)
    return CodedRows(coding, {"codes": codes, "column_scales": columns})


def _fp8(weight: Weight) -> CodedRows:
    dtype = weight.entries["codes"].dtype
    n, k = weight.matrix("codes", dtype)
    weight.bits(8)
    stored = weight.rows("codes", n, k, of=dtype)

    def codes(start: int, stop: int) -> Array:
        rows = stored.read(start, stop)
        if bool(((rows & 0x7F) >= FIRST_INVALID[dtype]).any()):
            raise ModelLoadError(f"{weight.name} has values that are not finite")
        return rows

    shape = weight.entries["scales"].shape
    shape = shape[::2] if len(shape) == 4 else shape  # [N / 128, 1, K / 128, 1]
    coding = FP8[dtype]
    parts: dict[str, PartRows] = {"codes": Part((n, k), codes)}
    if [size for size in shape if size != 1] in ([], [n]):
        flat = weight.rows("scales", math.prod(shape))
        repeated = _repeated(flat, n if flat.shape[0] == 1 else 1, n)
        parts["column_scales"] = Part((n,), lambda start, stop: _float32(repeated.read(start, stop)))
        return CodedRows(replace(coding, block=None, column_scales=True), parts)
    if len(shape) != 2 or not 0 < shape[0] <= n or not 0 < shape[1] <= k:
        raise weight.fail("scales", "be one, or one for each row, or for each block")
    if weight.entries["scales"].dtype in EXPONENTS:
        exponents = weight.rows("scales", *shape, of=weight.dtype("scales", *EXPONENTS))
        scales = _changed(exponents, lambda rows: _power(weight.name, rows, 127), shape[1])
        coding = replace(coding, scale_dtype="bfloat16")
    else:
        scales = _changed(weight.rows("scales", *shape), _float32, shape[1])
    high, block = (_block(weight, axis, (n, k)[axis], shape[axis]) for axis in (0, 1))
    parts["scales"] = _repeated(scales, high, n)
    return CodedRows(replace(coding, group=block, block=block), parts)


def _block(weight: Weight, axis: int, size: int, count: int) -> int:
    """Return the size of blocks, `count` of which cover an axis: as configured, or else the power of 2 that fits."""
    given = [shape[axis] for shape in weight.quantization.blocks]
    sizes: list[int] = [*given, *(2**power for power in range(size.bit_length(), -1, -1))]
    fitting = [block for block in sizes if -(-size // block) == count]
    if not fitting:
        raise weight.fail("scales", f"cover {size} elements with blocks of one size")
    return min(fitting[0], size)


def _power(name: str, exponents: Array, bias: int) -> Array:
    """Return 2^(e - bias) in bfloat16, which has them all."""
    if bool((exponents == NO_EXPONENT).any()):
        raise ModelLoadError(f"{name} has scales that are not numbers")
    powers: Array = np.ldexp(FLOAT32.type(1), exponents.astype(INT32) - bias)
    return powers.astype(BFLOAT16)


def _mxfp4(weight: Weight) -> CodedRows:
    entry = weight.entries["codes"]
    if len(entry.shape) == 3 and entry.shape[2] == 16:  # [N, K / 32, 16]
        weight.entries["codes"] = replace(entry, shape=(entry.shape[0], 16 * entry.shape[1]))
    n, half = weight.matrix("codes", "U8")
    k = 2 * half
    weight.bits(4)
    codes = _changed(weight.rows("codes", n, half, of="U8"), lambda rows: unpack(rows, 4), k)
    stored = weight.rows("scales", n, k // 32, of=weight.dtype("scales", *EXPONENTS))
    scales = _changed(stored, lambda exponents: _power(weight.name, exponents, 128), k // 32)
    return CodedRows(MXFP4, {"codes": codes, "scales": scales})


def _nvfp4(weight: Weight) -> CodedRows:
    n, half = weight.matrix("codes", "U8")
    k = 2 * half
    weight.bits(4)
    codes = _changed(weight.rows("codes", n, half, of="U8"), lambda rows: unpack(rows, 4), k)
    stored = weight.rows("scales", n, k // 16, of="F8_E4M3")

    def scales(start: int, stop: int) -> Array:
        numbers = stored.read(start, stop).view(ml_dtypes.float8_e4m3fn).astype(FLOAT16)
        if not bool(np.isfinite(numbers).all()):
            raise ModelLoadError(f"{weight.name} has scales that are not numbers")
        halves: Array = numbers * FLOAT16.type(0.5)  # exact; E2M1 has twice the levels
        return halves

    def scale_2() -> Array:
        if "scale_2" in weight:
            return weight.whole("scale_2", 1)
        return FLOAT32.type(1) / _float32(weight.whole("divisor", 1))

    parts = {"codes": codes, "scales": Part((n, k // 16), scales), "column_scales": _same(n, scale_2)}
    return CodedRows(NVFP4, parts)


def _bnb4(weight: Weight) -> CodedRows:
    entry, codes_entry = weight.entries["state"], weight.entries["codes"]
    size = math.prod(entry.shape)
    if size > MAX_STATE:
        raise weight.fail("state", "be a short text")
    try:
        state = json.loads(weight.whole("state", size, of="U8").tobytes())
        n, k = (int(size) for size in state["shape"])
        block, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 256))
        offset, kind = float(state.get("nested_offset", 0)), str(state["quant_type"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ModelLoadError(f"{weight.name}: its quant_state cannot be read: {shown(str(error))}") from None
    if (
        min(n, k, block, nested) < 1
        or k % block
        or block % 2
        or kind not in ("nf4", "fp4")
        or not math.isfinite(offset)
    ):
        raise ModelLoadError(f"{weight.name}: its quant_state describes {kind} {n} x {k} in blocks of {block}")
    if num_bytes(codes_entry.shape, codes_entry.dtype) != n * k // 2:
        raise weight.fail("codes", f"be {n} x {k} codes of 4 bits")
    levels = tuple(weight.whole("quant_map", 16, of="F32").tolist())
    packed = FileRows(weight.name, replace(codes_entry, shape=(n, k // 2), dtype="U8"))
    parts: dict[str, PartRows] = {
        "codes": _changed(packed, lambda rows: unpack((rows >> 4) | (rows << 4), weight.bits(4)), k)
    }
    count = k // block
    if "nested_absmax" in weight:
        absmax = weight.rows("scales", n, count, of="U8")

        def scales(start: int, stop: int) -> Array:
            values = weight.whole("nested_quant_map", 256, of="F32")[absmax.read(start, stop)]
            outer = weight.whole("nested_absmax", -(-n * count // nested), of="F32")
            blocks = np.arange(start * count, stop * count).reshape(-1, count) // nested
            return values * outer[blocks] + FLOAT32.type(offset)

        parts["scales"] = Part((n, count), scales)
    else:
        parts["scales"] = weight.rows("scales", n, count, of="F32")
    if not all(map(math.isfinite, levels)):
        raise ModelLoadError(f"{weight.name} has a quant_map that is not finite")
    return CodedRows(Coding(kind.upper(), 4, block, block, levels=levels, scale_dtype="float32"), parts)


@dataclass(frozen=True, slots=True)
class Format:
    """One way in which a weight is stored.

    Suffixes are added to the name of the float weight; one that begins with a slash replaces ".weight".

    Attributes:
        methods: of Quantization, with which it occurs.
        codes: the suffix of the codes. dtypes: the types that they may have.
        beside: the suffixes of the other tensors, by their names in `build`; with "?" if they may be absent.
        build: makes the coded weight.
    """

    methods: str
    codes: str
    dtypes: str
    beside: Mapping[str, str]
    build: Callable[[Weight], CodedRows]

    def weight_of(self, name: str, entry: TensorEntry) -> str | None:
        """Return the name of the float weight whose codes a tensor may be."""
        suffix, end = (self.codes.replace("/", "."), ".weight") if "/" in self.codes else (self.codes, "")
        return name.removesuffix(suffix) + end if name.endswith(suffix) and entry.dtype in self.dtypes.split() else None

    def tensors(self, weight: str, codes: str, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return the tensors of a weight by their names in `build`; {} if one is missing."""
        found = {"codes": entries[codes]}
        for key, suffix in self.beside.items():
            name = _beside(weight, suffix.rstrip("?"))
            if name in entries:
                found[key] = entries[name]
            elif not suffix.endswith("?"):
                return {}
        return found


def _beside(weight: str, suffix: str) -> str:
    return f"{weight.removesuffix('.weight')}.{suffix[1:]}" if suffix[:1] == "/" else weight + suffix


COMMON = "compressed-tensors fp8 fbgemm_fp8 modelopt"
NUMBERS, BYTES = "F8_E4M3 F8_E5M2", "U8 F32 F16 BF16"
BNB = {"scales": ".absmax", "quant_map": ".quant_map"}
BNB |= {"nested_absmax": ".nested_absmax?", "nested_quant_map": ".nested_quant_map?"}
FORMATS = (
    Format("awq", "/qweight", "I32", {"zeros": "/qzeros", "scales": "/scales"}, _awq),
    Format("gptq", "/qweight", "I32", {"zeros": "/qzeros", "scales": "/scales", "g_idx": "/g_idx?"}, _gptq),
    Format(
        COMMON,
        "_packed",
        "I32",
        {"scales": "_scale", "shape": "_shape", "zeros": "_zero_point?", "g_idx": "_g_idx?"},
        _packed,
    ),
    Format(COMMON, "_packed", "U8", {"scales": "_scale", "divisor": "_global_scale"}, _nvfp4),
    Format(COMMON, "_packed", "U8", {"scales": "_scale"}, _mxfp4),
    Format(COMMON, "", NUMBERS, {"scales": "_scale"}, _fp8),
    Format(COMMON, "", NUMBERS, {"scales": "_scale_inv"}, _fp8),
    Format(COMMON, "", "I8", {"scales": "_scale", "zeros": "_zero_point?"}, _int8),
    Format(COMMON, "", "U8", {"scales": "_scale", "scale_2": "_scale_2"}, _nvfp4),
    Format("bitsandbytes", "", BYTES, BNB | {"state": ".quant_state.bitsandbytes__nf4"}, _bnb4),
    Format("bitsandbytes", "", BYTES, BNB | {"state": ".quant_state.bitsandbytes__fp4"}, _bnb4),
    Format("bitsandbytes", "", "I8", {"scales": "/SCB", "layout": "_format?"}, _scb),
    Format("mxfp4", "_blocks", "U8", {"scales": "_scales"}, _mxfp4),
)
# Tensors that hold no weights: how another engine rounds activations, and scales of a quantised key/value cache.
ROUNDING = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "k_zero_point", "v_zero_point", "kv_scale")


class QuantizedCheckpoint(Checkpoint):
    """The tensors of a model directory with coded weights, each under the name and with the shape of its floats."""

    def __init__(self, directory: Path, quantization: Quantization) -> None:
        """Find the coded weights.

        Raises:
            ModelLoadError: as Checkpoint; there is no coded weight, or the tensors of one do not fit together.
        """
        super().__init__(directory)
        self._quantization = quantization
        self._coded = self._find()
        if not self._coded:
            raise ModelLoadError(f"{directory}: none of its tensors has codes, though {KEY} says {quantization.method}")
        used = {id(entry) for _, tensors in self._coded.values() for entry in tensors.values()}
        unused = ROUNDING + KV_SCALES
        plain = {
            name: entry
            for name, entry in self.entries.items()
            if id(entry) not in used and name.rpartition(".")[2] not in unused
        }
        for name in self._coded:
            if name in plain:
                raise ModelLoadError(f"{directory}: {name} is stored twice, with codes and without")
        self.entries = plain | {name: self._entry(name) for name in self._coded}

    def rows(self, name: str, index: int | None = None) -> FileRows | CodedRows:
        """Return a tensor, or the slice `index` of a stacked one: CodedRows if it has codes, otherwise floats."""
        if name not in self._coded:
            return super().rows(name, index)
        found, tensors = self._coded[name]
        return found.build(Weight(name, tensors, index, self._quantization))

    def drop_zero_biases(self, known: Collection[str]) -> None:
        """Forget biases that are zero and not in `known`: early GPTQ files have them for layers without one."""
        for name in [name for name in self.entries if name.endswith(".bias") and name not in known]:
            entry = self.entries[name]
            if (
                name.removesuffix("bias") + "weight" in self._coded
                and not super().rows(name).read(0, entry.shape[0]).any()
            ):
                del self.entries[name]

    def _find(self) -> dict[str, tuple[Format, dict[str, TensorEntry]]]:
        """Return the format and the tensors of every coded weight."""
        formats = [item for item in FORMATS if self._quantization.method in item.methods.split()]
        result = {}
        for name, entry in self.entries.items():
            for item in formats if not IMAGE_TENSORS.match(name) else ():
                weight = item.weight_of(name, entry)
                tensors = {} if weight is None else item.tensors(weight, name, self.entries)
                if weight is not None and tensors:
                    result[weight] = item, tensors
                    break
        return result

    def _entry(self, name: str) -> TensorEntry:
        """Return the entry of a weight as if it were stored as floats: its type is the name of its coding."""
        found, tensors = self._coded[name]
        codes = tensors["codes"]
        stacked = codes.shape[:1] if len(codes.shape) > (3 if found.codes == "_blocks" else 2) else ()
        rows = self.rows(name, 0 if stacked else None)
        assert isinstance(rows, CodedRows)
        return TensorEntry(codes.file, (*stacked, *rows.shape), rows.coding.name, codes.offset)


def usual_coding(found: Quantization, k: int) -> Coding:
    """Guess the coding of weights with rows of K elements from their description, without their files."""
    bits, group = (found.bits or (4,))[0], min((found.groups or (WHOLE_ROW,))[0] or k, k)
    if not found.is_float:
        return _integers(f"int{bits}", bits, group, k, "float16", symmetric=found.symmetric)
    if bits == 4 and found.method == "bitsandbytes":
        return Coding("NF4", 4, group, group, levels=tuple(np.linspace(-1, 1, 16)), scale_dtype="float32")
    if bits == 4:
        return NVFP4 if group == 16 else MXFP4
    block = found.blocks[0][1] if found.blocks else None
    return replace(FP8["F8_E4M3"], block=block, group=block or 32, column_scales=block is None)
