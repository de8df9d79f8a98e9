"""`penstock bench ops`: the JSON that CONTRACT names, and fractions of what was really measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import InvalidRequestError
from penstock.cli.main import main
from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import Heads
from penstock_lab.bench import attention, experts, machine, ops, products, report

PEAKS = {  # what each type multiplies in, and how often
    "bf16": ("bf16_gflop_s", 1),
    "f32": ("f32_gflop_s", 1),
    "int8": ("int8_gop_s", 1),
    "int8-x2": ("int8_gop_s", 2),
    "int4": ("int8_gop_s", 1),
    "int4-a16": ("bf16_gflop_s", 1),
}
needs_library = pytest.mark.skipif(load_library() is None, reason="no native library was built")


COMMON = {
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
    "times_torch",
    "samples",
    "unsettled",
    "spread",
    "fast",
    "slow",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, steady_limits: None) -> None:
    """Small rings, short turns and steady limits: the figures mean nothing, but all code runs."""
    monkeypatch.setattr(machine, "RING_BYTES", 2**16)
    monkeypatch.setattr(machine, "ROUNDS", 3)
    monkeypatch.setattr(machine, "ROUND_SECONDS", 1e-3)
    monkeypatch.setattr(products, "LEAF_SHAPES", ((64, 256),))
    monkeypatch.setattr(attention, "DECODE_TOKENS", 100)
    monkeypatch.setattr(attention, "LONG_TOKENS", 5000)
    monkeypatch.setattr(attention, "PREFILL_TOKENS", 130)
    monkeypatch.setattr(machine, "READ_BYTES", 2**23)
    monkeypatch.setattr(machine, "MULTIPLY_SECONDS", 1e-3)


@needs_library
def test_every_type_gives_a_row_with_all_fields(quick: None, tmp_path: Path) -> None:
    """Guards against: a field or a type of the contract that is missing, and a fraction of the wrong limit."""
    file = tmp_path / "ops.json"
    assert main(["bench", "ops", "--rows", "1", "3", "--shape", "64x256", "--op", "linear", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    limits = result["machine"]
    assert all(limits[name] > 0 for name in ("read_gb_s", "bf16_gflop_s", "f32_gflop_s", "int8_gop_s"))
    rows: list[dict[str, Any]] = result["rows"]
    order = [(dtype, leaves, m) for dtype in products.DTYPES for leaves in (1, 8) for m in (1, 3)]
    assert [(row["dtype"], row["leaves"], row["m"]) for row in rows] == order
    for row in rows:
        assert set(row) == COMMON
        assert (row["samples"], row["unsettled"]) == (3, 0)
        assert row["gflop_s"] == pytest.approx(2e-6 * row["m"] * 64 * 256 / row["ms"])
        assert row["bw_fraction"] == pytest.approx(row["gb_s"] / limits["read_gb_s"])
        name, times = PEAKS[row["dtype"]]
        assert row["flop_fraction"] == pytest.approx(times * row["gflop_s"] / limits[name])


@needs_library
def test_attention_gives_rows_with_all_fields(quick: None, tmp_path: Path) -> None:
    """Guards against: a field of the contract that is missing, bytes or operations that are not those of attention."""
    file = tmp_path / "ops.json"
    command = ["bench", "ops", "--op", "attend_decode", "attend_prefill", "--threads", "2", "--json", str(file)]
    assert main(command) == 0
    result = json.loads(file.read_text())
    limits, rows = result["machine"], result["rows"]
    extra = {"heads", "kv_heads", "head_dim", "seqs", "tokens", "threads", "slices", "key", "speedup"}
    assert all(set(row) == COMMON | extra for row in rows)
    shapes = [(row["op"], row["dtype"], row["heads"], row["kv_heads"], row["head_dim"], row["threads"]) for row in rows]
    decode = [(32, 4, 64), (32, 8, 128), (8, 1, 128)]
    expected = [("attend_decode", dtype, *heads, 2) for heads in decode for dtype in ("bf16", "int8")]
    long = [("attend_decode", dtype, 8, 1, 128, threads) for dtype in ("bf16", "int8") for threads in (2, 1)]
    assert shapes == expected + long + [("attend_prefill", "bf16", *heads, 2) for heads in decode[:2]]
    first, integers, prefill = rows[0], rows[1], rows[-2]
    assert first["gb_s"] == pytest.approx(8 * 100 * 4 * 64 * 2 * 2 / first["ms"] / 1e6)
    assert integers["gb_s"] == pytest.approx(8 * 100 * 4 * (64 * 2 + 16) / integers["ms"] / 1e6)
    assert first["gflop_s"] == pytest.approx(4 * 8 * 101 * 32 * 64 / first["ms"] / 1e6)
    assert prefill["gflop_s"] == pytest.approx(4 * 130 * 131 / 2 * 32 * 64 / prefill["ms"] / 1e6)
    assert first["flop_fraction"] == pytest.approx(first["gflop_s"] / limits["bf16_gflop_s"])
    assert integers["flop_fraction"] == pytest.approx(2 * integers["gflop_s"] / limits["int8_gop_s"])
    assert "split over spans" in rows[6]["key"]
    assert rows[6]["speedup"] == pytest.approx(rows[7]["ms"] / rows[6]["ms"])


@needs_library
def test_tables_fit_a_terminal(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against cells that are cut or wrapped at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, value in {"HIDDEN": 64, "INNER": 96, "COUNT": 5, "TOP_K": 2}.items():
        monkeypatch.setattr(experts, name, value)
    monkeypatch.setattr(machine, "RING_BYTES", 1)
    assert main(["bench", "ops", "--dtype", "int8-x2", "bf16", "--rows", "512", "--shape", "14336x64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    rows = [line for line in lines if line.startswith("int8-x2")]
    assert all(len(line.split()) == len(report.PRODUCTS) for line in rows)
    assert len(rows) == 1


@needs_library
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize(("cached", "new"), [(100, 1), (0, 70)])
def test_the_two_that_are_compared_compute_the_same(quick: None, dtype: str, cached: int, new: int) -> None:
    """Guards against: a fast kernel that attends to something else than torch does."""
    case = attention.AttentionCase("attend_decode", Heads(8, 2, 64), dtype, 3 if cached else 1, cached, new)
    ops = CpuOps(torch.bfloat16, threads=2)
    sequences = attention.SequencesUnderTest(case, ops)
    call, _ = sequences.call(ops)
    ours = call(sequences.caches[0]).view(case.seqs, new, 8, 64).transpose(1, 2)
    assert torch.allclose(ours.float(), sequences.torch_call(sequences.plain[0]).float(), atol=0.01)


def test_the_contract_is_covered() -> None:
    """Guards against: a shape, a type or a number of rows of the contract that is not measured."""
    cases = [case for case in ops.Selection().cases() if isinstance(case, products.ProductCase)]
    assert {case.dtype for case in cases} == {"bf16", "f32", "int8", "int8-x2", "int4", "int4-a16"}
    shapes = {(2048, 2048), (5632, 2048), (2048, 5632), (14336, 4096), (4096, 14336), (32000, 2048)}
    assert {(case.n, case.k) for case in cases} == shapes
    assert any((case.n, case.k, case.dtype, case.leaves) == (4096, 14336, "bf16", 8) for case in cases)
    assert ops.Selection().rows == (1, 2, 4, 8, 16, 32, 64, 128, 512)
    attends = [case for case in ops.Selection().cases() if isinstance(case, attention.AttentionCase)]
    sizes = {(case.op, case.seqs, case.cached, case.new) for case in attends}
    decode = {("attend_decode", 8, 4096, 1), ("attend_decode", 1, 32768, 1)}
    assert sizes == decode | {("attend_prefill", 1, 0, 4096)}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("op", {"ops": ["attend"]}),
        ("dtype", {"dtypes": ["bf17"]}),
        ("dtype", {"dtypes": ["int4"], "ops": ["attend_decode"]}),
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
    shapes, heads = ops.model_operands("demo")
    assert (1024, 192) in shapes  # gate and up
    assert (4096, 192) in shapes  # the head
    assert len(shapes) == len(set(shapes))
    assert heads == [Heads(6, 2, 32)]
