"""`penstock simulate`: the real engine on a virtual clock."""

import json
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import EngineError, InvalidRequestError
from penstock.assembly import PlannedEngine
from penstock.cli.main import main
from penstock.engine.scheduler import Scheduler
from penstock_lab.bench.datasets import Dataset, draw_samples
from penstock_lab.bench.outcomes import Load
from penstock_lab.simulator import run as simulator_run
from penstock_lab.simulator.arrivals import Arrival, Drawn, Trace
from penstock_lab.simulator.costs import LinearCosts, MeasuredStep, Shape, fit_costs, read_costs
from penstock_lab.simulator.figures import Figures, Histogram, RequestTimes, parse_target
from penstock_lab.simulator.fleet import Fleet, Users
from penstock_lab.simulator.replica import Replica
from penstock_lab.simulator.routers import LeastLoaded, RoundRobin
from penstock_lab.simulator.run import divided, simulate
from penstock_lab.simulator.scenario import Scenario, make_engine, smallest_fleet
from tests.lab.bench.test_serving import DEMO

COSTS = LinearCosts(step=0.01, sequence=0.001, prompt_token=0.0001, cached_token=1e-6, pair=1e-8)
LOAD = Drawn(Dataset(input_len=40, output_len=6, range_ratio=0.5), Load(60.0, seed=1), 120)


def made(planned: PlannedEngine, arrivals, count: int = 1, users: Users | None = None) -> tuple[Figures, list[Replica]]:
    figures = Figures()
    replicas = [Replica(make_engine(planned), COSTS, figures) for _ in range(count)]
    Fleet(replicas, LeastLoaded(), users).run(arrivals)
    return figures, replicas


def times(figures: Figures, metric: str) -> list[float]:
    """The times that were counted, each to a quarter of a percent."""
    found = figures.times[metric]
    return [found._ranked(rank) for rank in range(found._counts.total())]


# --- one replica ---------------------------------------------------------------------------------------------------


def test_the_engine_is_that_of_production(planned):
    """Guards against a model of the scheduler in place of the scheduler."""
    _, (replica,) = made(planned, [])
    assert type(replica.engine.scheduler) is Scheduler
    assert replica.engine.scheduler.policy.clock is replica.clock
    assert replica.engine.kv_cache.groups == planned.groups


def test_a_request_takes_what_its_steps_cost(planned):
    """Guards against a clock that runs past a step, or misses one: a prompt of 100 is computed in 64 and 36."""
    figures, _ = made(planned, [Arrival(2.0, 100, 3)])
    first = 2 * COSTS.step + 100 * COSTS.prompt_token + (64 * 32 + 36 * (64 + 18)) * COSTS.pair
    decodes = [COSTS.step + COSTS.sequence + cached * COSTS.cached_token for cached in (100, 101)]
    assert times(figures, "ttft") == [pytest.approx(first, rel=0.003)]
    assert times(figures, "itl") == [pytest.approx(seconds, rel=0.003) for seconds in decodes]
    assert times(figures, "e2e") == [pytest.approx(first + sum(decodes), rel=0.003)]
    assert (figures.began, figures.ended) == (2.0, pytest.approx(2.0 + first + sum(decodes)))
    assert figures.busy_s == pytest.approx(figures.ended - 2.0)


def test_a_request_joins_the_next_step_and_not_the_one_under_way(planned):
    """Guards against a step that is planned with what has not come yet."""
    alone = COSTS.seconds(Shape(1, 0, 10, 0, 50))
    late, _ = made(planned, [Arrival(0.0, 10, 1), Arrival(alone / 2, 10, 1)])
    together, _ = made(planned, [Arrival(0.0, 10, 1), Arrival(0.0, 10, 1)])
    assert times(late, "ttft") == [pytest.approx(alone, rel=0.003), pytest.approx(1.5 * alone, rel=0.003)]
    both = COSTS.seconds(Shape(1, 0, 20, 0, 100))
    assert times(together, "ttft") == [pytest.approx(both, rel=0.003)] * 2
    assert together.steps == 1


def test_prefixes_are_found_preemption_happens_and_what_is_too_long_is_rejected(planned):
    """Guards against a load that is simpler than the real one: its prefixes, its lack of blocks and its limits."""
    grouped, _ = made(planned, [Arrival(float(i), 100, 2, group, 64) for i, group in enumerate("abab")])
    assert (grouped.cached_tokens, grouped.prompt_tokens) == (128, 400)
    alone, _ = made(planned, [Arrival(float(i), 100, 2) for i in range(4)])
    assert alone.cached_tokens == 0
    few = replace(planned, groups=[replace(planned.groups[0], num_blocks=20)])
    crowded, (replica,) = made(few, [Arrival(0.0, 60, 120) for _ in range(4)])
    assert crowded.preemptions > 0
    assert (crowded.requests, crowded.output_tokens) == (4, 480)
    assert replica.engine.kv_cache.num_free == 20
    long, _ = made(planned, [Arrival(0.0, 200, 57), Arrival(0.0, 300, 1), Arrival(0.0, 200, 56)])
    assert (long.requests, long.rejected, long.meets_target) == (1, 2, False)


# --- fleets --------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=25),
       st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))  # fmt: skip
def test_every_request_is_answered_once_in_causal_order(planned, requests, count, num_users):
    """Guards against events out of order: a replica that is left behind, a user who asks twice, a request lost."""
    users = None if num_users is None else Users(num_users)
    ats = accumulate(gap for gap, _, _ in requests)
    arrivals = [Arrival(at, prompt, output) for at, (_, prompt, output) in zip(ats, requests, strict=True)]
    figures, replicas = made(planned, arrivals, count, users)
    assert (figures.requests, figures.output_tokens) == (len(requests), sum(arrival.output_len for arrival in arrivals))
    assert figures.times["itl"]._counts.total() == figures.output_tokens - figures.requests
    assert all(not replica.num_open and not replica.has_work for replica in replicas)
    assert figures.ended == pytest.approx(max(replica.clock.now for replica in replicas))
    if users is not None:
        assert len(users._ready) == num_users


def test_users_wait_for_their_answers_and_think(planned):
    """Guards against users who send before they have read: two of them never fill a third row."""
    arrivals = [Arrival(0.0, 10, 5) for _ in range(12)]
    busy, (replica,) = made(planned, arrivals, users=Users(2))
    assert replica.engine.scheduler.num_preemptions == 0
    assert max(times(busy, "itl")) < COSTS.step + 2 * COSTS.sequence + 10 * COSTS.prompt_token + 1e-3
    lazy, _ = made(planned, arrivals, users=Users(2, think_s=50.0, seed=3))
    assert lazy.ended - lazy.began > 50 * busy.ended
    assert lazy.requests == busy.requests == 12


def test_the_least_loaded_replica_is_the_least_loaded():
    """Guards against loads that are out of date, at any number of changes."""
    router, loads, chosen = LeastLoaded(), [0] * 5, Arrival(0.0, 1, 1)
    for index in range(5):
        router.join(index)
    for turn in range(500):
        index = router.choose(turn, chosen)
        assert loads[index] == min(loads)
        loads[index] += 1
        router.note_load(index, loads[index])
        if turn % 3 == 0:
            ended = max(range(5), key=lambda index: (loads[index], -index))
            loads[ended] -= 1
            router.note_load(ended, loads[ended])


@pytest.mark.parametrize(("num_prefixes", "of_router", "of_turns"), [(1, 0.98, 1.0), (9, 0.9, 0.5)])
def test_the_servers_own_router_finds_prefixes_again(planned, num_prefixes, of_router, of_turns):
    """Guards against a router that is another one than the server's, or forgets what is queued: a prefix of ten blocks
    is found in the real block managers of three engines that have room for some of them only."""
    groups, random = [replace(planned.groups[0], num_blocks=48)], Random(1)
    drawn = [str(random.randrange(num_prefixes)) for _ in range(200)]
    arrivals = [Arrival(0.1 * i, 161 + i % 15, 1 + i % 6, group, 160) for i, group in enumerate(drawn)]
    shares = {}
    for router in ("cached_prefix", "round_robin"):
        figures = Scenario(replace(planned, groups=groups), COSTS, arrivals, router=router).run(3)
        shares[router] = figures.cached_tokens / (160 * len(arrivals))
    assert shares["cached_prefix"] >= of_router
    assert shares["round_robin"] <= of_turns


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 90), st.integers(1, 60), st.sampled_from("abcd")),
                min_size=1, max_size=16), st.integers(1, 3), st.sampled_from(["fcfs", "fair", "length_classes"]),
       st.sampled_from([20, 24, 64]))  # fmt: skip
def test_steps_taken_at_once_are_those_taken_one_by_one(planned, requests, count, policy, num_blocks):
    """Guards against a leap over a decision: an arrival, an end, a lack of blocks, an eviction of a cached prefix."""
    planned = replace(planned, groups=[replace(planned.groups[0], num_blocks=num_blocks)])
    planned = replace(
        planned, config=replace(planned.config, scheduler=replace(planned.config.scheduler, scheduling_policy=policy))
    )
    ats = accumulate(gap for gap, *_ in requests)
    arrivals = [
        Arrival(at, *lengths, group, 32 * (lengths[0] > 32))
        for at, (_, *lengths, group) in zip(ats, requests, strict=True)
    ]
    goals = parse_target("ttft_p99=100ms,itl_p90=12ms,e2e_p50=1s")
    leaping = Scenario(planned, COSTS, arrivals, goals).run(count)
    stepping = Figures(goals)
    replicas = [Replica(make_engine(planned), COSTS, stepping) for _ in range(count)]
    Fleet(replicas, RoundRobin()).run(arrivals)
    for name in (
        "requests",
        "rejected",
        "good",
        "output_tokens",
        "cached_tokens",
        "preemptions",
        "steps",
        "ended",
        "began",
    ):
        assert getattr(leaping, name) == getattr(stepping, name), name
    assert leaping.busy_s == pytest.approx(stepping.busy_s)
    for metric, histogram in stepping.times.items():
        assert leaping.times[metric]._counts == histogram._counts


def test_a_request_is_on_its_way_besides_its_steps(planned):
    """Guards against a way that is left out of a time, or that users do not wait for."""
    near, far = (
        Scenario(planned, replace(COSTS, request=way), [Arrival(0.0, 20, 3)] * 2, users=1).run(1) for way in (0.0, 0.5)
    )
    for metric, longer in (("ttft", 0.5), ("e2e", 0.5), ("itl", 0.0)):
        pairs = zip(times(near, metric), times(far, metric), strict=True)
        assert all(there == pytest.approx(here + longer, rel=0.006) for here, there in pairs)
    assert far.ended - far.began == pytest.approx(near.ended - near.began + 2 * 0.5)


def test_most_steps_are_taken_at_once(planned, monkeypatch):
    """Guards against leaps that never happen."""
    computed: list[int] = []
    step = Replica.step
    monkeypatch.setattr(Replica, "step", lambda replica: computed.append(1) or step(replica))
    figures = Scenario(planned, COSTS, [Arrival(0.0, 20, 60), Arrival(0.0, 20, 60)]).run(1)
    assert (figures.steps, figures.output_tokens) == (60, 120)
    assert len(computed) == 2  # the first, and the last


def test_figures_do_not_depend_on_parts_or_processes(planned, monkeypatch):
    """Guards against replicas that get other requests when they are simulated apart."""
    scenario = Scenario(planned, COSTS, LOAD, parse_target("ttft_p99=100ms,itl_p90=30ms,e2e_p50=1s"))
    whole = scenario.run(20).summary(20)
    monkeypatch.setattr(simulator_run, "MAX_BLOCKS", 3 * planned.groups[0].num_blocks)
    assert len(list(divided(range(20), 1, planned.groups[0].num_blocks))) == 7
    for processes in (1, 2):
        found = simulate(scenario, 20, processes).summary(20)
        assert {name: value for name, value in found.items() if name not in ("utilization",)} == {
            name: value for name, value in whole.items() if name not in ("utilization",)
        }
        assert found["utilization"] == pytest.approx(whole["utilization"])
    assert whole["requests"] == 120


def test_a_sample_stands_for_the_fleet(planned):
    """Guards against a sample that is counted as the whole fleet's load, or of which every replica gets more."""
    load = replace(LOAD, load=Load(200.0, seed=3), count=900)
    scenario = Scenario(planned, COSTS, load, parse_target("ttft_p99=100ms"))
    whole, sample = (simulate(scenario, 30, sample=size).summary(30) for size in (None, 10))
    assert sample["requests"] == whole["requests"] == 900
    for name in ("request_throughput", "output_tokens_per_s", "utilization", "good_fraction"):
        assert sample[name] == pytest.approx(whole[name], rel=0.05), name
    assert sample["ttft_ms"]["p50"] == pytest.approx(whole["ttft_ms"]["p50"], rel=0.05)
    with pytest.raises(InvalidRequestError, match="sample"):
        simulate(replace(scenario, router="least_loaded"), 30, sample=10)


def test_a_wrong_line_ends_the_processes_too(planned, tmp_path):
    """Guards against processes that go on, or an error that is lost on the way."""
    trace = tmp_path / "load.csv"
    trace.write_text("arrival_s,prompt_len,output_len\n0,5,5\n1,x,5\n")
    with pytest.raises(InvalidRequestError, match="line 3"):
        simulate(Scenario(planned, COSTS, Trace(trace)), 20, 1)


def test_the_smallest_fleet_is_found(planned):
    """Guards against a fleet that is too large or too small, and a search that does not end."""
    load = replace(LOAD, load=Load(120.0, seed=2), count=60)
    scenario = Scenario(planned, COSTS, load, parse_target("ttft_p90=60ms"))
    expected = next(count for count in range(1, 61) if scenario.run(count).meets_target)
    assert expected > 2
    assert smallest_fleet(scenario, scenario.run)[0] == expected
    impossible = replace(scenario, goals=parse_target("itl_p50=1ms"))
    with pytest.raises(EngineError, match=r"itl_p50 is 0\.01"):
        smallest_fleet(impossible, impossible.run)
    with pytest.raises(InvalidRequestError, match="target"):
        smallest_fleet(replace(scenario, goals=()), scenario.run)


# --- figures -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=60), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values, share):
    """Guards against a rank that is off by one, also where parts are merged."""
    parts = Histogram(), Histogram()
    for index, value in enumerate(values):
        parts[index % 2].add(value)
    parts[0].merge(parts[1])
    assert parts[0].percentile(share) == pytest.approx(float(np.percentile(values, share)), rel=0.0026)


def test_a_request_is_good_if_its_own_times_are():
    """Guards against goodput that counts requests whose gaps are too long too often, or too late an end."""
    figures = Figures(parse_target("ttft_p99=2s, itl_p50=100ms, e2e_p99=3000ms"))
    for first, gaps in ((1.0, [0.2, 0.05]), (2.5, [0.01]), (1.0, [0.2, 0.2, 0.05]), (1.9, [1.2, 0.01])):
        request, now = RequestTimes(0.0), first
        figures.first_token(request, now)
        for gap in gaps:
            now += gap
            figures.gap(request, now, figures.times["itl"]._counts)
        figures.finish(request, now)
    assert (figures.requests, figures.good) == (4, 1)
    assert not figures.meets_target
    assert figures.summary(1)["goodput"] == pytest.approx(1 / figures.ended)
    assert Figures().summary(3)["ttft_ms"] == {"p50": None, "p90": None, "p99": None}


@pytest.mark.parametrize("text", ["", "ttft=2s", "ttft_p99", "ttft_p99=2", "ttft_p0=1s", "tpot_p50=1s", "itl_p50=-1ms",
                                  "itl_p50=nans", "itl_pnan=1s", "ttft_p99=2s,,"])  # fmt: skip
def test_a_wrong_target_is_refused(text):
    with pytest.raises(InvalidRequestError, match="target"):
        parse_target(text)


# --- arrivals and costs --------------------------------------------------------------------------------------------


def test_arrivals_are_those_of_the_benchmark():
    """Guards against a simulation of another load than `bench serve` sends with the same options."""
    dataset = Dataset("prefix_repetition", input_len=30, output_len=9, range_ratio=0.5, prefix_len=20, num_prefixes=3)
    samples = draw_samples(dataset, DEMO, 40, 5, as_text=False)
    load = Load(3.0, burstiness=0.4, seed=5)
    arrivals = list(Drawn.of(dataset, load, 40, "demo"))
    assert [arrival.at for arrival in arrivals] == list(accumulate(load.gaps(40)))
    assert [(one.prompt_len, one.output_len) for one in arrivals] == [(s.prompt_len, s.output_len) for s in samples]
    for one, a in zip(arrivals, samples, strict=True):
        same = [b.prompt[:20] == a.prompt[:20] for b in samples]
        assert same == [other.prefix_group == one.prefix_group for other in arrivals]


def test_a_trace_is_read_line_by_line(tmp_path):
    """Guards against columns in another order, missing prefixes, and lines that are only half right."""
    file = tmp_path / "load.csv"
    file.write_text("prompt_len,arrival_s,output_len,prefix_group,prefix_len\n50,0,7,x,16\n60,1.5,8,,\n")
    arrivals = [Arrival(0.0, 50, 7, "x", 16), Arrival(1.5, 60, 8)]
    assert list(Trace(file)) == list(Trace(file)) == arrivals
    assert list(Trace(file, 1)) == arrivals[:1]
    for line, reason in (
        ("60,1.4,8,,", "line 4: arrival_s: 1.4 comes after 1.5"), ("0,2,8,,", "line 4: prompt_len"),
        ("60,2,x,,", "line 4"), ("60,inf,8,,", "line 4: arrival_s"), ("60,2,8,,5", "line 4: prefix_len"),
        ("60,2,8,a,61", "line 4: prefix_len"), ("60,2", "line 4"), ("60,2,8,a,5,6", "line 4: it has more"),
    ):  # fmt: skip
        file.write_text(f"prompt_len,arrival_s,output_len,prefix_group,prefix_len\n50,0,7,x,16\n60,1.5,8,,\n{line}\n")
        with pytest.raises(InvalidRequestError, match=reason):
            list(Trace(file))
    for header in ("arrival_s,prompt_len", "arrival_s,prompt_len,output_len,color", ""):
        file.write_text(header + "\n")
        with pytest.raises(InvalidRequestError, match=r"trace: .* its header"):
            Trace(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match="trace"):
        Trace(file)


@pytest.mark.parametrize("used", [range(5), (0, 1), (2, 4), (0, 2, 3)])
def test_costs_are_found_again(used):
    """Guards against a fit that gives a part's time to another, or follows steps that another process held up."""
    wanted = LinearCosts(
        *(value if index in used else 0.0 for index, value in enumerate((2e-3, 3e-4, 1e-4, 2e-7, 4e-8)))
    )
    rng = np.random.default_rng(0)
    steps = []
    for index in range(300):
        sequences, prompt = int(rng.integers(0, 33)), int(rng.integers(0, 2) * rng.integers(1, 2048))
        shape = Shape(
            1, sequences, prompt, sequences * int(rng.integers(1, 4000)), prompt * float(rng.integers(1, 3000))
        )
        held_up = 20.0 if index % 25 == 0 else 1.0
        steps.append(MeasuredStep(shape, held_up * wanted.seconds(shape) * (1 + 0.01 * float(rng.standard_normal()))))
    steps = [step for step in steps if step.seconds > 0]
    found = fit_costs(steps)
    errors = [abs(found.seconds(step.shape) / wanted.seconds(step.shape) - 1) for step in steps]
    assert max(errors) < 0.03
    with pytest.raises(InvalidRequestError, match="too few"):
        fit_costs(steps[:5])


def test_costs_files_are_checked(tmp_path):
    file = tmp_path / "costs.json"
    COSTS.write(file)
    assert read_costs(file) == COSTS
    good = asdict(COSTS)
    for content in ([], {}, {"step": 1}, good | {"step": "x"}, good | {"step": -1}, dict.fromkeys(good, 0)):
        file.write_text(json.dumps(content))
        with pytest.raises(InvalidRequestError):
            read_costs(file)


# --- the command ---------------------------------------------------------------------------------------------------


def called(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(["simulate", "demo", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def costs(tmp_path: Path) -> str:
    COSTS.write(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_a_wrong_trace_is_refused_before_costs_are_found(capsys):
    """Guards against seconds of measuring before a file that cannot be read is refused."""
    code, _, err = called(capsys, "--trace", "/nowhere.csv", "--costs", "/nowhere.json")
    assert code == 2
    assert "--trace: " in err


def test_the_command_prints_json_and_nothing_else(capsys, costs, tmp_path):
    """Guards against other names than are promised, and figures that do not fit each other."""
    words = ("--costs", costs, "--num-prompts", "30", "--output-len", "4", "--json", "--target", "ttft_p99=9s")
    code, out, _ = called(capsys, *words, "--request-rate", "20", "--replicas", "2", "--price", "3")
    found = json.loads(out)
    assert code == 0
    assert {
        "requests",
        "duration_s",
        "output_tokens_per_s",
        "ttft_ms",
        "itl_ms",
        "e2e_ms",
        "goodput",
        "replicas",
    } <= set(found)
    assert (found["requests"], found["replicas"], found["meets_target"], found["cost_per_hour"]) == (30, 2, True, 6.0)
    assert list(found["ttft_ms"]) == ["p50", "p90", "p99"]
    assert found["output_tokens_per_s"] == pytest.approx(120 / found["duration_s"])
    assert found["goodput"] == pytest.approx(30 / found["duration_s"])
    page = tmp_path / "sweep.html"
    code, out, _ = called(capsys, *words, "--request-rate", "20", "40", "--plot", str(page))
    runs = json.loads(out)["runs"]
    assert [run["request_rate"] for run in runs] == [20.0, 40.0]
    text = page.read_text()
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "http://" not in text
    assert "https://" not in text


def test_the_command_finds_a_fleet_for_a_trace(capsys, costs, tmp_path):
    trace = tmp_path / "load.csv"
    trace.write_text("arrival_s,prompt_len,output_len\n" + "".join(f"{i / 50},40,8\n" for i in range(40)))
    words = ("--costs", costs, "--trace", str(trace), "--replicas", "auto", "--save-costs", str(tmp_path / "saved"))
    code, out, err = called(capsys, *words, "--target", "ttft_p99=40ms", "--router", "least_loaded")
    assert (code, err) == (0, "")
    assert "Target met" in out
    assert read_costs(tmp_path / "saved") == COSTS
    code, _, err = called(capsys, *words, "--target", "itl_p50=1ms", "--num-prompts", "3")
    assert code == 1
    assert "no fleet meets the target" in err


@pytest.mark.parametrize(("words", "said"), [
    (("--replicas", "auto"), "--target"), (("--replicas", "0"), "--replicas"), (("--target", "x"), "--target"),
    (("--router", "x"), "--router"), (("--trace", "none.csv"), "--trace"), (("--costs", "none.json"), "--costs"),
    (("--request-rate", "-1"), "--request-rate"), (("--users", "5", "--request-rate", "3"), "--request-rate"),
    (("--think-time", "3"), "--think-time"), (("--plot", "/none/x.html"), "--plot"), (("--price", "-1"), "--price"),
    (("--save-costs", "/none/x"), "--save-costs"), (("--num-prompts", "0"), "--num-prompts"),
    (("--plot", "x.docx"), "--plot"), (("--processes", "0"), "--processes"), (("--price", "nan"), "--price"),
])  # fmt: skip
def test_bad_input_is_named(capsys, costs, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = words if "--costs" in words else ("--costs", costs, *words)
    code, out, err = (
        called(capsys, "--num-prompts", "2", *given) if "--num-prompts" not in words else called(capsys, *given)
    )
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"penstock: {said}:")
