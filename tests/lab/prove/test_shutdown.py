"""A sample of the proof that SIGTERM cuts no stream; `penstock prove --only drains` makes 200 trials."""

from penstock_lab.prove.proof import Subject
from penstock_lab.prove.run import run_proofs
from penstock_lab.prove.shutdown import Drains


def test_a_few_drains() -> None:
    """Guards against a stream that is cut by a restart of its server, and an engine that outlives it."""
    (outcome,) = run_proofs(Subject("demo", {"threads": 1}), [Drains()], minutes=0, seed=1)  # at least one a core
    assert outcome.wrong == []
    assert outcome.passed
    assert int(outcome.figures["streams_finished"]) > 0
