"""Products with coded weights: exact for integer levels, within rounding for others, on every level."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import NotSupportedError
from penstock.kernels.coding import CodedRows, Coding
from penstock.kernels.cpu.library import LEVELS
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.ops import Packing
from penstock.kernels.tensors import BFLOAT16, FLOAT32
from tests.kernels.coded import FORMATS, leaf_ends, of_type, product, random_rows
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="the native library is not built")
INTEGERS = [name for name, coding in FORMATS.items() if coding.is_integer]
FLOATS = [name for name in FORMATS if name not in INTEGERS]
K = {"AWQ": 1024, "FP8": 1024}


@pytest.fixture(scope="module")
def backends() -> list[CpuOps]:
    """Return one backend a level, the portable one first."""
    return [CpuOps(FLOAT32, level=LEVELS[level]) for level in levels()]


def activations(rows: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rows, k]).standard_normal((rows, k)).astype(np.float32)


def bits(result: np.ndarray) -> np.ndarray:
    return result.view(np.int32)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("leaves", [1, 8])
def test_integer_products_follow_the_definition(backends: list[CpuOps], name: str, leaves: int) -> None:
    """Guards against any other order, rounding or layout: short blocks, empty leaves, padded columns."""
    coding = FORMATS[name]
    for n, k in ((33, 544), (96, 1024)):
        weight, ends = random_rows(coding, n, k), leaf_ends(coding, k, leaves)
        for slices, rows in ((2, 1), (2, 5), (1, 3), (3, 2), (2, 33)):
            x = activations(rows, k)
            want = product(weight, x, ends, slices)
            for ops in backends:
                packed = ops.pack_linear(weight, None, Packing(ends, coding=coding, slices=slices))
                assert np.array_equal(bits(ops.linear(x, packed)), bits(want)), (n, k, slices, rows, ops.level)


def error_bound(weight: CodedRows, x: np.ndarray, ends: tuple[int, ...], slices: int) -> np.ndarray:
    """Return the bound of docs/quantization.md for each element of a product."""
    coding, (n, k) = weight.coding, weight.shape
    without_mins = CodedRows(replace(coding, mins=False, step_mins=False), weight.parts)
    values = without_mins.read(0, n).astype(np.float64)
    magnitudes = np.abs(values) + np.abs(weight.read(0, n) - values)
    if coding.order:  # leaves are made of stored columns
        order = weight.parts["order"].read(0, k)
        magnitudes, x = magnitudes[:, order], x[:, order]
    blocks = -(-k // coding.block) if coding.block else len(ends)
    rounding = 2.0**-24 * (np.abs(x) @ magnitudes.T)
    if not coding.is_integer:
        return ((coding.block or k) + blocks + 16) * rounding
    step = 254.0 ** (1 - slices) / 2 + 2.0**-16
    total = (2 * blocks * (2 if coding.mins else 1) + 16) * rounding
    for start, end in itertools.pairwise((0, *ends)):
        greatest = np.abs(x[:, start:end]).max(axis=1, keepdims=True, initial=0)
        total += greatest / 127 * step * magnitudes[:, start:end].sum(axis=1)
    return total


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("leaves", [1, 8])
def test_errors_are_within_the_documented_bound(backends: list[CpuOps], name: str, leaves: int) -> None:
    """Guards against wrong elements, and against another meaning of a format than that of `decode`."""
    coding = FORMATS[name]
    for n, k, rows, slices in ((33, 544, 1, 2), (96, 1024, 5, 1), (33, 544, 33, 2), (40, 1024, 2, 3)):
        weight, ends = random_rows(coding, n, k), leaf_ends(coding, k, leaves)
        x = activations(rows, k)
        want, bound = x @ weight.read(0, n).astype(np.float64).T, error_bound(weight, x, ends, slices)
        for ops in backends:
            packed = ops.pack_linear(weight, None, Packing(ends, coding=coding, slices=slices))
            assert np.all(np.abs(ops.linear(x, packed) - want) <= bound), (n, k, rows, ops.level)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_depends_on_itself_only(backends: list[CpuOps], name: str) -> None:
    """Guards against bits that depend on the number of rows, their order, the threads, or a row's place in its tile."""
    coding, n, k = FORMATS[name], 200, 1024
    weight, x = random_rows(coding, n, k), activations(200, k)
    order = np.random.default_rng(0).permutation(len(x))
    for ops in backends:
        packed = ops.pack_linear(weight, None, Packing(leaf_ends(coding, k, 3), coding=coding))
        together = bits(ops.linear(x, packed))
        alone = np.concatenate([bits(ops.linear(x[row : row + 1], packed)) for row in range(0, len(x), 7)])
        assert np.array_equal(together[::7], alone)
        assert np.array_equal(bits(ops.linear(x[order], packed)), together[order])
        two = CpuOps(FLOAT32, threads=2, level=ops.level)
        assert np.array_equal(bits(two.linear(x, packed)), together)


@pytest.mark.parametrize("name", INTEGERS)
def test_greatest_sums_do_not_overflow(backends: list[CpuOps], name: str) -> None:
    """Guards against sums that leave 16 or 32 bits: all codes, steps and operands are ends of their ranges."""
    coding, n, k = FORMATS[name], 40, 1024
    for seed in range(3):
        weight = random_rows(coding, n, k, seed, extreme=True)
        signs = np.random.default_rng(seed).choice([-1, 1], (6, k)).astype(np.float32)
        signs[0], signs[1] = 1, -1
        signs[2] = np.where(np.arange(k) % 2, 1, -1)
        want = product(weight, signs, (k,), 1)
        for ops in backends:
            packed = ops.pack_linear(weight, None, Packing(coding=coding, slices=1))
            assert np.array_equal(bits(ops.linear(signs, packed)), bits(want)), ops.level


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_are_looked_up_are_the_decoded_ones(backends: list[CpuOps], name: str) -> None:
    """Guards against another order of the operations, and against a row of another panel or leaf."""
    coding, n, k = FORMATS[name], 70, 800
    weight = random_rows(coding, n, k)
    ids = np.array([69, 0, 33, 16])
    for ops in backends:
        packed = ops.pack_linear(weight, None, Packing(leaf_ends(coding, k, 3), coding=coding))
        assert np.array_equal(bits(ops.packed_embedding(ids, packed)), bits(weight.read(0, n)[ids]))
        halved = ops.packed_embedding(ids, packed, scale=0.5)
        assert np.array_equal(bits(halved), bits(weight.read(0, n)[ids] * np.float32(0.5)))


@pytest.mark.parametrize("name", FORMATS)
def test_gates_and_experts_are_products_of_their_rows(backends: list[CpuOps], name: str) -> None:
    """Guards against the columns of a gate and its bias, against bfloat16 rows, and against mixed up experts."""
    coding, half, k = FORMATS[name], 40, 512
    ops = CpuOps(BFLOAT16, level=backends[-1].level)
    x = activations(5, k).astype(BFLOAT16)
    bias = activations(1, 2 * half)[0]
    gated = ops.pack_linear(weight := random_rows(coding, 2 * half, k), bias, Packing(gated=True, coding=coding))
    plain = ops.pack_linear(weight, bias, Packing(coding=coding))
    want = ops.linear(x, plain)
    gate = want[:, :half] / (1 + np.exp(-want[:, :half]))
    found = ops.gated_linear(x, gated, "silu").astype(np.float32)
    np.testing.assert_allclose(found, gate * want[:, half:], rtol=2**-7, atol=1e-6)
    activated = ops.activated_linear(x, plain, "silu").astype(np.float32)
    np.testing.assert_allclose(activated, want / (1 + np.exp(-want)), rtol=2**-7, atol=1e-6)

    inner, experts = 512, 3
    ups = [ops.pack_linear(random_rows(coding, 2 * inner, k, seed), None, Packing(gated=True, coding=coding))
           for seed in range(experts)]  # fmt: skip
    downs = [ops.pack_linear(random_rows(coding, k, inner, seed), None, Packing(coding=coding))
             for seed in range(experts)]  # fmt: skip
    ids, weights = np.array([[0, 2], [1, 2], [2, 0], [1, 0], [0, 1]]), np.full((5, 2), 0.5, np.float32)
    total = np.zeros((5, k), np.float32)
    for row in range(5):
        for expert in sorted(ids[row]):
            inside = ops.gated_linear(x[row : row + 1], ups[expert], "silu")
            total[row] += np.float32(0.5) * ops.linear(inside, downs[expert])[0]
    assert np.array_equal(bits(ops.experts(x, ups, downs, (ids, weights), "silu")), bits(total))


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_is_restored_from_its_state(backends: list[CpuOps], name: str) -> None:
    """Guards against an array that is not kept, and against memory that a plan does not know of."""
    coding, n, k = FORMATS[name], 70, 1024
    ops, x = backends[-1], activations(2, k)
    packing = Packing(leaf_ends(coding, k, 4), coding=coding)
    packed = ops.pack_linear(random_rows(coding, n, k), None, packing)
    again = ops.restore_linear((n, k), packed.state(), packing)
    assert np.array_equal(bits(ops.linear(x, again)), bits(ops.linear(x, packed)))
    assert ops.packed_bytes((n, k), packing) == packed.num_bytes
    stored = sum(part.tensor.nbytes * (coding.bits / 8 if part_name == "codes" else 1)
                 for part_name, part in random_rows(coding, 96, k).parts.items())  # fmt: skip
    assert packed.num_bytes <= stored * 1.01 + 2048


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_scales_of_every_type_are_exact(backends: list[CpuOps], scale_dtype: str) -> None:
    """Guards against subnormal and negative scales, which a conversion by shifting may lose."""
    coding = of_type(Coding("Q4_1", 4, mins=True), scale_dtype)
    weight = random_rows(coding, 32, 256)
    for name in ("scales", "mins"):
        array = weight.parts[name].tensor
        array.flat[:64] = np.array([2.0**-24, -(2.0**-20), 65504.0, -1.5]).repeat(16)  # half's ends
    x = activations(3, 256)
    want = product(weight, x, (256,), 2)
    for ops in backends:
        packed = ops.pack_linear(weight, None, Packing(coding=coding))
        assert np.array_equal(bits(ops.linear(x, packed)), bits(want))


def test_gated_rows_and_rows_in_pieces_are_packed_alike(
    backends: list[CpuOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a nibble, a high bit or a step that a later piece of the rows overwrites."""
    for coding in (FORMATS["Q5_K"], FORMATS["Q8_0"], FORMATS["GPTQ"]):
        weight = random_rows(coding, 200, 512)
        for ops in backends:
            for gated in (False, True):
                packing = Packing(gated=gated, coding=coding)
                whole = ops.pack_linear(weight, None, packing).state()
                with monkeypatch.context() as patch:
                    patch.setattr("penstock.kernels.cpu.packed.SLICE_BYTES", 1)
                    pieces = ops.pack_linear(weight, None, packing).state()
                for name, array in whole.items():
                    if name != "values":
                        assert np.array_equal(array, pieces[name]), name
                x = activations(3, 512)
                multiply = ops.gated_linear if gated else None
                results = [
                    multiply(x, item, "silu") if multiply else ops.linear(x, item)
                    for item in (ops.restore_linear((200, 512), state, packing) for state in (whole, pieces))
                ]
                assert np.array_equal(bits(results[0]), bits(results[1]))


def test_what_the_kernels_cannot_multiply_exactly_is_refused(backends: list[CpuOps]) -> None:
    """Guards against a wrong answer in place of an error."""
    ops = backends[-1]
    for coding, k in (
        (Coding("long", 8, 32, None, zero=128, column_scales=True), 2**18),
        (Coding("odd", 4, 24, 24), 240),
        (Coding("steps", 4, 64, 256, steps=True), 256),
        (Coding("levels", 8, levels=tuple(range(-128, 128))), 256),
        (Coding("curve", 8, levels=tuple(np.linspace(-1, 1, 256).tolist())), 256),
    ):
        with pytest.raises(NotSupportedError, match=coding.name):
            ops.packed_bytes((32, k), Packing(coding=coding))
    with pytest.raises(ValueError, match="cut blocks of 256"):
        ops.packed_bytes((32, 512), Packing((128, 512), coding=FORMATS["Q4_K"]))


def _spoilt(name: str, part: str, value: float) -> CodedRows:
    weight = random_rows(FORMATS[name], 32, 256)
    weight.parts[part].tensor.flat[5] = value
    return weight


def test_scales_and_levels_that_are_not_numbers_are_refused(backends: list[CpuOps]) -> None:
    """Guards against codes beyond a format's range, and against NaN that a conversion makes a number."""
    for weight in (
        _spoilt("Q4_0", "scales", np.inf),
        _spoilt("Q4_1", "mins", np.nan),
        _spoilt("Q4_0", "codes", 16),
        _spoilt("Q5_0", "codes", 32),
        _spoilt("FP8", "codes", 255),
        _spoilt("FP8", "scales", np.nan),
        _spoilt("FP8-E5M2", "codes", 0x7C),
        _spoilt("W4A16", "column_scales", np.nan),
    ):
        for ops in backends:
            with pytest.raises(ValueError, match=weight.coding.name):
                ops.pack_linear(weight, None, Packing(coding=weight.coding))
