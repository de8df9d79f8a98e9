"""`penstock bench machine`: rates that settle, or are said not to, and a file that plans read."""

import re
from pathlib import Path

import pytest

from penstock import InvalidRequestError
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.tensors import BFLOAT16, FLOAT32
from penstock_lab.planner.machines import load_hardware, this_file
from penstock_lab.simulator import plan_check, this_machine
from penstock_lab.simulator.this_machine import MAX_ROUNDS, MIN_ROUNDS, measure_in_rounds, write_machine
from tests.kernels.packed import levels
from tests.lab.planner.test_plan import LLAMA, written

FIGURES = {
    "name": "this", "source": "measured here", "memory_bytes": 2**30, "read_bytes_per_s": {"other": 1e10},
    "operations_per_s": {"bfloat16": 7e10}, "rows_bytes_per_s": {"bfloat16": {8: 9e9}},
    "step_s": 0.001, "spread": {"read": [9e9, 1.1e10]},
}  # fmt: skip


def test_all_cases_take_turns_until_they_settle() -> None:
    """Guards against a case that is measured apart from the others, and a busy machine whose rates pass for settled."""
    order: list[str] = []
    steady, rising = iter([50.0] * 99), iter(float(2**number) for number in range(99))

    def sample(name: str, values) -> float:
        order.append(name)
        return next(values)

    found = measure_in_rounds({"a": lambda: sample("a", steady), "b": lambda: 3.0})
    assert not found.unsettled
    assert len(found.rates["a"]) == len(found.rates["b"]) == MIN_ROUNDS
    assert found.median("a") == 50.0
    order.clear()
    unsettled = measure_in_rounds({"a": lambda: sample("a", steady), "b": lambda: sample("b", rising)})
    assert list(unsettled.unsettled) == ["b"]
    assert order == ["a", "b"] * (1 + MAX_ROUNDS)


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against figures that a plan cannot read, and wrong ones that replace right ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = write_machine(FIGURES | {"unsettled": {}}, this_file())
    assert load_hardware("this") == written
    assert written.reading("int8") == 1e10
    assert written.rows_bytes_per_s == {"bfloat16": {8: 9e9}}
    with pytest.raises(InvalidRequestError, match="rows_bytes_per_s"):
        write_machine(FIGURES | {"rows_bytes_per_s": {"bfloat16": 9e9}, "unsettled": {}}, this_file())
    with pytest.raises(InvalidRequestError, match="operations_per_s"):
        write_machine(FIGURES | {"operations_per_s": {"bfloat16": 0.0}, "unsettled": {}}, this_file())
    assert load_hardware("this") == written
    assert [path.name for path in this_file().parent.iterdir()] == ["machine.yaml"]


@pytest.mark.skipif(not levels(), reason="no native library")
def test_predictions_stand_beside_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a check that compares other cases than it predicts, or cannot fail; and rates of attention that
    are of nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "PROMPT_LEN", 40)
    monkeypatch.setattr(this_machine, "CONTEXT", 40)
    cases = this_machine.attention_cases(CpuOps(FLOAT32, threads=1), CpuOps(BFLOAT16, threads=1))
    assert len(cases) == 6
    assert all(case() > 0 for case in cases.values())
    write_machine(FIGURES | {"operations_per_s": {"other": 1e6}, "unsettled": {}}, this_file())
    words = [written(tmp_path / "m", LLAMA), "--quantization", "none", "--rounds", "1", "--hardware", "this"]
    assert plan_check.main([*words, "--streams", "1", "3", "--prompt-len", "20"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("predicted")[0].split(maxsplit=1)[1].strip() for line in lines[:-1]] == [
        "a step of 1 streams", "a step of 3 streams", "first token after 20",
    ]  # fmt: skip
    assert lines[-1].startswith("median ")


def test_a_prediction_is_the_mean_of_the_rates_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rates of minutes ago, which make a right prediction wrong on a machine whose speed changes."""
    rates = iter([1e5, 5e4])
    monkeypatch.setattr(
        plan_check, "measure_machine",
        lambda: FIGURES | {"operations_per_s": {"other": next(rates)}, "unsettled": {"read": 0.5}, "step_s": 0.0},
    )  # fmt: skip
    words = [written(tmp_path / "m", LLAMA), "--quantization", "none", "--rounds", "1", "--streams"]
    plan_check.main([*words, "--prompt-len", "20"])
    mean, low, high = map(float, re.findall(r"[0-9.]+", capsys.readouterr().out.split("predicted")[1])[:3])
    assert high == pytest.approx(2 * low, rel=0.01)
    assert mean == pytest.approx((low + high) / 2, rel=0.01)
    assert next(rates, None) is None
