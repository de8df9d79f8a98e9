"""Mixtures of experts in the benchmarks: rows of `bench ops`, and the fractions of `bench offline`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import EngineConfig
from penstock.assembly import build_engine
from penstock.cli.main import main
from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.ops import CpuOps
from penstock_lab.bench import experts, machine, ops
from penstock_lab.bench.costs import ModelCosts
from penstock_lab.bench.experts import ExpertsCase, LayerUnderTest
from penstock_lab.bench.samples import Work
from tests.families.mixtral import CASES

pytestmark = pytest.mark.skipif(load_library() is None, reason="no native library was built")
TINY_CASE = {"HIDDEN": 64, "INNER": 96, "COUNT": 5, "TOP_K": 2}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, steady_limits: None) -> None:
    """Small weights, short turns and steady limits: the figures mean nothing, but all code runs."""
    monkeypatch.setattr(machine, "ROUNDS", 3)
    monkeypatch.setattr(machine, "ROUND_SECONDS", 1e-3)
    monkeypatch.setattr(machine, "READ_BYTES", 2**23)
    monkeypatch.setattr(machine, "MULTIPLY_SECONDS", 1e-3)
    for name, value in TINY_CASE.items():
        monkeypatch.setattr(experts, name, value)


def test_rows_count_what_was_chosen(quick: None, tmp_path: Path) -> None:
    """Guards against bytes of experts that nobody chose, and operations of a dense layer."""
    file = tmp_path / "ops.json"
    assert main(["bench", "ops", "--op", "experts", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows: list[dict[str, Any]] = result["rows"]
    assert [(row["dtype"], row["m"]) for row in rows] == [(dtype, m) for dtype in experts.DTYPES for m in experts.ROWS]
    for row in rows:
        assert row["gflop_s"] == pytest.approx(2e-6 * row["m"] * 2 * 3 * 64 * 96 / row["ms"])
        assert row["bw_fraction"] == pytest.approx(row["gb_s"] / result["machine"]["read_gb_s"])
        assert row["chosen"] == (2 if row["m"] == 1 else 5)
        assert row["torch_ms"] > 0
    # bfloat16: gate and up are [192, 64], down is [64, 96] in 8 leaves that are filled up to 64 each
    megabytes = 2e-6 * (192 * 64 + 64 * 8 * 64)
    assert {round(row["gb_s"] * row["ms"] / row["chosen"], 6) for row in rows[:5]} == {round(megabytes, 6)}


@pytest.mark.parametrize("dtype", experts.DTYPES)
def test_the_two_that_are_compared_compute_the_same(dtype: str) -> None:
    """Guards against: a fast kernel that is given other experts or weights than torch is."""
    layer = LayerUnderTest(ExpertsCase(64, 96, 5, 2, dtype, (7,)), CpuOps(torch.bfloat16, threads=2))
    ours, torchs, ring = layer.calls(7)
    for ids in (ring[0], ring[3]):
        expected = torchs(ids)
        assert torch.allclose(ours(ids), expected, atol=0.02 * float(expected.abs().max()))


def test_the_default_selection_measures_mixtral() -> None:
    """Guards against a table that leaves out what the documents' model does most."""
    cases = [case for case in ops.Selection(ops=["experts"]).cases() if isinstance(case, ExpertsCase)]
    assert {(case.hidden, case.inner, case.count, case.top_k) for case in cases} == {(4096, 14336, 8, 2)}
    assert {case.dtype for case in cases} == {"bf16", "int8"}
    assert all(set(case.rows) == {1, 8, 32, 128, 512} for case in cases)


@pytest.mark.covers("M18")
@pytest.mark.parametrize("quantization", [None, "int8-x2"])
def test_work_of_a_model_counts_chosen_experts(quantization: str | None, tmp_path: Path) -> None:
    """Guards against a fraction above 1 because all experts count as read, and against experts that count twice:
    once as products of the model, once as a mixture's."""
    _, directory = CASES[0].make(tmp_path)
    built = build_engine(EngineConfig.from_options(model=str(directory), kernels="cpu", quantization=quantization))
    costs = ModelCosts(built.model, built.model_config, built.config)
    block = built.model.model.layers[0].mlp
    packed = block.experts[0].gate_up_proj.packed[0].num_bytes + block.experts[0].down_proj.packed[0].num_bytes
    kind, passes = ("f32", 1) if quantization is None else ("int8", 2)
    assert costs.experts(3, 10) == Work(3 * packed, {kind: 10 * passes * 2 * 3 * 48 * 80})
    attention, router = 48 * (48 + 2 * 16) + 48 * 48, 8 * 48  # which is never quantised
    experts = {f"{name}_proj" for name in ("gate_up", "down")}
    body = [cost for cost in costs._products.values() if cost.operation not in {*experts, "lm_head"}]
    assert sum(cost.work.operations.total() for cost in body) == 2 * 2 * (passes * attention + router)


def test_fractions_of_a_run_include_experts(tmp_path: Path) -> None:
    """Guards against a figure that leaves out most of what the model reads."""
    _, directory = CASES[0].make(tmp_path)
    file = tmp_path / "offline.json"
    command = ["bench", "offline", str(directory), "--kernels", "cpu", "--json", str(file), "--num-prompts", "2"]
    assert main([*command, "--input-len", "20", "--output-len", "4", "--warmup", "0"]) == 0
    result = json.loads(file.read_text())
    assert 0 < result["decode"]["bandwidth_fraction"] < 1
    assert 0 < result["decode"]["compute_fraction"] < 1
