"""Benchmarks of GPUs and of the kernels for them, in Triton's interpreter, by a clock that is not a device's."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="an extra")

from penstock import EngineConfig, SamplingParams
from penstock.assembly import BuiltEngine, build_engine
from penstock.cli.main import main
from penstock.engine.observer import EngineObserver
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineRequest
from penstock.interface.step import SchedulerOutput
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import Heads
from penstock_lab.bench import attention, device, machine, meter, ops, products
from penstock_lab.bench.costs import ModelCosts
from penstock_lab.bench.samples import READ, Work
from penstock_lab.planner.machines import load_hardware, this_file
from tests.hf_models import random_ids
from tests.kernels.packed import levels
from tests.kernels.triton.compare import DEVICE
from tests.kernels.triton.test_engine import made
from tests.lab.bench.test_forms import silent

TICK = 2.0**-10  # seconds that everything takes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "elapsed", lambda place, work: (work(), TICK)[1])
    for module, sizes in (
        (device, {"COPIED_BYTES": 2**12, "SIDE": 32, "CALIBRATIONS": 1}),
        (machine, {"RING_BYTES": 2**12, "ROUNDS": 2}),
        (attention, {"DECODE_SEQS": 2, "DECODE_TOKENS": 3, "LONG_TOKENS": 3, "LONG_HEADS": Heads(2, 1, 16)}),
        (products, {"LEAF_SHAPES": ()}),
        (meter, {"STRETCH_SECONDS": 600.0}),  # one for each phase
    ):
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.skipif(DEVICE != "cpu", reason="a clock of its own")
def test_kernels_beside_the_limits(small: None) -> None:
    """Guards against figures per ring instead of per call, a copy that counts once, and kernels of the CPU."""
    types = ("bf16", "int8")
    chosen = ops.Selection(("linear", "attend_decode"), types, (2,), ((16, 32),), [Heads(2, 1, 16)], device="cuda")
    found = ops.measure_ops(chosen, progress=silent)
    limits = found["machine"]
    assert limits["level"] == "Triton's interpreter"
    assert limits["read_gb_s"] == 2 * 2**12 / TICK / 1e9
    assert limits["bf16_gflop_s"] == 2 * 32**3 / TICK / 1e9
    rows = {(row["op"], row["dtype"], row.get("kv_heads")): row for row in found["rows"]}
    assert len(rows) == 2 + 2
    ring = 2**12 // (16 * 32 * 2) + 1
    row = rows["linear", "bf16", None]
    assert row["ms"] == 1e3 * TICK / ring
    assert row["gb_s"] == pytest.approx(16 * 32 * 2 * ring / TICK / 1e9)
    assert row["bw_fraction"] == pytest.approx(row["gb_s"] / limits[machine.FIGURES[READ]])
    assert rows["attend_decode", "int8", 1]["slices"] == 2
    with pytest.raises(InvalidRequestError, match=r"dtype: .*left out with device = cuda"):
        ops.Selection(dtypes=("q4_0",), device="cuda")


class Counted(EngineObserver):
    """The plans of an engine's steps, and the work of the native calls that compute them."""

    def __init__(self, built: BuiltEngine) -> None:
        self.costs = ModelCosts(built.model, built.model_config, built.config)
        self.plans, self.work = list[SchedulerOutput](), list[Work]()
        cast(CpuOps, built.ops).observer = self
        built.engine.observe(self)

    def submitting(self, plan: SchedulerOutput) -> None:
        self.costs.begin_step(plan)
        self.plans.append(plan)
        self.work.append(Work())

    def call(self, name: str, arguments: Any) -> None:
        self.work[-1].add(self.costs.call(name, arguments).work)

    def replay(self, calls: Any) -> None:
        for cost in self.costs.replay(calls):
            self.work[-1].add(cost.work)


SIZES = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 96, "num_attention_heads": 4, "head_dim": 128}
SIZES |= {"num_hidden_layers": 3}


@pytest.mark.skipif(not levels(), reason="no native library")
@pytest.mark.parametrize(("family", "options"), [
    ("llama", {}), ("gemma2", {}), ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}), ("mixtral", {}),
])  # fmt: skip
def test_a_step_counts_what_native_calls_count(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Guards against shares of a GPU's limits for other work than the CPU's: a head for every row, a window that ends
    nowhere, or layers that count once. Which experts a step reads is not known on a GPU, only how many products."""
    _, directory = made(family, tmp_path, **SIZES)
    fixed = {"model": str(directory), "dtype": "float32", "max_model_len": 160, "max_num_batched_tokens": 48} | options
    native = build_engine(EngineConfig.from_options(**fixed, kernels="cpu"))
    counted = Counted(native)
    for index, length in enumerate((70, 5)):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        native.engine.add_request(EngineRequest(str(index), random_ids(length, index, 96), params))
    while native.engine.has_work:
        native.engine.step()
    built = build_engine(EngineConfig.from_options(**fixed, kernels="triton"))
    costs = ModelCosts(built.model, built.model_config, built.config)
    found = [costs.step(plan).work for plan in counted.plans]
    if family == "mixtral":
        mixtures, _, chosen = costs._mixtures
        assert found[0].read_bytes > found[-1].read_bytes > 0
        for plan, work in zip(counted.plans, counted.work, strict=True):
            work.add(counted.costs.experts(0, mixtures * plan.num_tokens * chosen))
        assert [work.operations for work in found] == [work.operations for work in counted.work]
    else:
        assert found == counted.work


@pytest.mark.skipif(DEVICE != "cpu", reason="a clock of its own")
def test_steps_beside_the_limits(small: None, tmp_path: Path) -> None:
    """Guards against a run that compares a GPU with nothing, or each step with another one's work, and against an
    overhead of Python, which nobody times there."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    _, directory = made("llama", tmp_path, **sizes)
    file = tmp_path / "offline.json"
    command = ["bench", "offline", str(directory), "--kernels", "triton", "--max-model-len", "128", "--json", str(file)]
    assert main([*command, "--num-prompts", "2", "--input-len", "5", "--output-len", "3", "--warmup", "0"]) == 0
    result = json.loads(file.read_text())
    assert result["machine"]["read_gb_s"] == 2 * 2**12 / TICK / 1e9
    for phase, tokens in (("prefill", 10), ("decode", 4)):
        figures = result[phase]
        stretches = figures["stretches"]["spread"]
        layers = 2 * (3 * 16 * 16 + 16 * 16 + 3 * 16 * 32)
        floats = tokens * layers + 2 * 16 * 67 * 2 * figures["steps"]
        least = figures["compute_fraction"] * figures["seconds"] * result["machine"]["f32_gflop_s"] * 1e9
        assert 0.7 * floats < least < 1.5 * floats
        assert stretches["bw_fraction"]["p50"] > 0
        assert figures["python_overhead_fraction"] is figures["python_overhead_ms"] is None
    assert set(result["reason"]) == {"python_overhead_fraction"}


@pytest.mark.skipif(DEVICE != "cpu", reason="a clock of its own")
def test_a_plan_for_what_was_measured(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against rates in 10^9 per second, a GPU's file in the place of this machine's, and a plan for a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "machine", "--device", "cuda:1"]) == 0
    assert "float32" in capsys.readouterr().out
    assert [path.name for path in this_file().parent.iterdir()] == ["cuda-1.yaml"]
    measured = load_hardware(str(this_file("cuda:1")))
    assert measured.kernels == "triton"
    assert measured.read_bytes_per_s == {"other": 2 * 2**12 / TICK}
    assert measured.operations_per_s == dict.fromkeys(("float32", "bfloat16", "int8"), 2 * 32**3 / TICK)
    assert main(["plan", "demo", "--json", "--hardware", str(this_file("cuda:1"))]) == 0
    assert "scratch" in capsys.readouterr().out  # memory between kernels, which only GPUs have
    for arguments, said in ((["--device", "cuda", "--threads", "2"], "threads:"), (["--device", "gpu"], "device:")):
        assert main(["bench", "machine", *arguments]) == 2
        assert said in capsys.readouterr().err
