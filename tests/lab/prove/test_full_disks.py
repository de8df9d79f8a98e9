"""A sample of the proof of full disks, and that it notices a broken promise."""

import pytest

from penstock.kernels.cpu.library import load_library
from penstock_lab.prove import full_disks
from penstock_lab.prove.full_disks import FullDisks
from penstock_lab.prove.proof import Outcome, Subject, Trials


@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
def test_a_full_disk_costs_a_refusal_and_a_lost_answer_is_noticed(monkeypatch):
    """Guards against a call that is taken and not written down, and a proof that would pass whatever happened."""
    monkeypatch.setattr(full_disks, "NUM_KINDS", 2)
    monkeypatch.setattr(full_disks, "TRIALS_PER_SERVER", 2)
    rightly, proof = full_disks._check, FullDisks()

    def check(trials, http, calls, when):
        if when == "after a kill":
            for call in calls:
                call.expected += "?"
        rightly(trials, http, calls, when)

    monkeypatch.setattr(full_disks, "_check", check)
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject(), outcome, goal=2, seed=0))
    assert outcome.tried == 2
    assert outcome.figures["calls_refused"] >= 2
    assert outcome.num_wrong == outcome.figures["calls_taken"]
    assert all(text.startswith("after a kill") for text in outcome.wrong)
