"""The sweep of faults: a sample of it passes, and it finds an engine that pays more than it must."""

from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock_lab.prove import faults, tiny_models
from penstock_lab.prove.faults import FAULTS, Faults
from penstock_lab.prove.proof import Outcome, Subject, Trials
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A tiny model, so that many trials take little time."""
    return Subject(tiny_models.write(tmp_path_factory.mktemp("models"))["Llama"], {"load_format": "dummy"})


def prove(subject: Subject, goal: int) -> Outcome:
    outcome = Outcome(Faults.name, Faults.promise, Faults.unit)
    Faults().run(Trials(subject, outcome, goal=goal, seed=0))
    return outcome


def test_the_first_of_each_kind(subject: Subject) -> None:
    """Guards against a call whose failure ends another request than its own, or the engine, or leaks a block."""
    outcome = prove(subject, len(FAULTS))
    assert outcome.wrong == []
    assert outcome.tried == len(FAULTS)


def test_later_ones_in_this_process(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a failure in the middle of a decode or a preemption, where the first call is not."""
    for name in ("frames sent", "frames received"):
        monkeypatch.delitem(faults.FAULTS, name)
    outcome = prove(subject, 4 * len(FAULTS))
    assert outcome.wrong == []


def test_an_engine_that_fails_everybody_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sweep that cannot fail: here a failed step ends all its requests, as it once did."""
    step = Engine.step

    def costly(self: Engine) -> Any:
        monkeypatch.setattr(type(self.scheduler), "is_trying", True)
        return step(self)

    monkeypatch.setattr(Engine, "step", costly)
    monkeypatch.setattr(faults, "FAULTS", {"steps computed": FAULTS["steps computed"]})
    outcome = prove(subject, 12)
    assert any("answers failed" in wrong for wrong in outcome.wrong)
