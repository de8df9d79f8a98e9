"""Timelines: whatever happens to a request, its intervals follow one another and sum to its time."""

import contextlib
from itertools import pairwise
from random import Random

import pytest

from penstock.engine.policies import POLICIES
from penstock.interface.messages import EngineOutput
from penstock.interface.timeline import MAX_INTERVALS, Interval, IntervalKind, RequestMetrics, Timeline
from tests.engine.test_together import a_request, disturb, make
from tests.engine.timed import Timed
from tests.fakes_engine import request


def intervals_of(outputs: list[EngineOutput]) -> list[Interval]:
    return [interval for output in outputs for interval in output.intervals or []]


@pytest.mark.parametrize("policy", POLICIES)
def test_intervals_partition_the_time_of_every_request(policy: str) -> None:
    """Guards against a moment that is counted twice or not at all, with preemptions, aborts, failures, searches."""
    random, seen = Random(policy), set[IntervalKind]()
    for turn in range(3):
        engine, came, outputs = make(policy, random, None), dict[str, float](), dict[str, list[EngineOutput]]()
        for number in range(60):
            if number < 30 and number % 3 == 0:
                source = a_request(f"{turn}-{number}", random)
                came[source.request_id] = engine._clock()
                engine.add_request(source)
            with contextlib.suppress(MemoryError):
                for output in engine.step():
                    found = outputs.setdefault(output.request_id, [])
                    found.append(output)
                    if output.finish_reason is not None:
                        seen.update(check_partition(found, came[output.request_id], engine._clock()))
            disturb(engine, random)
        for request_id in came:
            engine.abort(request_id)
        assert not engine._log._tracks
        assert not engine._log._stalled
    assert seen >= {IntervalKind.QUEUED, IntervalKind.PREFILL}


def check_partition(outputs: list[EngineOutput], came: float, ended: float) -> set[IntervalKind]:
    found = intervals_of(outputs)
    assert found[0].start == came
    assert all(one.end == next_one.start for one, next_one in pairwise(found))
    assert all(item.duration > 0 or item.steps for item in found)
    if outputs[-1].error is None:
        assert found[-1].end == ended
        generated = sum(len(output.new_token_ids) for output in outputs)
        assert generated == sum(item.generated_tokens for item in found) or outputs[-1].hypotheses
    for item in found:
        assert item.step_s <= item.duration + 1e-9
        assert item.no_row_s + item.no_blocks_s <= item.duration + 1e-9
    return {item.kind for item in found}


def test_says_what_it_was() -> None:
    """Guards against counts that belong to somebody else, or to another time."""
    timed = Timed.make(max_num_seqs=1, max_num_batched_tokens=16)
    timed.add(request("first", [1] * 16, 3))
    timed.add(request("second", [2] * 32, 2))
    outputs: dict[str, list[EngineOutput]] = {}
    while timed.engine.has_work:
        for output in timed.step():
            outputs.setdefault(output.request_id, []).append(output)
    queued, prefill, decode = intervals_of(outputs["second"])
    assert (queued.kind, queued.waiting_before, queued.running_before) == (IntervalKind.QUEUED, 1, 0)
    assert queued.no_row_s == pytest.approx(queued.duration)
    assert (prefill.steps, prefill.computed_tokens, prefill.generated_tokens) == (2, 32, 1)
    assert (decode.steps, decode.generated_tokens, decode.sequences) == (1, 1, 1)


def test_a_preemption_shows_with_what_it_cost() -> None:
    """Guards against recomputed tokens that pass for decoding."""
    timed = Timed.make(enable_prefix_caching=False)
    timed.add(request("r", [1] * 16, 6))
    outputs = timed.step() + timed.step()
    timed.engine.scheduler.preempt(timed.engine.scheduler.running[0])
    while timed.engine.has_work:
        outputs += timed.step()
    found = [
        (item.kind.value, item.steps, item.computed_tokens, item.generated_tokens) for item in intervals_of(outputs)
    ]
    assert found == [("prefill", 1, 16, 1), ("decode", 1, 0, 1), ("recompute", 1, 18, 1), ("decode", 3, 0, 3)]


def test_timeline_is_bounded_and_still_a_partition() -> None:
    """Guards against a request that is preempted a thousand times and takes the server's memory."""
    line, random, kinds = Timeline(0.0), Random(1), list(IntervalKind)
    for at in range(1000):
        line.add(Interval(random.choice(kinds), at + random.random() / 2, at + 0.9, steps=1))
    assert len(line.intervals) == MAX_INTERVALS
    assert all(a.end == b.start and a.kind != b.kind for a, b in pairwise(line.intervals))
    assert (line.intervals[0].start, line.end) == (0.0, 999.9)
    assert sum(item.steps for item in line.intervals) == 1000
    assert line.until(2000.0).end == 2000.0


def test_recovery_is_the_time_between_two_engines() -> None:
    """Guards against a death that shows as decoding, and against overlapping reports of two engines."""
    line = Timeline(1.0)
    line.extend([Interval(IntervalKind.QUEUED, 1.5, 2.0), Interval(IntervalKind.PREFILL, 2.0, 3.0, generated_tokens=1)])
    line.enter(IntervalKind.RECOVERY, 5.0, num_tokens=8)
    line.extend(
        [Interval(IntervalKind.QUEUED, 6.0, 6.5), Interval(IntervalKind.RECOMPUTE, 6.5, 7.0, generated_tokens=1)]
    )
    line.extend([Interval(IntervalKind.DECODE, 7.0, 9.0, generated_tokens=3)])
    line.enter(IntervalKind.DELIVERY, 9.0)
    kinds = [(item.kind.value, item.start, item.end, item.generated_tokens) for item in line.intervals]
    assert kinds == [
        ("queued", 1.0, 2.0, 0), ("prefill", 2.0, 3.0, 1), ("decode", 3.0, 5.0, 7), ("recovery", 5.0, 6.0, 0),
        ("queued", 6.0, 6.5, 0), ("recompute", 6.5, 7.0, 1), ("decode", 7.0, 9.0, 3),
    ]  # fmt: skip
    assert RequestMetrics.of([line]) == RequestMetrics(1.0, 2.0, 3.0, 9.0, 1.0)
