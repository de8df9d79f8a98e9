"""Targets for packed weights: packing, products, mixtures of experts, rows of a tied head."""

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np

from penstock.kernels.coding import Bits, BlockForm, Coding, decode
from penstock.kernels.cpu.library import ABI, PenstockWeight
from penstock.kernels.cpu.packed import KIND_INT8, CpuLinear, Layout, native_form
from penstock.kernels.ops import Packing
from penstock.kernels.scheme import GROUP_SIZES, SLICES, Scheme
from penstock.kernels.tensors import BFLOAT16, FLOAT32, INT64, NAMES, Array, ArrayType
from tools.fuzz_native.target import OK, OUT_OF_RANGE, TYPES, Fuzz, same_bits

NOT_QUANTISABLE = ABI.constants["STATUS_NOT_QUANTISABLE"]
ACTIVATIONS = {ABI.constants["ACT_NONE"]: lambda x: x, ABI.constants["ACT_SILU"]: lambda x: x / (1 + np.exp(-x))}
OTHER_ACTIVATIONS = [
    ABI.constants[f"ACT_{name}"] for name in ("GELU", "GELU_TANH", "CLAMPED_SILU", "RELU2", "RELU", "TANH")
]
CODINGS = (
    Coding("Q4_1", 4, mins=True),
    Coding("Q8_0", 8, zero=128),
    Coding("Q4_K", 4, 32, 256, steps=True, mins=True, step_mins=True),
    Coding("Q6_K", 6, 16, 256, zero=32, steps=True),
    Coding("table", 4, levels=tuple(range(-8, 8)), scale_dtype="bfloat16"),
    Coding("curve", 4, 64, 64, levels=tuple((np.linspace(-1, 1, 16) ** 3).tolist()), scale_dtype="float32"),
    Coding("columns", 4, 32, None, zero=8, column_scales=True),
)
INT4_CLIPS = 1.1  # factor on half a step as the error bound, because int4 may clip the largest weights of a group


@dataclass
class Weight:
    """A packed weight, the values that were packed [n, k], and the bias [n] or None."""

    linear: CpuLinear
    values: Array
    bias: Array | None

    def error(self, x: Array) -> Array:
        """Return a bound [rows, n] of the quantisation error of x [rows, k] times the weight."""
        layout, x, values = self.linear.layout, x.astype(np.float64), self.values.astype(np.float64)
        of_weight, of_x = np.zeros((1, layout.n)), np.zeros((len(x), 1))
        if not layout.slices and not layout.group_size:
            return of_weight * of_x
        squares = _squares(layout, values)
        of_x = np.zeros((len(x), layout.n))
        if layout.slices:
            for start, end in itertools.pairwise((0, *layout.leaf_ends)):
                step = np.abs(x[:, start:end]).max(axis=1, initial=0) / 127 / 2 / 254 ** (layout.slices - 1)
                of_x += step[:, None] * np.abs(values[:, start:end]).sum(axis=1) * 1.2
        return np.linalg.norm(x, axis=1)[:, None] * np.sqrt(squares) * INT4_CLIPS + of_x + 1e-3


def _squares(layout: Layout, values: Array) -> Array:
    """Return a bound [n] of the sum of squared errors in each row of a quantised weight."""
    if not layout.group_size:
        return layout.k * (np.abs(values).max(axis=1) / 127 / 2) ** 2 * 1.1
    squares = np.zeros(layout.n)
    for start, end in itertools.pairwise((0, *layout.leaf_ends)):
        for at in range(start, end, layout.group_size):
            group = values[:, at : min(at + layout.group_size, end)]
            top = np.abs(group).max(axis=1)
            squares += group.shape[1] * (top / 14) ** 2 + ((group * 2**-8) ** 2).sum(axis=1)
    return squares


def _layout(fuzz: Fuzz, n: int, k: int, dtype: ArrayType, *, gated: bool, scheme: Scheme | None) -> Layout:
    ends: tuple[int, ...] = ()
    if fuzz.chance(0.5):
        cuts = sorted(fuzz.random.randint(0, k) for _ in range(fuzz.random.randint(0, 7)))
        ends = (*cuts, k)
    return Layout.of((n, k), dtype, Packing(ends, scheme, gated))


def _scheme(fuzz: Fuzz) -> Scheme | None:
    name = fuzz.random.choice((None, None, *SLICES))
    size = fuzz.random.choice(GROUP_SIZES) if name is not None and name.startswith("int4") else None
    return Scheme.parse(name, size)


def _weight(fuzz: Fuzz, layout: Layout, dtype: ArrayType, *, bias: bool, poison: bool = False) -> Weight | None:
    """Pack random numbers in two parts, the second part first. Return None if they were rightly refused as poisoned."""
    values = fuzz.numbers.standard_normal((layout.n, layout.k)).astype(np.float32).astype(dtype)
    if poison:
        values[fuzz.random.randrange(layout.n), fuzz.random.randrange(layout.k)] = np.inf
    tensors = {name: fuzz.out(shape, element).values for name, (shape, element) in layout.arrays().items()}
    of_rows = None
    if bias:
        of_rows = fuzz.numbers.standard_normal(layout.n).astype(np.float32)
        columns = layout.columns()
        in_columns = np.where(columns < 0, np.float32(0), of_rows[np.maximum(columns, 0)])
        tensors["bias"] = fuzz.array(in_columns.astype(np.float32)).values
    linear = CpuLinear(layout, tensors)
    expected = NOT_QUANTISABLE if poison and layout.kind not in (0, 1) else OK
    cuts = [part.start for part in layout.parts()] + [layout.n]
    if fuzz.chance(0.5):
        cuts = sorted({*cuts, fuzz.random.randint(0, layout.n)})
    magnitudes = None
    if layout.kind == KIND_INT8 and not expected and fuzz.chance(0.3):  # as if this were a part of a wider weight
        magnitudes = fuzz.array(np.abs(values.astype(np.float32)).max(axis=1))
    for first, end in reversed(list(itertools.pairwise(cuts))):
        bad = expected and not np.isfinite(values[first:end].astype(np.float32)).all()
        rows = fuzz.array(values[first:end])
        status = expected if bad else OK
        fuzz.call("pack_rows", linear.address, rows, TYPES[dtype], first, end - first, magnitudes, expected=status)
    return None if expected else Weight(linear, values.astype(np.float32), of_rows)


def pack_rows(fuzz: Fuzz) -> None:
    """Pack a weight. Products with the rows of a unit matrix must return it as precisely as it is stored."""
    scheme, dtype, gated = _scheme(fuzz), fuzz.dtype(), fuzz.chance(0.3)
    n, k = fuzz.size(1, 129) * (2 if gated else 1), fuzz.size(1, 129)
    layout = _layout(fuzz, n, k, dtype, gated=gated, scheme=scheme)
    if (weight := _weight(fuzz, layout, dtype, bias=False, poison=fuzz.chance(0.3))) is None or gated:
        return
    unit, out = fuzz.array(np.eye(k, dtype=np.float32)), fuzz.out((k, n))
    fuzz.call("linear", weight.linear.address, unit, TYPES[FLOAT32], k, out, n, TYPES[FLOAT32], 0)
    unit_values = np.eye(k, dtype=np.float32)
    finite = np.isfinite(weight.values).all(axis=1)
    with np.errstate(all="ignore"):
        error = np.abs(out.values - weight.values.T)
        assert (error <= weight.error(unit_values) + 2**-7 * np.abs(weight.values.T))[:, finite].all(), "not the weight"


def pack_codes(fuzz: Fuzz) -> None:
    """Pack a coded weight in two parts, the second part first. Its rows must be those of `decode`, bit for bit."""
    coding = fuzz.random.choice(CODINGS)
    n, k = fuzz.size(1, 129), fuzz.size(1, 129)
    ends = (fuzz.random.randint(0, k) // (coding.block or 1) * (coding.block or 1), k) if fuzz.chance(0.5) else ()
    layout = Layout.of((n, k), FLOAT32, Packing(ends, coding=coding))
    parts: dict[str, Array] = {}
    for name, (shape, dtype) in coding.parts((n, k)).items():
        whole = {"codes": (0, 2**coding.bits), "steps": (-128, 128), "step_mins": (0, 256)}.get(name)
        values = fuzz.numbers.standard_normal(shape) if whole is None else fuzz.numbers.integers(*whole, shape)
        parts[name] = values.astype(NAMES[dtype])
    poisoned = "scales" in parts and fuzz.chance(0.3)
    if poisoned:
        parts["scales"][fuzz.random.randrange(n), 0] = np.inf
    linear = CpuLinear(layout, {name: fuzz.out(shape, kind).values for name, (shape, kind) in layout.arrays().items()})
    blocks, groups = (parts[name].shape[1] if name in parts else 0 for name in ("scales", "steps"))
    names = "codes", "scales", "mins", "steps", "step_mins", "column_scales"
    cut = fuzz.random.randint(0, n)
    for first, end in ((cut, n), (0, cut)):
        bad = poisoned and not np.isfinite(parts["scales"][first:end].astype(np.float32)).all()
        given = [fuzz.array(parts[name][first:end]) if name in parts else None for name in names]
        status = NOT_QUANTISABLE if bad else OK
        fuzz.call("pack_codes", linear.address, *given, blocks, groups, first, end - first, expected=status)
    if not poisoned:
        ids, out = fuzz.array(np.arange(n)), fuzz.out((n, k))
        fuzz.call("packed_embedding", ids, linear.address, n, 1.0, out)
        same_bits(out.values, decode(coding, parts))


def pack_blocks(fuzz: Fuzz) -> None:
    """Pack blocks of a random form in two parts, the second part first. Rows must be those of BlockForm.unpack."""
    coding = fuzz.random.choice([item for item in CODINGS if item.block and item.scale_dtype != "float32"])
    block, is_exponent = coding.block or 0, coding.scale_dtype == "bfloat16"
    size, n, blocks = fuzz.random.randint(8, 2 * block), fuzz.size(1, 129), fuzz.size(1, 5)
    form = BlockForm(
        _bits(fuzz, size, block, coding.bits),
        scale=fuzz.random.randint(0, 1),
        min=fuzz.random.randint(2, 4) if coding.mins else None,
        steps=_bits(fuzz, size, block // coding.group, 8) if coding.steps else (),
        step_mins=_bits(fuzz, size, block // coding.group, 8) if coding.step_mins else (),
        step_offset=fuzz.random.randint(-128, 127) if coding.steps else 0,
        is_exponent=is_exponent,
        is_subtracted=fuzz.chance(0.5),
    )
    layout = Layout.of((n, blocks * block), FLOAT32, Packing(coding=coding))
    stored = fuzz.numbers.integers(0, 256, (n, blocks, size), dtype=np.uint8)
    stored[..., :6] &= 0x77  # scales and mins are finite
    poisoned = not is_exponent and fuzz.chance(0.3)
    if poisoned:
        stored[fuzz.random.randrange(n), fuzz.random.randrange(blocks), form.scale : form.scale + 2] = 0xFF
    parts = form.unpack(coding, stored)
    linear = CpuLinear(layout, {name: fuzz.out(shape, kind).values for name, (shape, kind) in layout.arrays().items()})
    native, _ = native_form(form, size)
    cut = fuzz.random.randint(0, n)
    for first, end in ((cut, n), (0, cut)):
        finite = np.isfinite(parts["scales"][first:end].astype(np.float32)).all()
        given = fuzz.array(stored[first:end])
        status = OK if finite else NOT_QUANTISABLE
        fuzz.call("pack_blocks", linear.address, given, ctypes.addressof(native), first, end - first, expected=status)
    if not poisoned:
        ids, out = fuzz.array(np.arange(n)), fuzz.out((n, blocks * block))
        fuzz.call("packed_embedding", ids, linear.address, n, 1.0, out)
        same_bits(out.values, decode(coding, parts))


def _bits(fuzz: Fuzz, size: int, count: int, bits: int) -> tuple[Bits, ...]:
    """Take any bits of a block of `size` bytes, for some of `count` values of so many bits."""
    found = []
    for _ in range(fuzz.random.randint(1, 4)):
        length, stride, left = (
            fuzz.random.randint(1, min(size, count)),
            fuzz.random.randint(1, 4),
            fuzz.random.randrange(bits),
        )
        length = min(length, -(-count // stride))
        to = fuzz.random.randint(0, count - 1 - (length - 1) * stride)
        mask = 2 ** fuzz.random.randint(1, bits - left) - 1
        found.append(
            Bits(fuzz.random.randint(0, size - length), length, to, stride, fuzz.random.randrange(8), left, mask)
        )
    return tuple(found)


def linear(fuzz: Fuzz) -> None:
    scheme, dtype, gated = _scheme(fuzz), fuzz.dtype(), fuzz.chance(0.3)
    n, k = fuzz.size(1, 129) * (2 if gated else 1), fuzz.random.choice((fuzz.size(1, 129), fuzz.size(1)))
    weight = _weight(fuzz, _layout(fuzz, n, k, dtype, gated=gated, scheme=scheme), dtype, bias=fuzz.chance(0.5))
    assert weight is not None
    x = fuzz.floats(fuzz.random.choice((0, 1, 2, 3, 5, 13, 33)), k, dtype=fuzz.dtype()).values
    activation = fuzz.random.choice((*ACTIVATIONS, *ACTIVATIONS, *OTHER_ACTIVATIONS))  # as many as are compared
    rows, outputs, out_type = len(x), weight.linear.outputs if activation else n, fuzz.dtype()
    stride = outputs + fuzz.random.choice((0, 0, 1, 16))

    def compute(chosen: Array) -> Array:
        given, room = fuzz.array(x[chosen]), max(len(chosen) - 1, 0) * stride + min(len(chosen), 1) * outputs
        out = fuzz.out((room,), out_type)
        fuzz.call(
            "linear", weight.linear.address, given, TYPES[given.values.dtype], len(chosen), out, stride,
            TYPES[out_type], activation,
        )  # fmt: skip
        at = (np.arange(len(chosen)) * stride)[:, None] + np.arange(outputs)
        return out.values[at]

    found = fuzz.same_alone(compute, rows)
    if activation in ACTIVATIONS and (not gated or not activation):
        _compare(fuzz, weight, x, found, activation)


def _compare(fuzz: Fuzz, weight: Weight, x: Array, found: Array, activation: int) -> None:
    """Compare finite, moderate rows with a product in float64."""
    plain = (np.abs(x.astype(np.float32)) < 1e3).all(axis=1)
    layout, x = weight.linear.layout, x[plain].astype(np.float32)
    narrow = weight.linear.layout.kind in (ABI.constants["KIND_BF16"], ABI.constants["KIND_INT4_A16"])
    x = x.astype(BFLOAT16).astype(np.float64) if narrow else x.astype(np.float64)
    expected = x @ weight.values.T.astype(np.float64)
    expected = expected if weight.bias is None else expected + weight.bias
    size = np.abs(x) @ np.abs(weight.values.T)  # sums are rounded in float32
    bound = weight.error(x) + size * 1e-6 * np.sqrt(layout.k) + 2**-8 * np.abs(expected)
    with np.errstate(over="ignore"):
        right = ACTIVATIONS[activation](expected)
    error = np.abs(found[plain].astype(np.float64) - right)
    assert (error <= 1.2 * bound + 1e-2).all(), f"a product is off by {error.max()} where {bound.max()} is the bound"


def experts(fuzz: Fuzz) -> None:
    scheme, dtype, count = _scheme(fuzz), fuzz.dtype(), fuzz.random.choice((1, 2, 5))
    hidden, inner, rows = fuzz.size(1, 100), fuzz.size(1, 65), fuzz.rows()
    up = _layout(fuzz, 2 * inner, hidden, dtype, gated=True, scheme=scheme)
    down = _layout(fuzz, hidden, inner, dtype, gated=False, scheme=scheme)
    weights = [[_weight(fuzz, layout, dtype, bias=False) for _ in range(count)] for layout in (up, down)]
    arrays = [(PenstockWeight * count)(*(item.linear.weight for item in group if item)) for group in weights]
    top_k = fuzz.random.randint(1, count)
    x, shares = fuzz.floats(rows, hidden, dtype=dtype).values, fuzz.normal(rows, top_k).values
    (ids, expected), weighed = fuzz.ids(rows, top_k, limit=count), int(fuzz.chance(0.3))

    def compute(chosen: Array) -> Array:
        out = fuzz.out((len(chosen), hidden))
        fuzz.call(
            "experts", *map(ctypes.addressof, arrays), count, fuzz.array(x[chosen]), TYPES[dtype], len(chosen), top_k,
            fuzz.array(ids.values[chosen]), fuzz.array(shares[chosen]), ABI.constants["ACT_SILU"], weighed, out,
            expected=expected,
        )  # fmt: skip
        return out.values

    if expected:
        same_bits(compute(np.arange(rows)), np.zeros((rows, hidden)))  # refused before anything is written
    else:
        fuzz.same_alone(compute, rows)


def expert_counts(fuzz: Fuzz) -> None:
    counts = fuzz.out((2,), INT64)
    experts(fuzz)
    fuzz.library.penstock_expert_counts(fuzz.context, counts)
    assert 0 <= counts.values[0] <= counts.values[1], f"expert_counts: {counts.values}"


def packed_embedding(fuzz: Fuzz) -> None:
    n, k, dtype, rows = fuzz.size(1, 129), fuzz.size(1, 129), fuzz.dtype(), fuzz.rows()
    weight = _weight(fuzz, _layout(fuzz, n, k, dtype, gated=False, scheme=None), dtype, bias=False)
    assert weight is not None
    (ids, expected), out = fuzz.ids(rows, limit=n), fuzz.out((rows, k))
    fuzz.call("packed_embedding", ids, weight.linear.address, rows, 2.0, out, expected=expected)
    right = np.zeros((rows, k)) if expected == OUT_OF_RANGE else weight.values[ids.values] * np.float32(2)
    same_bits(out.values, right)


TARGETS = {
    "pack_rows": pack_rows, "pack_codes": pack_codes, "pack_blocks": pack_blocks, "linear": linear, "experts": experts,
    "expert_counts": expert_counts, "packed_embedding": packed_embedding,
}  # fmt: skip
