"""How samples are taken: in turns, resumable, disturbed ones marked, failures as rows, slow ones ended."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import Limits
from benchmarks.process import WorkerError
from benchmarks.report import make_rows
from benchmarks.runner import Plan, Runner
from benchmarks.store import Store
from benchmarks.workloads import Workload
from tests.benchmarks.fakes import STEADY, FakeMachine, FakePeer, FakeWorkshop

WORK = Workload("W1", 1, 4, 8)
RUN = {"build": "penstock abc", "model": "tiny"}


def run(out: Path, shop: FakeWorkshop, machine: FakeMachine | None = None, **plan: Any) -> Store:
    store = Store(out, RUN)
    peers = [FakePeer(name) for name in reversed(shop.seconds)]
    works = plan.pop("workloads", [WORK])
    shape = Plan(works, threads=2, **{"rounds": 2, **plan})
    Runner(shape, peers, shop, store, machine or FakeMachine(), lambda *_: None).run()  # type: ignore[arg-type]
    return store


def test_engines_take_turns_and_stay_loaded(tmp_path):
    """Guards against engines measured minutes apart: each round has all of them, Penstock first."""
    shop = FakeWorkshop({"penstock": 1.0, "vllm": 2.0})
    run(tmp_path, shop)
    assert shop.log[:4] == ["penstock", "vllm", "penstock", "vllm"]
    assert shop.starts == {"penstock": 1, "vllm": 1}


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path):
    """Guards against samples that are lost or taken twice, and against a line that was cut while it was written."""
    run(tmp_path, FakeWorkshop({"penstock": 1.0, "vllm": 2.0}), rounds=1)
    file = tmp_path / "samples.jsonl"
    file.write_text(file.read_text(encoding="utf-8") + '{"sample": {"engi', encoding="utf-8")
    shop = FakeWorkshop({"penstock": 1.0, "vllm": 2.0})
    store = run(tmp_path, shop, rounds=2)
    assert [line for line in shop.log if "ended" not in line] == ["penstock", "vllm"]
    assert [sample["round"] for sample in store.samples] == [0, 0, 1, 1]
    assert Store(tmp_path, RUN).samples == store.samples


def test_samples_of_another_build_are_not_mixed(tmp_path):
    run(tmp_path, FakeWorkshop({"penstock": 1.0}))
    with pytest.raises(ValueError, match="another build"):
        Store(tmp_path, {**RUN, "build": "penstock def"})


def test_a_disturbed_sample_is_repeated_and_marked_if_it_stays_so(tmp_path):
    """Guards against figures that a neighbour made: the first sample is disturbed once, the second twice. And against a
    repeated prompt, which an engine that caches prefixes would not compute."""
    machine = FakeMachine(others_to_come=[1.0, 0.0, 1.0, 1.0])
    shop = FakeWorkshop({"penstock": 1.0})
    store = run(tmp_path, shop, machine)
    assert [sample["marks"] for sample in store.samples] == ["", "*"]
    assert len({str(prompts) for prompts in shop.prompts}) == 4


def test_a_sample_beside_moving_limits_is_marked(tmp_path):
    machine = FakeMachine(limits_to_come=[STEADY, Limits(30.0, 450.0, 1800.0)])
    assert [sample["marks"] for sample in run(tmp_path, FakeWorkshop({"penstock": 1.0}), machine).samples] == ["~", ""]


def test_an_engine_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    """Guards against a crash of the whole, and against an engine that is loaded in vain for every workload."""
    shop = FakeWorkshop({"penstock": 1.0, "vllm": WorkerError("RuntimeError: no kernel"), "openvino": 2.0})
    shop.broken.add("openvino")
    other = Workload("W3", 2, 4, 8)
    store = run(tmp_path, shop, workloads=[WORK, other])
    rows = make_rows(store, ["penstock", "vllm", "openvino"], [WORK, other])
    assert len(rows) == 4  # W1 in two figures, W3 and its memory
    for row in rows:
        assert row.cells["penstock"].samples == 2
        assert row.cells["vllm"].error == "RuntimeError: no kernel"
        assert row.cells["openvino"].error == "pip install: no such version"
        assert row.ratio is None
    assert shop.starts["vllm"] == 1
    assert shop.starts["openvino"] == 0


def test_an_engine_that_is_too_slow_is_ended_and_not_run_again(tmp_path):
    """The cap is a multiple of Penstock's own time, but not less than half a minute."""
    shop = FakeWorkshop({"penstock": 20.0, "vllm": 81.0, "openvino": 79.0})
    store = run(tmp_path, shop, patience=4.0)
    assert [one["cap"] for one in store.samples if one["engine"] == "vllm"] == [80.0]
    assert len([one for one in store.samples if one["engine"] == "openvino"]) == 2
    row = make_rows(store, ["penstock", "vllm", "openvino"], [WORK])[0]
    assert row.cells["vllm"].text() == "> 80 s"
    assert make_rows(store, ["penstock", "vllm"], [WORK])[0].ratio_text() == "> 4.00"
    assert shop.starts["vllm"] == 1


def test_the_time_limit_ends_rounds_but_not_the_first(tmp_path, monkeypatch):
    """Guards against a time limit that leaves out an engine of a round that was begun."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.runner.time.monotonic", lambda: now.__setitem__(0, now[0] + 10) or now[0])
    store = run(tmp_path, FakeWorkshop({"penstock": 1.0, "vllm": 2.0}), rounds=5, minutes=1)
    assert [(one["engine"], one["round"]) for one in store.samples][:2] == [("penstock", 0), ("vllm", 0)]
    assert len(store.samples) < 10


def test_the_engine_not_used_for_longest_makes_room(tmp_path):
    shop = FakeWorkshop({"penstock": 1.0, "vllm": 1.0})
    run(tmp_path, shop, FakeMachine(free=[250]), rounds=1)
    assert shop.log[:3] == ["penstock", "penstock ended", "vllm"]


def test_long_prompts_come_after_all_other_workloads(tmp_path):
    """Guards against a run with a time limit that never comes to the second type of weights."""
    store = Store(tmp_path, RUN)
    shop = FakeWorkshop({"penstock": 1.0})
    plan = Plan([Workload("W4", 1, 4, 8), Workload("W5", 1, 4, 8)], threads=2, rounds=1)
    peers = [FakePeer("penstock", ("bf16", "int8"))]
    Runner(plan, peers, shop, store, FakeMachine(), lambda *_: None).run()  # type: ignore[arg-type]
    order = [(one["workload"], one["precision"]) for one in store.samples]
    assert order == [("W5", "bf16"), ("W5", "int8"), ("W4", "bf16"), ("W4", "int8")]
