"""Simulated replicas on hardware that is not here: their steps cost what a plan predicts, their cache is what fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import EngineConfig, InvalidRequestError
from penstock.cli.main import main
from penstock_lab.planner.costs import Products, UniformBatch, decode_time, step_time
from penstock_lab.planner.fit import Budget
from penstock_lab.planner.machines import load_hardware
from penstock_lab.simulator.costs import Shape
from penstock_lab.simulator.elsewhere import HardwareCosts, plan_replica
from tests.lab.planner.test_plan import GIB, LLAMA, MACHINE, WORK, asked, needs_library, written


@pytest.mark.parametrize("windows", [((2, None),), ((1, None), (1, 40))])
def test_steps_cost_what_is_planned(windows: tuple[tuple[int, int | None], ...]) -> None:
    """Guards against a simulation whose steps take another time than the plan says of the same steps."""
    work = replace(WORK, windows=windows, head=Products({"bfloat16": 50}, {"bfloat16": 100}))
    costs = HardwareCosts(work, MACHINE)
    for batch, context in ((1, 1), (1, 100), (7, 30), (64, 2000)):
        expected = decode_time(work, MACHINE, batch, context).seconds
        cached = batch * (context - 1)
        assert costs.decode_seconds(batch, cached) == pytest.approx(expected)
        assert costs.decode_seconds(batch, cached) == costs.seconds(Shape(1.0, batch, 0, cached, 0))
    for rows, cached in ((1, 0), (16, 0), (16, 8), (8, 24)):  # of prompts: within the window, as it counts rows alike
        expected = step_time(work, MACHINE, UniformBatch(1, rows, cached)).seconds
        assert costs.seconds(Shape(1.0, 0, rows, 0, rows * (cached + rows / 2))) == pytest.approx(expected)
    both = costs.seconds(Shape(1.0, 4, 16, 400, 16 * 8))
    assert both > max(costs.seconds(Shape(1.0, 4, 0, 400, 0)), costs.seconds(Shape(1.0, 0, 16, 0, 16 * 8)))


@needs_library
def test_a_replica_is_what_is_planned(tmp_path: Path) -> None:
    """Guards against a replica elsewhere whose cache is what is free on this machine, and one that does not fit."""
    directory, hardware = written(tmp_path, LLAMA), load_hardware("h100-sxm")
    budget = Budget(GIB, 0)
    config = EngineConfig.from_options(model=directory, max_num_batched_tokens=256)
    planned, costs = plan_replica(config, hardware, budget)
    result = asked(directory, budget, hardware, max_num_batched_tokens=256)
    (group,) = planned.groups
    assert group.num_blocks * group.block_size * result["cache_bytes_per_token"] == result["devices"][0]["cache_bytes"]
    assert costs.as_json() == {"hardware": "h100-sxm", "devices": 1}
    with pytest.raises(InvalidRequestError, match=r"does not fit h100-sxm; with memory = \d+MiB it would"):
        plan_replica(config, hardware, replace(budget, num_bytes=2**20))
    with pytest.raises(InvalidRequestError, match="mine has no rates"):
        plan_replica(config, replace(hardware, name="mine", operations_per_s={}), Budget(GIB, 0))


@needs_library
def test_the_command_simulates_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against --hardware that is not used, and options beside it that are ignored."""
    load = ["--num-prompts", "20", "--input-len", "32", "--output-len", "8", "--request-rate", "100"]
    words = ["simulate", written(tmp_path, LLAMA), *load]
    assert main([*words, "--hardware", "h100-sxm", "--json"]) == 0
    near = json.loads(capsys.readouterr().out)
    assert near["costs"] == {"hardware": "h100-sxm", "devices": 1}
    assert main([*words, "--hardware", "zen4-epyc-9654", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["e2e_ms"]["p50"] > 2 * near["e2e_ms"]["p50"]
    for more, name in (
        (("--hardware", "h100-sxm", "--costs", "c.json"), "--costs"),
        (("--hardware", "h100-sxm", "--save-costs", str(tmp_path / "c.json")), "--save-costs"),
        (("--devices", "2"), "--devices"),
        (("--hardware", "nope"), "--hardware"),
        (("--hardware", "wormhole-n150", "--tensor-parallel-size", "2"), "--devices"),
    ):
        assert main([*words, *more]) == 2
        assert capsys.readouterr().err.startswith(f"penstock: {name}: ")
