"""What a flight recorder's file tells a simulation: the decisions of a real engine, and how long its steps took."""

from collections.abc import Iterator
from random import Random

import pytest

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly import build_engine, plan_engine
from penstock.cli.main import main
from penstock.client.recorder import Recorder
from penstock.client.records import Bundle, EngineDescription, Planned, Ring, make_bundle, pack
from penstock.engine.engine import Engine
from penstock_lab.simulator.recorded import decisions, load_costs, measured_steps, record_mix
from penstock_lab.simulator.scenario import make_engine
from tests import fakes_engine
from tests.fakes_engine import request

CROWDED = {"num_blocks": 24, "max_num_seqs": 5, "max_model_len": 256}


def recorded(seed: int, **options) -> Bundle:
    """A run with prefixes, chunks, too few blocks and requests that leave, as `penstock serve` would record it."""
    engine, ring, rng = fakes_engine.make_engine(**CROWDED, **options), Ring.create(2**22), Random(seed)
    description = EngineDescription("scripted", {}, engine.kv_cache.groups, 997, 256, 5, 64)
    engine.observe(Recorder(ring, description))
    for index in range(22):
        prompt = [rng.randrange(2)] * 40 + [rng.randrange(997) for _ in range(rng.randrange(1, 60))]
        engine.add_request(request(f"r{index}", prompt, max_tokens=rng.randrange(1, 60)))
        for _ in range(rng.randrange(12)):
            engine.step()
        if index % 7 == 6:
            engine.abort(f"r{index - 1}")
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_cached_tokens > 0
    return make_bundle(ring.read(), "test").decoded()


def scheduler_of(**options):
    def make(executor, clock) -> Engine:
        return fakes_engine.make_engine(**CROWDED, **options, clock=clock, wrap=lambda _: executor)

    return make


@pytest.mark.parametrize("options", [{}, {"windows": (None, 32)}, {"policy": "length_classes"}, {"policy": "fair"}])
def test_the_decisions_of_a_recorded_run_are_made_again(options):
    """Guards against a scheduler that decides otherwise on a virtual clock: every plan is the same, block for block."""
    bundle = recorded(1, **options)
    pairs = list(decisions(bundle, scheduler_of(**options)))
    assert len(pairs) > 120
    for then, now in pairs:
        assert now == then


def test_another_scheduler_is_noticed():
    """Guards against a comparison that cannot fail."""
    bundle = recorded(2)
    pairs = decisions(bundle, scheduler_of(enable_prefix_caching=False))
    assert any(now != then for then, now in pairs)


def test_a_record_that_cannot_be_followed_is_refused():
    bundle = recorded(3)
    begun = bundle.records[0]
    with pytest.raises(InvalidRequestError, match="after the engine's start"):
        next(decisions(Bundle(bundle.format, 0.0, "", True, [_continued(begun), *bundle.records[1:]]), scheduler_of()))
    first = next(index for index, record in enumerate(bundle.records) if isinstance(record, Planned))
    cut = Bundle(bundle.format, 0.0, "", True, bundle.records[: first + 1])
    with pytest.raises(InvalidRequestError, match="a step failed, or was not finished"):
        list(decisions(cut, scheduler_of()))


def _continued(begun):
    return type(begun)(begun.time, begun.epoch, True, begun.engine, begun.requests)


@pytest.fixture(scope="module")
def of_the_demo() -> Iterator[tuple[Bundle, EngineConfig]]:
    """The record of the demo model on this machine, of a second's work."""
    config = EngineConfig.from_options(model="demo", max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=2**21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_lab.simulator.recorded.SECONDS", 0.0)
        yield record_mix(build_engine(config)), config


def test_the_decisions_of_a_real_model_are_those_of_its_plan(of_the_demo):
    """Guards against a simulated engine with another cache, other rows or another budget than the one that is built."""
    bundle, config = of_the_demo
    pairs = list(decisions(bundle, make_engine(plan_engine(config))))
    assert len(pairs) > 40
    for then, now in pairs:
        assert now == then


def test_a_record_of_steps_is_a_file_of_costs(of_the_demo, tmp_path, capsys):
    """Guards against times that leave out what is between two steps, or hold the time in which there was no work."""
    bundle, _ = of_the_demo
    steps = measured_steps(bundle)
    assert (
        20 <= len(steps) < bundle.records[-1].step_id + 1
    )  # the last of each burst is followed by none of its requests
    times = [record.time for record in bundle.records if isinstance(record, Planned)]
    assert 0 < len(measured_steps(bundle, times[len(times) // 2])) < len(steps)
    assert measured_steps(bundle, times[-1] + 1.0) == []
    file = tmp_path / "demo.record"
    file.write_bytes(pack(bundle))
    assert load_costs(file).seconds(steps[0].shape) > 0
    assert main(["simulate", "demo", "--costs", str(file), "--num-prompts", "3", "--output-len", "4"]) == 0
    assert "Time to first token, p50" in capsys.readouterr().out
