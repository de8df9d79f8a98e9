"""Products with float and int8 weights: against the reference, and the same bits from every kernel and every tile."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="an extra")

from penstock.kernels.ops import Packing, TensorRows
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.scheme import Scheme
from penstock.kernels.triton import configurations, products
from penstock.kernels.triton import packed as pieces
from penstock.kernels.triton.configurations import HOPPER, MANY, Tile, table_of
from penstock.kernels.triton.launch import architecture
from penstock.kernels.triton.packed import TritonLinear, pack
from penstock.kernels.triton.quantize import operand
from tests.kernels.triton import hardware
from tests.kernels.triton.compare import DEVICE, bits, close, draw, same_rows

BF16, F32 = torch.bfloat16, torch.float32
EIGHT = tuple(range(12, 97, 12))
MANY_ROWS = 26 if DEVICE == "cpu" else 130  # so many that `many_rows` multiplies them


def packed(weight: Tensor, bias: Tensor | None, packing: Packing, dtype: torch.dtype) -> TritonLinear:
    return pack(TensorRows(weight), bias, packing, dtype, DEVICE)


def product(x: Tensor, weight: TritonLinear, activation: str = "", dtype: torch.dtype = F32) -> Tensor:
    gated = weight.packing.gated
    out = torch.full((len(x), weight.shape[0] // (2 if gated else 1)), float("nan"), dtype=dtype)
    return products.product(operand(x, weight), weight, out, activation=activation, gated=gated)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_weights_in_pieces(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that are packed in another place, and, on a GPU, a buffer that is filled again too soon."""
    weight = draw(70, 64, dtype=BF16).cpu()
    packing = Packing(scheme=None if scheme is None else Scheme.parse(scheme, 32 if scheme == "int4" else None))
    whole = packed(weight, None, packing, BF16).state()
    monkeypatch.setattr(pieces, "SLICE_BYTES", 7 * 4 * 64)
    found = packed(weight, None, packing, BF16).state()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


# dtype, scheme, leaf ends, K, activation, gated, rows
CASES = [
    (BF16, None, (), 40, "", False, 3),
    (BF16, None, (), 40, "gelu", False, MANY_ROWS),  # many_rows, with tails everywhere
    (BF16, None, EIGHT, 96, "", False, 3),
    (BF16, None, tuple(range(32, 257, 32)), 256, "", False, MANY_ROWS),
    (BF16, None, (10, 40, 64), 64, "relu2", False, 3),  # leaves of three lengths
    (BF16, None, (), 40, "silu", True, 3),
    (BF16, None, (), 40, "clamped_silu", True, MANY_ROWS),
    (F32, None, (), 40, "gelu_tanh", True, 5),
    (F32, None, EIGHT, 96, "", False, MANY_ROWS),
    (BF16, "int8", (), 48, "silu", True, MANY_ROWS),
    (BF16, "int8", EIGHT, 96, "", False, 2),
    (BF16, "int8-x2", (10, 48), 48, "", False, 3),
    (F32, "int8-x3", (), 48, "", False, 7),
    (F32, "int8-x3", (32, 64), 64, "", False, MANY_ROWS // 2),
]


@pytest.mark.parametrize(("dtype", "scheme", "ends", "depth", "activation", "gated", "rows"), CASES)
def test_against_the_reference(
    dtype: torch.dtype, scheme: str | None, ends: tuple[int, ...], depth: int, activation: str, gated: bool, rows: int
) -> None:
    """Guards against a tail that is read or left out, a leaf in the wrong place, and a bias added after rounding."""
    weight, bias, x = draw(38, depth) * depth**-0.5, draw(38), draw(rows, depth, dtype=dtype)
    packing = Packing(ends, Scheme.parse(scheme), gated)
    ops = ReferenceOps(dtype, DEVICE)
    oracle = ops.pack_linear(weight, bias, packing)
    if gated:
        expected = ops.gated_linear(x, oracle, activation)
    else:
        expected = ops.activated_linear(x, oracle, activation) if activation else ops.linear(x, oracle)
    close(product(x, packed(weight, bias, packing, dtype), activation, expected.dtype), expected)


@pytest.mark.parametrize("scheme", [None, "int8-x2"])
def test_rows_are_independent(scheme: str | None) -> None:
    """Guards against a row that takes part in another row's scale or sum."""
    weight = packed(draw(20, 40), draw(20), Packing((), Scheme.parse(scheme)), BF16)
    same_rows(lambda x: product(x, weight), draw(19, 40, dtype=BF16))


def test_a_result_may_be_columns_of_a_wider_one() -> None:
    """Guards against a kernel that takes its own number of columns for the distance between rows."""
    weight, x, wide = (
        packed(draw(20, 40), None, Packing(), BF16),
        draw(MANY_ROWS, 40, dtype=BF16),
        torch.zeros(MANY_ROWS, 64),
    )
    for rows in (3, MANY_ROWS):
        products.product(operand(x[:rows], weight), weight, wide[:rows, 8:28])
        assert torch.equal(wide[:rows, 8:28], product(x[:rows], weight))
    assert not wide[:, :8].any()
    assert not wide[:, 28:].any()


RULES = [hardware.HOPPER, hardware.AMPERE]
if DEVICE != "cpu":
    RULES = RULES[:1] if architecture() >= 90 else RULES[1:]


@pytest.fixture
def table() -> Iterator[dict[str, configurations.Choices]]:
    """The table of configurations in use, to be changed."""
    found = table_of(architecture())
    before = dict(found)
    yield found
    found.update(before)
    hardware.use(hardware.HOPPER)


def tiles(rows: int) -> list[Tile]:
    """List small tiles of every depth for a number of rows, and on a GPU those of its table."""
    blocks = rows == MANY_ROWS
    of_tables = [tile for choices in HOPPER.values() for _, _, tile in choices]
    depths = sorted({tile.depth for tile in of_tables if tile.depth <= 128})
    found = [Tile(32 if blocks else 16, 16, depth, 4, 1, blocks) for depth in depths]
    if DEVICE != "cpu":
        names = "product", "product leaves", "product gated"
        used = {tile for name in names for _, _, tile in table_of(architecture())[name]}
        found += sorted((tile for tile in used if tile.blocks == blocks), key=str)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_no_tile_changes_bits(rule: hardware.Rule, table: dict[str, configurations.Choices]) -> None:
    """Guards against a sum that follows the tile: every depth in a table, few rows and many, give the same bits, which
    are those of the rule over whole leaves. On a GPU, also against a rule that is not the hardware's."""
    hardware.use(rule)
    weight, x = draw(16, 256), draw(MANY_ROWS, 256, dtype=BF16)
    left, right = x.float().cpu().numpy(), weight.to(BF16).float().cpu().numpy().T
    zeros = np.zeros((MANY_ROWS, 16), np.float32)
    for length in (256, 64):
        linear = packed(weight, None, Packing(tuple(range(length, 257, length))), BF16)
        parts = [slice(start, start + length) for start in range(0, 256, length)]
        sums = [torch.tensor(hardware.multiply(left[:, part], right[part], zeros, rule)) for part in parts]
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        for rows in (4, MANY_ROWS):
            for tile in tiles(rows):
                small = (4, MANY, configurations.SMALL)  # where a weight is not read as blocks
                table["product leaves"] = table["product"] = ((MANY, MANY, tile), small)
                assert torch.equal(bits(product(x[:rows], linear)), bits(sums[0][:rows])), (rows, tile, length)
