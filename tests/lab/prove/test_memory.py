"""The proof of the memory plan, on one engine; and that it can fail."""

import pytest

from penstock_lab.prove import memory
from penstock_lab.prove.memory import MemoryPlanProof
from penstock_lab.prove.proof import Outcome, Subject, Trials
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")


def prove(**options) -> Outcome:
    proof = MemoryPlanProof()
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    subject = Subject("demo", {"max_model_len": 256, "max_num_seqs": 8, "threads": 1, **options})
    proof.run(Trials(subject, outcome, goal=1, seed=0))
    return outcome


def test_a_full_engine_takes_what_was_planned() -> None:
    """Guards against buffers that nobody counted."""
    outcome = prove()
    assert outcome.passed, outcome.wrong


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that compares nothing."""
    monkeypatch.setattr(memory, "TOLERANCE", 1e-6)
    assert not prove().passed
