"""`penstock bench ops`: the JSON that CONTRACT names, and fractions of what was really measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import machine, ops
from penstock.cli.main import main
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.library import load_library

PEAKS = {  # what each type multiplies in, and how often
    "bf16": ("bf16_gflop_s", 1),
    "f32": ("f32_gflop_s", 1),
    "int8": ("int8_gop_s", 1),
    "int8-x2": ("int8_gop_s", 2),
    "int4": ("int8_gop_s", 1),
    "int4-a16": ("bf16_gflop_s", 1),
}
needs_library = pytest.mark.skipif(load_library() is None, reason="no native library was built")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rings and short turns: the figures mean nothing, but all code runs."""
    monkeypatch.setattr(ops, "RING_BYTES", 2**16)
    monkeypatch.setattr(ops, "LEAF_SHAPES", ((64, 256),))
    monkeypatch.setattr(ops, "ROUNDS", 2)
    monkeypatch.setattr(ops, "ROUND_SECONDS", 1e-3)
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(machine, "MULTIPLY_SECONDS", 1e-3)


@needs_library
def test_every_type_gives_a_row_with_all_fields(quick: None, tmp_path: Path) -> None:
    """Guards against: a field or a type of the contract that is missing, and a fraction of the wrong limit."""
    file = tmp_path / "ops.json"
    assert main(["bench", "ops", "--rows", "1", "3", "--shape", "64x256", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    limits = result["machine"]
    assert all(limits[name] > 0 for name in ("read_gb_s", "bf16_gflop_s", "f32_gflop_s", "int8_gop_s"))
    rows: list[dict[str, Any]] = result["rows"]
    order = [(dtype, leaves, m) for dtype in ops.DTYPES for leaves in (1, 8) for m in (1, 3)]
    assert [(row["dtype"], row["leaves"], row["m"]) for row in rows] == order
    fields = (
        "op",
        "dtype",
        "leaves",
        "m",
        "n",
        "k",
        "ms",
        "gb_s",
        "gflop_s",
        "bw_fraction",
        "flop_fraction",
        "torch_ms",
    )
    for row in rows:
        assert set(row) == set(fields)
        assert row["gflop_s"] == pytest.approx(2e-6 * row["m"] * 64 * 256 / row["ms"])
        assert row["bw_fraction"] == pytest.approx(row["gb_s"] / limits["read_gb_s"])
        name, times = PEAKS[row["dtype"]]
        assert row["flop_fraction"] == pytest.approx(times * row["gflop_s"] / limits[name])


def test_the_contract_is_covered() -> None:
    """Guards against: a shape, a type or a number of rows of the contract that is not measured."""
    cases = list(ops.Selection().cases())
    assert {dtype for _, _, dtype, _ in cases} == {"bf16", "f32", "int8", "int8-x2", "int4", "int4-a16"}
    shapes = {(2048, 2048), (5632, 2048), (2048, 5632), (14336, 4096), (4096, 14336), (32000, 2048)}
    assert {(n, k) for n, k, _, _ in cases} == shapes
    assert (4096, 14336, "bf16", 8) in cases
    assert ops.Selection().rows == (1, 2, 4, 8, 16, 32, 64, 128, 512)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dtype", {"dtypes": ["bf17"]}),
        ("rows", {"rows": [0]}),
        ("shape", {"shapes": [(0, 1)]}),
        ("shape", {"shapes": [(2**20, 2**20)], "dtypes": ["bf16"]}),  # more memory than there is
        ("shape", {"shapes": [(64, 70000)], "dtypes": ["int8"]}),
    ],
)
def test_a_wrong_selection_names_the_option(name: str, wrong: dict[str, Any]) -> None:
    """Guards against: a traceback, or an empty table, for a typing error."""
    with pytest.raises(InvalidRequestError) as caught:
        ops.Selection(**wrong)
    assert caught.value.param == name


def test_a_model_is_measured_by_its_own_shapes() -> None:
    """Guards against a model that is named and then not looked at."""
    shapes = ops.model_shapes("demo")
    assert (1024, 192) in shapes  # gate and up
    assert (4096, 192) in shapes  # the head
    assert len(shapes) == len(set(shapes))
