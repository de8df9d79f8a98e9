"""`bench offline --profile` and its trace: the work of stretches between probes, and parts that add up to the steps."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import EngineConfig, EngineError
from penstock.assembly import build_engine
from penstock.cli.main import main
from penstock.interface.step import ScheduledRequest, SchedulerOutput
from penstock.kernels.cpu.library import load_library
from penstock_lab.bench import machine, meter
from penstock_lab.bench.costs import Cost, ModelCosts
from penstock_lab.bench.meter import CallMeter, Watch
from penstock_lab.bench.profile import ENGINE, RUNNER, Profile, ProfiledStep, Span, Stretch
from penstock_lab.bench.samples import Rates, Sample, Work
from tests.families.mixtral import CASES

GB = 10**9
needs_library = pytest.mark.skipif(load_library() is None, reason="no native library was built")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class FakeCosts:
    """Every call reads 1 GB."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        pass

    def call(self, name: str, arguments: Sequence[Any]) -> Cost:
        return Cost(name, Work(GB), name)

    def experts(self, read: int, rows: int) -> Work:
        return Work(read * GB)


def test_a_stretch_has_the_work_and_the_time_between_its_probes() -> None:
    """Guards against: time of probes that counts as the engine's, a step across two phases in one sample, a long step
    without probes inside, and work that is counted in the neighbour's stretch."""
    clock, stretches, rate, read = Clock(), list[Stretch](), iter((10.0, 20.0, 30.0, 40.0)), [0]
    watch = Watch(clock)

    def probe() -> Rates:
        clock.time += 5.0
        return {"read": next(rate)}

    calls = CallMeter(FakeCosts(), watch, probe=probe, expert_counts=lambda: (read[0], 0), keep=stretches.append)
    step = SchedulerOutput(0, [], [])
    calls.begin_step("prefill", step)
    calls.call("first", ())
    clock.time += 2 * meter.STRETCH_SECONDS
    calls.call("second", ())  # probes before it
    clock.time += 0.5 * meter.STRETCH_SECONDS
    read[0] = 3
    calls.begin_step("decode", step)  # probes before it
    calls.call("third", ())
    clock.time += meter.STRETCH_SECONDS
    calls.close()
    assert [item.phase for item in stretches] == ["prefill", "prefill", "decode"]
    seconds = [item.sample.seconds / meter.STRETCH_SECONDS for item in stretches]
    assert seconds == pytest.approx([2, 0.5, 1])
    assert [[cost.operation for cost in item.costs] for item in stretches] == [["first"], ["second"], ["third"]]
    assert [item.sample.work.read_bytes / GB for item in stretches] == [1, 1 + 3, 1]
    pairs = [(item.sample.before["read"], item.sample.after["read"]) for item in stretches]
    assert pairs == [(10, 20), (20, 30), (30, 40)]
    assert watch.now() == pytest.approx(3.5 * meter.STRETCH_SECONDS)


def profile_of_one_step() -> Profile:
    """A step of 10 ms: 1 ms in the engine, and kernels of 4, 1.5 and 0.5 ms in 7.5 ms of execution around a probe."""
    profile, rates = Profile(), {"read": 50.0, "bf16": 1000.0}
    linear = Cost("up_proj", Work(GB // 10, Counter({"bf16": GB})), "penstock_linear")
    norm = Cost("norm", Work(), "penstock_rms_norm")
    experts = Cost("experts", Work(), "penstock_experts")
    spans = [
        Span("penstock_attention_reserve", 100_000, 200_000),  # which is not an operation
        Span("penstock_linear", 1_000_000, 5_000_000),
        Span("penstock_limit_read", 5_000_000, 6_500_000),
        Span("penstock_rms_norm", 6_500_000, 8_000_000),
        Span("penstock_experts", 8_000_000, 8_500_000),
    ]
    sample = Sample(0.0085, linear.work, rates, rates)
    profile.add_stretch(Stretch("decode", sample, [linear, norm, experts], Work(GB // 100)), spans)
    profile.add_step(ProfiledStep("decode", 0, 1, (0.0, 0.0005, 0.0095, 0.01), 0.0085, 0.0075, 0.006))
    return profile


def test_parts_of_a_step_add_up() -> None:
    """Guards against a profile that loses time, counts the probe's, or takes one call's time for another's."""
    phases = profile_of_one_step().figures()
    rows = {row["operation"]: row for row in phases["decode"]["operations"]}
    seconds = {name: row["seconds"] for name, row in rows.items()}
    expected = {"up_proj": 0.004, "norm": 0.0015, "experts": 0.0005, RUNNER: 0.0015, ENGINE: 0.001}
    assert seconds == pytest.approx(expected)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["up_proj"]["bw_fraction"] == pytest.approx(0.1 / 50 / 0.004)
    assert rows["up_proj"]["flop_fraction"] == pytest.approx(1 / 1000 / 0.004)
    assert rows["norm"]["bw_fraction"] is None
    assert rows["experts"]["bw_fraction"] == pytest.approx(0.01 / 50 / 0.0005)


def test_a_call_without_a_time_is_an_error() -> None:
    """Guards against a profile that silently shifts times from one operation to the next."""
    rates = {"read": 50.0, "bf16": 1000.0}
    stretch = Stretch("decode", Sample(1.0, Work(), rates, rates), [Cost("norm", Work(), "penstock_rms_norm")], Work())
    with pytest.raises(EngineError, match="penstock_rms_norm"):
        Profile().add_stretch(stretch, [Span("penstock_linear", 0, 1)])


def nested(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (category, category around it) of each event, and check that no two overlap otherwise."""
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"] - 1e-3:
            around.pop()
        if around:
            assert event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"] + 1e-3
        yield event["cat"], around[-1]["cat"] if around else ""
        around.append(event)


def test_a_trace_is_nested(tmp_path: Path) -> None:
    """Guards against a trace that viewers refuse or draw as overlapping boxes."""
    file = tmp_path / "trace.json"
    profile_of_one_step().write_trace(file)
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(nested(events)) == [
        ("engine", "step"), ("engine", "step"), ("engine", "step"),
        ("kernel", "engine"), ("kernel", "engine"), ("kernel", "engine"), ("probe", "engine"), ("step", ""),
    ]  # fmt: skip


@needs_library
def test_a_run_of_a_mixture_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: operations that recorded steps leave out, experts without work, parts that do not add up to the
    steps' time, and calls that are counted more or less often than the model makes them."""
    monkeypatch.setattr(machine, "READ_BYTES", 2**24)
    monkeypatch.setattr(meter, "STRETCH_SECONDS", 0.002)
    _, directory = CASES[0].make(tmp_path)
    file, trace = tmp_path / "offline.json", tmp_path / "trace.json"
    command = ["bench", "offline", str(directory), "--kernels", "cpu", "--num-prompts", "2", "--input-len", "20"]
    assert main([*command, "--output-len", "6", "--profile", "--json", str(file), "--trace", str(trace)]) == 0
    result = json.loads(file.read_text())
    assert set(result["profile"]) == {"prefill", "decode"}
    for phase, figures in result["profile"].items():
        rows = {row["operation"]: row for row in figures["operations"]}
        steps = result[phase]["steps"]
        assert figures["steps"] == steps
        assert rows["qkv_proj"]["calls"] == rows["attention"]["calls"] == rows["experts"]["calls"] == 2 * steps
        assert rows["lm_head"]["calls"] == rows["sample"]["calls"] == steps
        assert rows["experts"]["read_bytes"] > 0
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
        assert figures["seconds"] == pytest.approx(result[phase]["seconds"])
        python = result[phase]["python_overhead_ms"] * steps / 1000
        low, median, high = result[phase]["python_ms_per_step"].values()
        assert 0 < low <= median <= high <= python * 1000
        assert rows[RUNNER]["seconds"] + rows[ENGINE]["seconds"] == pytest.approx(python, rel=0.02, abs=1e-4)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    found = Counter(nested(events))
    calls = sum(row["calls"] for figures in result["profile"].values() for row in figures["operations"])
    all_steps = sum(result[phase]["steps"] for phase in ("prefill", "decode"))
    assert found["kernel", "engine"] == calls - 2 * all_steps  # but the two rows of Python
    assert found["step", ""] == all_steps
    assert found["engine", "step"] == 3 * all_steps


@needs_library
def test_work_is_that_of_the_calls(tmp_path: Path) -> None:
    """Guards against bytes or operations of another layer, or of other numbers of rows, than those that ran."""
    built = build_engine(EngineConfig.from_options(model="demo", kernels="cpu"))
    costs = ModelCosts(built.model, built.model_config, built.config)
    layer = built.model.model.layers[0].self_attn.qkv_proj
    cost = costs.call("penstock_linear", (layer.packed[0].address, 0, 0, 7, 0, 0, 0, 0))
    n, k = layer.spec.shape
    assert (cost.operation, cost.work) == ("qkv_proj", Work(layer.packed[0].num_bytes, Counter(bf16=2 * 7 * n * k)))
    costs.begin_step(SchedulerOutput(0, [], [ScheduledRequest("a", 10, 2, [], [], 0)]))
    pairs, heads = 11 + 12, built.model_config.num_attention_heads * built.model_config.head_dim
    assert costs._attention[0].work.operations == {"bf16": 4 * pairs * heads}
