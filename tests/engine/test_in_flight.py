"""Several steps in flight: nobody can tell from the tokens. That any mix of features gives the tokens of one step after
the other is shown where the mixes are (test_engine, test_failures, test_together); here is what only this can break."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.draft_policy import DraftPolicy
from penstock.engine.engine import Engine
from penstock.engine.observer import EngineObserver
from penstock.engine.speculation import Speculation
from penstock.interface.step import SchedulerOutput, StepOutput
from penstock_lab.bench.pipeline import (
    GROUPS,
    MICRO_BATCHES,
    NUM_ROWS,
    STAGES,
    StageSpan,
    bubble,
    compute_batch,
    formula,
)
from tests.engine.timed import Clock
from tests.fakes_drafts import Oracle
from tests.fakes_engine import ScriptedExecutor, expected_outputs, make_engine, request, run, token_ids


@dataclass
class Watched(EngineObserver):
    """Looks at the steps that an engine's executor has in flight, whenever one more is submitted.

    Attributes:
        most: steps in flight.
        sizes: rows of each step.
        before: called with each step before it is submitted.
    """

    inner: ScriptedExecutor
    before: Callable[[SchedulerOutput], None] = lambda step: None
    most: int = 0
    sizes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> "Watched":
        assert isinstance(engine.executor, ScriptedExecutor)
        watched = cls(engine.executor)
        engine.observe(watched)
        return watched

    def submitting(self, plan: SchedulerOutput) -> None:
        self.before(plan)
        steps = [*self.inner.submitted, plan]
        names = [item.request_id for step in steps for item in step.scheduled]
        assert len(names) == len(set(names)), "a request is in two steps at once"
        assert plan.scheduled or len(steps) == 1, "a step without requests"
        self.most = max(self.most, len(steps))
        assert self.most <= self.inner.depth
        self.sizes.append(len(plan.scheduled))


@settings(max_examples=40)
@given(rows=st.integers(1, 24), depth=st.integers(1, 5), ends=st.lists(st.integers(1, 9), min_size=24, max_size=24))
def test_rows_are_spread_over_the_steps(rows: int, depth: int, ends: list[int]) -> None:
    """Guards against one step with all rows, beside which the other stages have nothing to do; also as rows end."""
    engine = make_engine(num_blocks=200, max_num_seqs=rows, depth=depth)
    watched = Watched.of(engine)
    for row in range(rows):
        engine.add_request(request(str(row), [row + 1], 4 + ends[row]))
    found = run(engine)
    assert watched.most == min(rows, depth)
    first = watched.sizes[: min(rows, depth)]
    assert sum(first) == rows
    assert max(first) - min(first) <= 1
    assert max(watched.sizes) == max(first)
    assert {name: token_ids(outputs) for name, outputs in found.items()} == {
        str(row): expected_outputs([row + 1], 4 + ends[row]) for row in range(rows)
    }


def test_an_aborted_request_that_comes_again_gets_its_own_tokens() -> None:
    """Guards against results of a step in flight that go to a later request of the same id, or bring its row down."""
    engine = make_engine(depth=3)
    Watched.of(engine)
    for name in "abc":
        engine.add_request(request(name, [ord(name)], 12))
    engine.step()
    assert "b" in engine.scheduler.in_flight
    assert engine.abort("b")
    engine.add_request(request("b", [1, 2, 3], 5))
    found = run(engine)
    assert token_ids(found["b"]) == expected_outputs([1, 2, 3], 5)
    assert token_ids(found["c"]) == expected_outputs([ord("c")], 12)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_what_is_in_flight_when_everybody_leaves_is_collected() -> None:
    """Guards against an engine that calls itself idle with steps on the way, whose results the next ones would get."""
    engine = make_engine(depth=4)
    watched = Watched.of(engine)
    for name in "abcd":
        engine.add_request(request(name, [ord(name)], 12))
    engine.step()
    for name in "abcd":
        engine.abort(name)
    assert engine.has_work
    assert run(engine) == {}
    assert not watched.inner.submitted
    assert not engine.scheduler.in_flight.steps


@pytest.mark.parametrize("where", ["submit", "collect"])
@pytest.mark.parametrize("failing", range(1, 12, 2))
def test_a_step_that_fails_among_others_costs_nobody_a_token(where: str, failing: int) -> None:
    """Guards against steps behind a failed one whose results are taken twice, blamed on somebody, or lost for ever."""
    engine = make_engine(depth=3, max_num_batched_tokens=20)
    watched = Watched.of(engine)

    def fail(step: SchedulerOutput) -> set[str]:
        if step.step_id == failing:
            watched.before, watched.inner.fail = lambda step: None, lambda step: set()
            raise OSError("of the moment")
        return set()

    if where == "submit":
        watched.before = fail  # type: ignore[assignment]
    else:
        watched.inner.fail = fail
    for index, name in enumerate("abcde"):
        engine.add_request(request(name, [ord(name)] * (1 + 9 * index), 8))
    found = run(engine)
    for index, name in enumerate("abcde"):
        assert token_ids(found[name]) == expected_outputs([ord(name)] * (1 + 9 * index), 8)
    assert engine.stats().num_failed_steps_total == 1
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_a_failed_step_that_nobody_waits_for_is_nobodys_fault() -> None:
    """Guards against requests that end, or are computed alone, for the failure of a step whose requests have left."""
    engine = make_engine(depth=2)
    watched = Watched.of(engine)
    watched.inner.fail = lambda step: {}["x"] if step.step_id == 2 else set()  # type: ignore[return-value]
    for name in "ab":
        engine.add_request(request(name, [ord(name)], 12))
    engine.step()  # a's first step; a's second is the third submitted
    engine.step()
    (name,) = [item.request_id for item in watched.inner.submitted[0].scheduled]
    engine.abort(name)
    found = run(engine)
    (other,) = set("ab") - {name}
    assert token_ids(found[other]) == expected_outputs([ord(other)], 12)[1:]
    assert engine.stats().num_preemptions_total == 0


def test_nobody_is_preempted_for_blocks_while_in_flight() -> None:
    """Guards against tokens computed for nothing: whoever needs the blocks waits for the step that uses them."""
    engine = make_engine(depth=2, num_blocks=8, max_num_seqs=4, max_model_len=100, enable_prefix_caching=False)
    lost: list[str] = []
    lose = engine.scheduler.in_flight.lose

    def losing(who: Any) -> None:
        lost.extend([who.request_id] if who.request_id in engine.scheduler.in_flight else [])
        lose(who)

    engine.scheduler.in_flight.lose = losing  # type: ignore[method-assign]
    for name in "abcd":
        engine.add_request(request(name, [ord(name)] * 20, 60))
    found = run(engine)
    assert engine.stats().num_preemptions_total > 0
    assert not lost
    assert all(token_ids(found[name]) == expected_outputs([ord(name)] * 20, 60) for name in "abcd")


def test_prompts_of_other_steps_leave_streams_their_pace() -> None:
    """Guards against a step of prompts alone, which --max-stall would not bound, though streams wait behind it."""
    clock = Clock()
    engine = make_engine(
        depth=2, clock=clock, max_stall_s=0.05, num_blocks=400, max_num_batched_tokens=512, max_model_len=2048
    )
    watched, beside = Watched.of(engine), list[int]()

    def compute(step: SchedulerOutput) -> set[str]:
        clock.now += 0.01 + 0.001 * step.num_tokens
        if any(item.num_samples for item in watched.inner.submitted[0].scheduled) if watched.inner.submitted else False:
            beside.append(step.num_tokens)
        return set()

    watched.inner.fail = compute
    engine.add_request(request("stream", [1], 60))
    for _ in range(4):
        engine.step()
    engine.add_request(request("prompt", [2] * 1500, 2))
    found = run(engine)
    assert len(token_ids(found["prompt"])) == 2
    assert beside
    assert max(beside) <= 60


def test_drafts_are_learnt_from_the_steps_of_all_micro_batches() -> None:
    """Guards against guesses that are forgotten because other requests were asked for theirs in between: then a policy
    that never drafted would never learn that it pays."""
    oracle = Oracle(lambda _, ids, count: expected_outputs(ids, count))
    policy = DraftPolicy(scores_unverified=True)
    clock = Clock()
    speculation = Speculation(oracle, 4, policy=policy, clock=clock)
    engine = make_engine(depth=2, speculation=speculation, clock=clock, num_blocks=200)

    def compute(step: SchedulerOutput) -> set[str]:
        clock.now += 0.02 + 0.001 * step.num_tokens
        return set()

    assert isinstance(engine.executor, ScriptedExecutor)
    engine.executor.fail = compute
    for name in "abcd":
        engine.add_request(request(name, [ord(name)], 200))
    found = run(engine)
    assert engine.stats().num_accepted_tokens_total > 0
    assert all(token_ids(found[name]) == expected_outputs([ord(name)], 200) for name in "abcd")


class TimedStages:
    """An executor whose stages take a second each for a step, on a clock that nobody waits for."""

    def __init__(self, num_stages: int, depth: int) -> None:
        self.depth = depth
        self.spans: list[StageSpan] = []
        self._free_at = [0.0] * num_stages
        self._now = 0.0
        self._inner = ScriptedExecutor(GROUPS, depth=depth)

    def submit(self, scheduler_output: SchedulerOutput) -> tuple[SchedulerOutput, float]:
        ready = self._now
        size = len(scheduler_output.scheduled), scheduler_output.num_tokens
        for stage, free_at in enumerate(self._free_at):
            begin = max(ready, free_at)
            self._free_at[stage] = ready = begin + 1
            self.spans.append(StageSpan(stage, scheduler_output.step_id, *size, begin, ready))
        return self._inner.submit(scheduler_output), ready

    def collect(self, handle: tuple[SchedulerOutput, float]) -> StepOutput:
        step, self._now = handle
        return self._inner.collect(step)

    def shutdown(self) -> None:
        self._inner.shutdown()


@pytest.mark.covers("M20", "M21")
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("count", MICRO_BATCHES)
def test_the_bubble_is_that_of_the_formula(num_stages: int, count: int) -> None:
    """Guards against a batch that is not cut into micro-batches, or steps that wait for one another, so that stages
    idle longer than (P - 1) / (M + P - 1) of a pass, or, decoding with M >= P, longer than at its two ends."""
    once, decoding = TimedStages(num_stages, count), TimedStages(num_stages, count)
    compute_batch(once, NUM_ROWS, 1)
    assert bubble(once.spans, num_stages) == pytest.approx(formula(num_stages, count))
    assert {span.num_rows for span in once.spans} == {NUM_ROWS // count}
    compute_batch(decoding, NUM_ROWS, 10)
    idle = (num_stages - 1) / (10 * count + num_stages - 1) if count >= num_stages else 1 - count / num_stages
    assert bubble(decoding.spans, num_stages) == pytest.approx(idle, abs=0.03)
