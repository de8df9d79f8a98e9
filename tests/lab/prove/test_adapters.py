"""A sample of the proof about adapters, and that it notices a wrong one."""

import pytest

from penstock.client.adapters import Adapter
from penstock.kernels.cpu.library import load_library
from penstock_lab.prove import adapters, streams
from penstock_lab.prove.adapters import AdapterChanges
from penstock_lab.prove.proof import Outcome, Subject, Trials

pytestmark = pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")


def outcome_of(goal: int, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    for name, value in (("NUM_CONTENTS", 4), ("NUM_STREAMS", 2), ("NUM_READERS", 4), ("WARM_UP", 3)):
        monkeypatch.setattr(adapters, name, value)
    monkeypatch.setattr(adapters, "KILLS_PER_CLIENT", 1)
    monkeypatch.setattr(streams, "MAX_OUTPUT_TOKENS", 60)
    proof = AdapterChanges()
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject(), outcome, goal=goal, seed=0))
    return outcome


@pytest.mark.covers("J23")
def test_every_stream_is_computed_with_its_own_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(12, monkeypatch)
    assert (outcome.tried, outcome.wrong) == (12, [])
    assert (outcome.figures["different_answers"], outcome.figures["kills"]) == (5, 1)
    assert outcome.figures["streams"] >= 4


def test_a_name_that_stands_for_other_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that would pass whatever happened: ids without the content, as names are."""
    monkeypatch.setattr(Adapter, "id", property(lambda self: f"{self.name}@0"))
    assert outcome_of(12, monkeypatch).num_wrong > 0
