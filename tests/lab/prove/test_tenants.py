"""The proof that keys are apart: its hostile key's requests are served, its comparison is right, and a quota holds."""

import contextlib

import pytest

from penstock_lab.prove import tenants
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.servers import serve
from penstock_lab.prove.tenants import WAYS, Attacker, Tenants, Times

REFUSED_IN_PART = {"forms that take long"}  # their limit of time is reached
# Ways that have no answers, or none that are looked at.
WITHOUT_ANSWERS = {
    "abandoned streams", "streams that are left", "streams that are not read", "idle connections", "embeddings",
    "bodies in chunks of one byte", "reports",
}  # fmt: skip


def test_the_hostile_key_is_served_and_a_quota_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against attacks that a wrong field or key ends at the door, against a quota that is passed, and against a
    busy machine that is taken for an attack."""
    monkeypatch.setattr(tenants, "PHASE_S", 1.5)
    statuses: dict[str, int | None] = {}

    class Watched(Attacker):
        def send(self, path, body):  # type: ignore[no-untyped-def]
            answer = super().send(path, body)
            statuses[way] = None if answer is None else answer.status_code
            return answer

    proof = Tenants()
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    subject = Subject("demo", {"threads": 1, "dtype": "float32"})
    with tenants._key_file() as keys, serve(subject, f"--api-key-file={keys}") as server:
        attacker = Watched(server.url)
        for way in WAYS.keys() - WITHOUT_ANSWERS:
            WAYS[way](attacker)
        trials = Trials(subject, outcome, goal=1, seed=0)
        tenants._check_quota(trials, server)
        monkeypatch.setattr(tenants, "serve", lambda *_: contextlib.nullcontext(server))
        for name, value in {"ATTEMPTS": 1, "FACTOR": 0.0, "FLOOR_S": 0.0, "PHASE_S": 0.3}.items():
            monkeypatch.setattr(tenants, name, value)
        proof.run(trials)
    assert "too busy" in (outcome.skipped or "")
    assert {way for way, status in statuses.items() if status != 200} == REFUSED_IN_PART
    assert outcome.wrong == []
    assert outcome.figures["quota_used_of_allowed"] > 0.3


def test_what_others_wait_for_is_compared() -> None:
    """Guards against a comparison that finds nothing: longer waits, in either kind of answer, and refusals."""
    alone = Times([0.1] * 3, [0.2] * 3)
    assert tenants._compare(alone, Times([0.15] * 3, [0.3] * 3)) == (pytest.approx(1.5), "")
    assert "first token" in tenants._compare(alone, Times([0.3] * 3, [0.2] * 3))[1]
    assert "form" in tenants._compare(alone, Times([0.1] * 3, [0.6] * 3))[1]
    assert "refused" in tenants._compare(alone, Times([0.1], [0.1], ["429"]))[1]
