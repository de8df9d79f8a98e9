"""`penstock simulate` where the fleet changes: autoscaling, and replicas that die."""

import json
import runpy
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.assembly import PlannedEngine
from penstock.cli.main import main
from penstock_lab.simulator.arrivals import Arrival
from penstock_lab.simulator.costs import LinearCosts
from penstock_lab.simulator.figures import Figures
from penstock_lab.simulator.fleet import MAX_DEATHS
from penstock_lab.simulator.lifecycle import DECISION_INTERVAL_S, Change, Changes, Lifecycle, Scaling
from penstock_lab.simulator.scenario import Scenario, priced

COSTS = LinearCosts(step=0.01, sequence=0.001, prompt_token=0.0001, cached_token=1e-6, pair=1e-8)


def run(planned: PlannedEngine, arrivals: list[Arrival], changes: Changes, count: int = 1, **options) -> Figures:
    return Scenario(planned, COSTS, arrivals, changes=changes, **options).run(count)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=20),
       st.integers(1, 3), st.sampled_from(["round_robin", "least_loaded", "cached_prefix"]),
       st.sampled_from([None, 0.5, 3.0]), st.sampled_from([None, 0, 20]), st.sampled_from([None, 3]))  # fmt: skip
def test_every_request_ends_once_whatever_becomes_of_replicas(planned, requests, count, router, mtbf, delay, users):
    """Guards against requests that are lost with a replica, or computed twice, and a fleet that waits for ever."""
    scaling = None
    if delay is not None:
        scaling = Scaling(
            max_replicas=count + 2, target_ongoing_requests=1.5, upscale_delay_s=delay, downscale_delay_s=delay
        )
    changes = Changes(scaling=scaling, startup_s=1.0, mtbf_s=mtbf, restart_s=0.2)
    ats = accumulate(gap for gap, _, _ in requests)
    arrivals = [Arrival(at, *lengths) for at, (_, *lengths) in zip(ats, requests, strict=True)]
    found = run(planned, arrivals, changes, count, router=router, users=users)
    assert found.requests + found.failed == len(requests)
    if not found.failed:
        assert found.output_tokens == sum(arrival.output_len for arrival in arrivals)
        assert found.times["itl"]._counts.total() == found.output_tokens - found.requests
    fleet = found.fleet
    if fleet is None:
        assert (router, users, changes.any) == ("round_robin", None, False)
        return
    assert 0 < fleet.mean <= fleet.most + 1e-9
    assert fleet.most <= count + 2
    if mtbf is None and scaling is None:
        assert (fleet.mean, fleet.most, fleet.added, fleet.failures) == (pytest.approx(count), count, 0, 0)


def test_a_stream_goes_on_where_its_replica_died(planned, monkeypatch):
    """Guards against a stream that begins again: its tokens stay, its gap is the outage, and prompt and tokens are
    computed anew."""
    draws = iter([0.6, 1e9, 1e9])  # the first replica dies after so many seconds, the second never
    monkeypatch.setattr("random.Random.expovariate", lambda *_: next(draws))
    changes = Changes(mtbf_s=1.0, restart_s=5.0)
    alone = run(planned, [Arrival(0.0, 50, 100)], changes)
    assert (alone.requests, alone.output_tokens, alone.steps, alone.failed) == (1, 100, 101, 0)
    assert alone.times["itl"].percentile(100) == pytest.approx(5.0, rel=0.02)
    assert alone.times["ttft"].percentile(100) < 0.1
    draws = iter([0.6, 1e9, 1e9])
    beside = run(planned, [Arrival(0.0, 50, 100)], changes, 2)
    assert beside.requests == 1
    assert beside.times["itl"].percentile(100) < 0.1  # another one goes on at once
    assert beside.fleet is not None
    assert beside.fleet.failures == 1


def test_a_request_that_every_engine_dies_of_fails(planned, monkeypatch):
    """Guards against a simulation that never ends, and a failed request that counts as answered."""
    monkeypatch.setattr("random.Random.expovariate", lambda *_: 1e-6)
    found = run(planned, [Arrival(1.0, 200, 5)], Changes(mtbf_s=1.0, restart_s=1.0))
    assert (found.requests, found.failed, found.output_tokens, found.meets_target) == (0, 1, 0, False)
    assert found.fleet is not None
    assert found.fleet.failures >= MAX_DEATHS


def test_replicas_come_and_go_after_their_delays():
    """Guards against a fleet that follows every peak, removes replicas too soon, or is not paid for while it starts."""
    scaling = Scaling(max_replicas=4, target_ongoing_requests=2.0, upscale_delay_s=20.0, downscale_delay_s=50.0)
    life, ongoing, now, seen = Lifecycle(1, Changes(scaling=scaling, startup_s=7.0)), 7, 0.0, []
    while (now := life.next_at) <= 200.0:
        ongoing = 7 if now <= 60.0 else 1
        seen += [(now, change, index) for change, index in life.advance(now, ongoing)]
        for index in [index for _, change, index in seen if change is Change.DRAINED]:
            if index in life._states:
                life.emptied(index, now)
    added = 30.0  # wanted from the look at 10 on, and of the look at 0 nothing is known but that there was one
    assert seen[:3] == [(added + 7.0, Change.STARTED, index) for index in (1, 2, 3)]
    assert seen[3:] == [(60.0 + 50.0 + DECISION_INTERVAL_S, Change.DRAINED, index) for index in (3, 2, 1)]
    fleet = life.finish(200.0)
    assert (fleet.most, fleet.added, fleet.failures) == (4, 3, 0)
    assert fleet.mean == pytest.approx((200.0 + 3 * (120.0 - added)) / 200.0)


def test_a_peak_is_met_by_more_replicas_and_paid_for_as_long_as_they_are_there(planned):
    """Guards against autoscaling that changes nothing, and a price of the largest fleet for the whole time."""
    arrivals = [Arrival(20 + i / 10, 40, 40) for i in range(400)] + [Arrival(200.0, 40, 1)]
    scaling = Scaling(max_replicas=3, upscale_delay_s=0.0, downscale_delay_s=30.0)
    fixed = run(planned, arrivals, Changes(), router="least_loaded").summary(1)
    scaled = run(planned, arrivals, Changes(scaling=scaling, startup_s=5.0), router="least_loaded").summary(1)
    assert scaled["ttft_ms"]["p50"] < 0.6 * fixed["ttft_ms"]["p50"]
    assert scaled["replicas"] == 3
    assert 1 < scaled["mean_replicas"] < 2.5
    assert priced(scaled, 10.0)["cost_per_hour"] == pytest.approx(10 * scaled["mean_replicas"])


def test_a_replica_that_comes_back_has_an_empty_cache(planned):
    """Guards against a replica that was removed, and has cached what no new machine has."""
    scaling = Scaling(max_replicas=2, target_ongoing_requests=1.0, upscale_delay_s=0.0, downscale_delay_s=0.0)
    peaks = [Arrival(100.0 * peak + i, 100, 150, "a", 96) for peak in (1, 2) for i in range(40)]
    found = run(planned, peaks, Changes(scaling=scaling, startup_s=1.0), router="round_robin")
    assert found.fleet is not None
    assert found.fleet.added == 2
    assert found.cached_tokens == 96 * (len(peaks) - 3)  # computed by the first, and by each that was added


def test_a_load_that_no_replica_can_hold_is_counted(planned):
    """Guards against figures of a fleet that never had anything to do."""
    found = run(planned, [Arrival(0.0, 300, 5)], Changes(mtbf_s=100.0)).summary(1)
    assert (found["requests"], found["rejected"], found["mean_replicas"], found["utilization"]) == (0, 1, 1.0, 0.0)


def test_the_command_changes_the_fleet(capsys, tmp_path: Path) -> None:
    """Guards against options that are ignored, and options that need another one."""
    COSTS.write(tmp_path / "costs.json")
    words = ["simulate", "demo", "--costs", str(tmp_path / "costs.json"), "--num-prompts", "300", "--output-len", "30"]
    load = ["--request-rate", "8", "--max-num-seqs", "2", "--max-replicas", "4", "--upscale-delay", "0", "--mtbf", "20"]
    assert main([*words, *load, "--startup-time", "3", "--restart-time", "1", "--json", "--price", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replicas"] > found["mean_replicas"] > 1
    assert found["cost_per_hour"] == pytest.approx(2 * found["mean_replicas"])
    assert found["replica_failures"] > 0
    assert found["requests"] + found["failed"] == 300
    for more, named in (
        (("--upscale-delay", "3"), "--upscale-delay"), (("--restart-time", "3"), "--restart-time"),
        (("--startup-time", "3"), "--startup-time"), (("--mtbf", "0"), "--mtbf"),
        (("--max-replicas", "1", "--replicas", "2"), "--max-replicas"), (("--max-replicas", "0"), "--max-replicas"),
        (("--max-replicas", "3", "--target-ongoing-requests", "0"), "--target-ongoing-requests"),
        (("--max-replicas", "3", "--replicas", "auto", "--target", "ttft_p99=1s"), "--replicas"),
    ):  # fmt: skip
        assert main([*words, *more]) == 2, more
        assert capsys.readouterr().err.startswith(f"penstock: {named}: "), more


def test_a_process_that_imports_the_command_runs_nothing() -> None:
    """Guards against `python -m penstock simulate --processes 2`, whose processes import its main file again."""
    runpy.run_path(str(Path(penstock.__file__).parent / "__main__.py"), run_name="__mp_main__")
