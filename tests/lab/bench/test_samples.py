"""Samples with the machine's limits of their moment: shares, unsettled samples, fast and slow states."""

import itertools
from collections import Counter

import pytest

from penstock_lab.bench import machine
from penstock_lab.bench.machine import TimedCall, time_in_rounds
from penstock_lab.bench.profile import fractions_of
from penstock_lab.bench.samples import Rates, Sample, Work, spread, summary

GB = 10**9


def sample(seconds: float, read: tuple[float, float], multiply: tuple[float, float], work: Work) -> Sample:
    before, after = ({"read": read[side], "bf16": multiply[side]} for side in (0, 1))
    return Sample(seconds, work, before, after)


READING = Work(10 * GB, Counter({"bf16": 10 * GB}))
MULTIPLYING = Work(GB, Counter({"bf16": 1000 * GB}))


def test_a_share_is_of_the_mean_of_its_two_probes() -> None:
    """Guards against a share of the best rate ever seen, or of one neighbour only."""
    read, multiply = sample(0.5, (30, 50), (400, 600), READING).shares
    assert read == pytest.approx(10 / 40 / 0.5)
    assert multiply == pytest.approx(10 / 500 / 0.5)


def test_work_of_two_types_adds_up() -> None:
    """Guards against a share of multiplying that forgets attention beside the products."""
    work = Work(0, Counter({"int8": 100 * GB, "bf16": 100 * GB}))
    rates = {"read": 50.0, "int8": 1000.0, "bf16": 500.0}
    mixed = Sample(1.0, work, rates, rates)
    assert mixed.shares == (0, pytest.approx(0.1 + 0.2))
    assert mixed.bound == "bf16"


@pytest.mark.parametrize(
    ("work", "read", "multiply", "expected"),
    [
        (READING, (40, 48), (500, 900), True),  # the rate that changed does not bind it
        (READING, (40, 51), (500, 500), False),
        (READING, (51, 40), (500, 500), False),
        (MULTIPLYING, (40, 80), (500, 600), True),
        (MULTIPLYING, (40, 40), (500, 900), False),
    ],
)
def test_unsettled_is_who_saw_its_own_limit_change(
    work: Work, read: tuple[float, float], multiply: tuple[float, float], expected: bool
) -> None:
    """Guards against samples that are thrown away for a limit they do not depend on, or kept across a change."""
    assert sample(1.0, read, multiply, work).settled is expected


def test_unsettled_samples_are_counted_and_left_out() -> None:
    """Guards against medians over samples whose limit nobody knows, and a table that hides how many there were."""
    steady = [sample(1.0, (40, 40), (500, 500), READING) for _ in range(2)]
    changed = [sample(0.1, (20, 40), (500, 500), READING) for _ in range(5)]
    found = summary(steady + changed, {"read": 40, "bf16": 500})
    assert (found["samples"], found["unsettled"]) == (7, 5)
    assert found["spread"]["seconds"] == {"p10": 1.0, "p50": 1.0, "p90": 1.0}
    assert found["spread"]["bw_fraction"]["p50"] == pytest.approx(0.25)
    assert fractions_of(steady + changed)[0] == pytest.approx(0.25)
    only_changed = summary(changed, {"read": 40, "bf16": 500})  # all of them, rather than none
    assert (only_changed["unsettled"], only_changed["fast"]["samples"] + only_changed["slow"]["samples"]) == (5, 5)


def test_fast_and_slow_are_told_apart_by_the_limit_that_binds() -> None:
    """Guards against one median over two states of the machine."""
    fast = [sample(0.5, (60, 60), (900, 900), READING) for _ in range(3)]
    slow = [sample(1.0, (30, 30), (900, 900), READING) for _ in range(2)]
    found = summary(fast + slow, {"read": 62, "bf16": 900})
    assert (found["fast"]["samples"], found["slow"]["samples"]) == (3, 2)
    assert found["fast"]["bw_fraction"] == pytest.approx(10 / 60 / 0.5)
    assert found["slow"]["bw_fraction"] == pytest.approx(10 / 30)


def test_spread_of_few_values() -> None:
    """Guards against a percentile beyond the values, and against a mean in place of the median."""
    assert spread([]) == {"p10": None, "p50": None, "p90": None}
    assert spread([3.0]) == {"p10": 3.0, "p50": 3.0, "p90": 3.0}
    assert spread([9.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx({"p10": 1.4, "p50": 3.0, "p90": 7.0})


class FakeLimits:
    """Limits that are faster with every probe, and a log of who took timed."""

    rest_seconds = 0.0

    def __init__(self, log: list[str]) -> None:
        self.log, self._rate = log, itertools.count(10)

    def probe(self, *kinds: str) -> Rates:
        self.log.append("probe")
        return dict.fromkeys(("read", *kinds), float(next(self._rate)))


def test_every_batch_stands_between_two_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against limits that are measured elsewhere than beside the sample, and against rounds of one call only."""
    monkeypatch.setattr(machine, "ROUNDS", 2)
    log: list[str] = []
    timed = [TimedCall(log.append, ["ours"]), TimedCall(log.append, ["torch"])]
    for turn in timed:
        turn._calls = 1
    log.clear()
    (measured,) = time_in_rounds(timed, READING, FakeLimits(log))
    assert log == ["probe", "ours", "probe", "torch", "probe", "ours", "probe", "torch", "probe"]
    assert [(item.before["read"], item.after["read"]) for item in measured.samples] == [(10, 11), (12, 13)]
    assert [(item.before["read"], item.after["read"]) for item in measured.torch_samples] == [(11, 12), (13, 14)]
