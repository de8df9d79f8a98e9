"""The seam through which measurements, records and faults see an engine: every event, in order, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.engine import MAX_FAILED_STEPS, Engine
from penstock.engine.observer import EngineObserver
from penstock.errors import EngineError
from penstock.interface.messages import EngineRequest
from penstock.interface.step import SchedulerOutput, StepOutput
from tests.engine.test_engine import prompt_of, scripted
from tests.fakes_engine import expected_outputs, make_engine, request, run, token_ids


class Log(EngineObserver):
    """Notes every event, and does what a test wants at one of them."""

    def __init__(self, at: str = "", do: Callable[[], None] = lambda: None) -> None:
        self.events: list[str] = []
        self._at, self._do = at, do

    def _note(self, event: str, what: object = "") -> None:
        self.events.append(f"{event} {what}".strip())
        if event == self._at:
            self._do()

    def arrived(self, request: EngineRequest) -> None:
        self._note("arrived", request.request_id)

    def aborted(self, request_id: str) -> None:
        self._note("aborted", request_id)

    def preempted(self, request_id: str) -> None:
        self._note("preempted", request_id)

    def step_began(self) -> None:
        self._note("began")

    def planning(self) -> None:
        self._note("planning")

    def submitting(self, plan: SchedulerOutput) -> None:
        self._note("submitting", plan.step_id)

    def collected(self, plan: SchedulerOutput, output: StepOutput, seconds: float) -> None:
        assert output.step_id == plan.step_id
        assert seconds >= 0.0
        self._note("collected", plan.step_id)

    def failed(self, plan: SchedulerOutput, error: Exception) -> None:
        self._note("failed", plan.step_id)

    def step_ended(self) -> None:
        self._note("ended")


def observed(log: Log, **options: Any) -> Engine:
    engine = make_engine(**options)
    engine.observe(log)
    return engine


def test_every_event_comes_once_and_in_order() -> None:
    """Guards against an observer that misses an event, gets it twice, or is called when there is nothing to do."""
    log = Log()
    engine = observed(log)
    engine.step()
    assert log.events == []
    engine.add_request(request("a", prompt_of(20), 2))
    run(engine)
    step = ["began", "planning", "submitting {0}", "collected {0}", "ended"]
    steps = [event.format(number) for number in range(3) for event in step]
    assert log.events[:11] == ["arrived a", *steps[:10]]
    assert engine.abort("a") is False
    engine.add_request(request("b", prompt_of(20), 2))
    assert engine.abort("b")
    assert log.events[-2:] == ["arrived b", "aborted b"]
    engine.stop_observing(log)
    engine.add_request(request("c", prompt_of(20), 2))
    assert log.events[-1] == "aborted b"


def test_a_preemption_is_told_by_the_id_that_a_client_knows() -> None:
    """Guards against preemptions that nobody can count, and against a beam's own id that no client has heard of."""
    log = Log()
    engine = observed(log, num_blocks=8, max_num_seqs=4)
    for name in "ab":
        engine.add_request(request(name, prompt_of(40, ord(name)), 60))
    run(engine)
    assert engine.scheduler.num_preemptions == sum(event.startswith("preempted") for event in log.events) > 0
    assert {event.split()[1] for event in log.events if event.startswith("preempted")} <= {"a", "b"}


def test_a_failed_step_is_told_to_all() -> None:
    """Guards against a recorder whose last plan stays open because the executor raised, or another observer did."""
    first, second = Log(), Log()
    engine = observed(first)
    engine.observe(second)
    scripted(engine).fail = lambda step: {}["x"] if step.step_id == 1 else set()  # type: ignore[return-value]
    engine.add_request(request("a", prompt_of(20), 4))
    found = run(engine)
    assert token_ids(found["a"]) == expected_outputs(prompt_of(20), 4)
    assert [event for event in first.events if event.endswith(" 1")] == ["submitting 1", "failed 1"]
    assert first.events == second.events


@pytest.mark.parametrize("event", ["planning", "submitting", "collected"])
def test_an_observer_that_raises_fails_a_step_and_no_request(event: str) -> None:
    """Guards against injected faults that reach a request, and against one that stays without effect."""
    log = Log(event, lambda: {}["injected"] if len(log.events) == wanted else None)
    wanted = {"planning": 8, "submitting": 9, "collected": 10}[event]
    engine = observed(log)
    engine.add_request(request("a", prompt_of(20), 6))
    engine.add_request(request("b", prompt_of(30), 6))
    wanted += 1  # for the second arrival
    found = run(engine)
    assert engine.stats().num_failed_steps_total == 1
    for name, length in (("a", 20), ("b", 30)):
        assert token_ids(found[name]) == expected_outputs(prompt_of(length), 6)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_steps_that_cannot_be_planned_break_the_engine() -> None:
    """Guards against an observer whose every call raises, and an engine that tries for ever."""

    def fail() -> None:
        raise OSError("always")

    engine = observed(Log("planning", fail))
    engine.add_request(request("a", prompt_of(20), 6))
    with pytest.raises(EngineError, match=f"{MAX_FAILED_STEPS} steps in a row failed"):
        run(engine)


def test_checksums_are_asked_for_while_an_observer_wants_them() -> None:
    """Guards against a flight recorder without checksums, and against their cost without one."""
    log = Log()
    engine = observed(log)
    engine.add_request(request("a", prompt_of(20), 6))
    engine.step()
    log.wants_checksums = True
    engine.step()
    engine.stop_observing(log)
    engine.step()
    assert [step.checksum_logits for step in scripted(engine).steps] == [False, True, False]
