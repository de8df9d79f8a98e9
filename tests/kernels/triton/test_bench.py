"""Benchmarks of GPUs and of the kernels for them, in Triton's interpreter, by a clock that is not a device's."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="an extra")

from penstock.cli.main import main
from penstock.errors import InvalidRequestError
from penstock.kernels.metadata import Heads
from penstock_lab.bench import attention, device, machine, ops, products
from penstock_lab.bench.samples import READ
from penstock_lab.planner.machines import load_hardware, this_file
from tests.kernels.triton.compare import DEVICE
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
