"""What waits, what is being prefilled, what was preempted: the gauges beside what the executor was told."""

import random

import pytest

from penstock.client.step_client import InProcessClient
from penstock.engine.engine import Engine
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SchedulerOutput
from tests.fakes_engine import VOCAB, ScriptedExecutor, make_engine, model_info, request


class Watcher:
    """Knows what the executor holds, from its steps alone."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}  # of the requests that have a row
        self.known: set[str] = set()

    def note(self, step: SchedulerOutput) -> None:
        for request_id in step.removed_request_ids:
            self.computed.pop(request_id, None)
        for new in step.new_requests:
            self.computed[new.request_id] = 0
            self.known.add(new.request_id)
        for item in step.scheduled:
            self.computed[item.request_id] = item.num_computed_tokens + item.num_new_tokens


@pytest.mark.covers("J23")
@pytest.mark.parametrize("seed", range(6))
def test_gauges_are_true_to_the_load(seed: int) -> None:
    """Guards against a backlog that drifts with preemptions, aborts and failed steps: after every step each gauge is
    what the executor's own rows say."""
    rng, engine, watcher = random.Random(seed), make_engine(num_blocks=12, max_num_seqs=3), Watcher()
    executor = engine.executor
    assert isinstance(executor, ScriptedExecutor)
    executor.fail = lambda step: {rng.choice(step.scheduled).request_id} if rng.random() < 0.05 else set()
    open_ids: set[str] = set()
    seen = {"prefilling": 0, "preempted": 0, "waiting": 0}
    for number in range(120):
        if rng.random() < 0.3 or not open_ids:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))]
            engine.add_request(request(f"r{number}", prompt, rng.randint(1, 40), flow=rng.choice(["", "a", "b"])))
            open_ids.add(f"r{number}")
        if rng.random() < 0.05:
            engine.abort(aborted := rng.choice(sorted(open_ids)))
            open_ids.discard(aborted)
        done = len(executor.steps)
        open_ids -= {output.request_id for output in engine.step() if output.finish_reason}
        for step in executor.steps[done:]:
            watcher.note(step)
        check(engine, executor, watcher, open_ids, seen)
    assert all(seen.values())
    assert engine.stats().num_slots == 3


def check(
    engine: Engine, executor: ScriptedExecutor, watcher: Watcher, open_ids: set[str], seen: dict[str, int]
) -> None:
    stats = engine.stats()
    running = open_ids & set(watcher.computed)
    missing = {name: len(executor.rows[name].token_ids) - watcher.computed[name] for name in running}
    assert stats.num_running == len(running)
    assert stats.num_waiting == len(open_ids) - len(running)
    assert stats.num_prefilling == sum(count > 1 for count in missing.values())
    assert stats.num_preempted == len((open_ids & watcher.known) - running)
    for name in seen:
        seen[name] += getattr(stats, f"num_{name}")


@pytest.mark.covers("C2")
def test_a_step_returns_every_request_that_moved() -> None:
    """Guards against a request that gets a token in a step and is not in its results, or is there without one."""
    engine = make_engine(num_blocks=12, max_num_seqs=3)
    executor, client = engine.executor, InProcessClient(engine, model_info(512, VOCAB), None)
    assert isinstance(executor, ScriptedExecutor)
    ids = {
        client.add_request(f"r{i}", [i + 1] * (1 + 23 * i), SamplingParams(temperature=0.0, max_tokens=5 + 4 * i))
        for i in range(5)
    }
    received: dict[str, list[int]] = {name: [] for name in ids}
    while client.has_unfinished_requests():
        outputs = {output.request_id: output.outputs[0].token_ids for output in client.step()}
        moved = {item.request_id.partition("#")[0] for item in executor.steps[-1].scheduled if item.num_samples}
        assert set(outputs) == moved
        assert all(len(found) == len(received[name]) + 1 for name, found in outputs.items())
        received |= outputs
    assert sorted(map(len, received.values())) == [5, 9, 13, 17, 21]
