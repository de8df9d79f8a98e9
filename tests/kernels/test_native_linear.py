"""Products of any number of rows on any number of threads, at every instruction level."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.packed import KINDS, MAX_LEAVES, Native, Packed, levels, pack, rounded

FLOATS = ("f32", "bf16")
EPSILON = 2.0**-24  # half a unit in the last place of float32

Contexts = Callable[[int, int], Native]

pytestmark = pytest.mark.skipif(not levels(), reason="built without a C++ compiler")


@pytest.fixture(scope="module")
def contexts() -> Contexts:
    """(level, threads) -> a context, made once."""
    made: dict[tuple[int, int], Native] = {}

    def get(level: int, threads: int) -> Native:
        if (level, threads) not in made:
            made[level, threads] = Native(level, threads)
        return made[level, threads]

    return get


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 -> the values that a weight or an operand of this kind holds."""
    return values if kind == "f32" else rounded(values)


def random_weight(kind: str, seed: int, n: int, k: int, leaf_ends: list[int], gated: bool = False) -> Packed:
    """A weight of any kind, with all that belongs to it."""
    if kind in FLOATS:
        return pack(normal(seed, n, k), kind, leaf_ends=leaf_ends, bias=normal(seed + 1, n), gated=gated)
    random = np.random.default_rng(seed)
    if kind == "int8":
        values = random.integers(-127, 128, (n, k))
        scales = random.random(n).astype(np.float32)
        return pack(values, kind, leaf_ends=leaf_ends, slices=2, column_scales=scales, gated=gated)
    groups = sum(-(-length // 64) for length in np.diff([0, *leaf_ends]))
    return pack(
        random.integers(-8, 8, (n, k)), kind, leaf_ends=leaf_ends, slices=int(kind == "int4"), group_size=64,
        group_scales=random.random((n, groups)).astype(np.float32), gated=gated,
    )  # fmt: skip


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[left.dtype]
    assert torch.equal(left.view(integer), right.view(integer))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, int | bool | list[int]]:
    k = draw(st.integers(1, 400))
    cuts = draw(st.lists(st.integers(0, k), max_size=MAX_LEAVES - 1))
    return {
        "rows": draw(st.integers(1, 70)),
        "n": 2 * draw(st.integers(1, 350)),
        "k": k,
        "leaf_ends": [*sorted(cuts), k],
        "threads": draw(st.integers(1, 4)),
        "gated": draw(st.booleans()),
        "is_f32": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(case=cases())
def test_a_row_has_the_bits_it_has_alone(contexts: Contexts, kind: str, case: dict) -> None:
    """Guards against anything that lets a row see its batch: tiles, items, threads, its place, its neighbours."""
    rows, seed = case["rows"], case["seed"]
    dtype = torch.float32 if case["is_f32"] else torch.bfloat16
    packed = random_weight(kind, seed, case["n"], case["k"], case["leaf_ends"], case["gated"])
    x = torch.from_numpy(normal(seed + 2, rows, case["k"])).to(dtype)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    how = {"out_dtype": dtype, "activation": "silu" if case["gated"] else None}
    for level in levels():
        single, several = contexts(level, 1), contexts(level, case["threads"])
        alone = torch.cat([single.linear(packed, row[None], **how) for row in x])
        assert_same_bits(several.linear(packed, x[order], **how), alone[order])


@pytest.mark.parametrize("kind", FLOATS)
@settings(max_examples=30)
@given(case=cases())
def test_close_to_float64(contexts: Contexts, kind: str, case: dict) -> None:
    """Guards against a wrong panel, leaf, tile, bias or padding. Bound: k + 4 roundings of the sum of |x| |w|."""
    rows, n, k, seed = case["rows"], case["n"] - 1, case["k"], case["seed"]
    weight, bias, x = normal(seed, n, k), normal(seed + 1, n), normal(seed + 2, rows, k)
    packed = pack(weight, kind, leaf_ends=case["leaf_ends"], bias=bias)
    if not case["is_f32"]:
        x = stored(x, "bf16")
    wide_x, wide_weight = (stored(values, kind).astype(np.float64) for values in (x, weight))
    expected = wide_x @ wide_weight.T + bias
    bound = (k + 4) * EPSILON * (np.abs(wide_x) @ np.abs(wide_weight).T + np.abs(bias))
    given_x = torch.from_numpy(x) if case["is_f32"] else torch.from_numpy(x).bfloat16()
    for level in levels():
        out = contexts(level, case["threads"]).linear(packed, given_x).numpy()
        assert np.all(np.abs(out - expected) <= bound)


def portable_sum(x: np.ndarray, weight: np.ndarray, leaf_ends: list[int]) -> np.ndarray:
    """The order of products.h in numpy: a chain in each leaf, a multiplication and then an addition; then the tree."""
    sums = []
    for begin, end in zip([0, *leaf_ends[:-1]], leaf_ends, strict=True):
        total = np.zeros((len(x), len(weight)), dtype=np.float32)
        for at in range(begin, end):
            total = total + x[:, at, None] * weight[None, :, at]
        sums.append(total)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("leaf_ends", [[130], [7, 130], [10, 20, 20, 130], [1, 2, 66, 70, 70, 128, 129, 130]])
def test_the_portable_order_is_exact(contexts: Contexts, kind: str, leaf_ends: list[int]) -> None:
    """Guards against any other order of a sum, and against a multiply-add that rounds once where it should twice."""
    weight, x = stored(normal(1, 75, 130), kind), stored(normal(2, 20, 130), kind)
    out = contexts(0, 2).linear(pack(weight, kind, leaf_ends=leaf_ends), torch.from_numpy(x))
    assert np.array_equal(out.numpy(), portable_sum(x, weight, leaf_ends))


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_in_several_passes(contexts: Contexts, kind: str) -> None:
    """Guards against a pass, a group of tiles or the rest of them that reads or writes another one's rows."""
    rows, n, k = 700, 40, 8_000  # operands of 11 to 22 MB, over 8 tiles at any level
    packed = random_weight(kind, 3, n, k, [k])
    x = torch.from_numpy(normal(4, rows, k))
    some = [0, 5, 349, 350, 351, 690, 699]
    for level in levels():
        alone = torch.cat([contexts(level, 1).linear(packed, x[row : row + 1]) for row in some])
        assert_same_bits(contexts(level, 3).linear(packed, x)[some], alone)


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_nothing_is_written_past_the_result(contexts: Contexts, rows: int) -> None:
    """Guards against a last panel or a last tile that is written in full."""
    packed, x = pack(normal(1, 45, 70), "f32"), torch.from_numpy(normal(2, rows, 70))
    for level in levels():
        out = torch.full((rows + 1, 45), 7.0)
        native = contexts(level, 2)
        status = native.library.penstock_linear(
            native.context, packed.address, x.data_ptr(), 0, rows, out.data_ptr(), 45, 0, 0
        )
        assert status == 0
        assert torch.all(out[rows] == 7.0)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("columns", [64, 45])
def test_results_may_be_columns_of_a_wider_array(contexts: Contexts, kind: str, columns: int) -> None:
    """Guards against rows that are put as far apart as the weight is wide, also where a micro-kernel writes them itself
    and where rows take several passes."""
    packed, x = random_weight(kind, 1, columns, 3_000, [3_000]), torch.from_numpy(normal(2, 700, 3_000))
    for level in levels():
        native = contexts(level, 2)
        for rows, stride in ((3, 128), (700, 128), (40, 65)):
            wide = torch.full((rows, stride), 7.0)
            status = native.library.penstock_linear(
                native.context, packed.address, x.data_ptr(), 0, rows, wide.data_ptr(), stride, 0, 0
            )
            assert status == 0
            assert_same_bits(wide[:, :columns].contiguous(), native.linear(packed, x[:rows]))
            assert torch.all(wide[:, columns:] == 7.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_follows_every_kind_of_product(contexts: Contexts, kind: str) -> None:
    """Guards against sums that a micro-kernel writes to the result itself, past scales, bias and activation."""
    weight = random_weight(kind, 1, 64, 128, [128])
    weight.weight.bias = None
    x = torch.from_numpy(normal(2, 40, 128)) / 8
    for level in levels():
        native = contexts(level, 2)
        found, sums = (native.linear(weight, x, activation=activation) for activation in ("silu", None))
        torch.testing.assert_close(found, torch.nn.functional.silu(sums), rtol=1e-5, atol=1e-6)
        assert not torch.equal(found, sums)


def test_no_rows(contexts: Contexts) -> None:
    """Guards against a division by the number of tiles or passes."""
    packed = pack(normal(1, 32, 64), "bf16")
    assert contexts(0, 2).linear(packed, torch.empty(0, 64)).shape == (0, 32)


def test_the_same_bits_beside_a_busy_process(contexts: Contexts) -> None:
    """Guards against a result that depends on who took which item: one core is busy, so items are stolen."""
    packed, x = random_weight("bf16", 5, 2_000, 500, [500]), torch.from_numpy(normal(6, 30, 500))
    expected = [contexts(level, 1).linear(packed, x) for level in levels()]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        for _ in range(20):
            for level, result in zip(levels(), expected, strict=True):
                assert_same_bits(contexts(level, 3).linear(packed, x), result)
        busy.kill()


@pytest.mark.parametrize("shared", [True, False], ids=["one-context", "two-contexts"])
def test_callers_at_the_same_time(shared: bool) -> None:
    """Guards against two calls in the same scratch memory, and against anything global."""
    natives = [Native(0, 2)] * 2 if shared else [Native(0, 2), Native(0, 2)]
    packed = random_weight("f32", 7, 600, 300, [300])
    inputs = [torch.from_numpy(normal(seed, 9, 300)) for seed in (8, 9)]
    expected = [natives[0].linear(packed, x) for x in inputs]

    def repeat(at: int) -> None:
        for _ in range(100):
            assert_same_bits(natives[at].linear(packed, inputs[at]), expected[at])

    with ThreadPoolExecutor(2) as callers:
        list(callers.map(repeat, range(2)))
