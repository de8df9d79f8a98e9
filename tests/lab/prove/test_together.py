"""The proof of all features at once: a sample of it passes, and it finds an engine that breaks the promise."""

from typing import Any

import numpy as np
import pytest

from penstock import PenstockError
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.kernels.tensors import as_array
from penstock.runner.model_runner import ModelRunner
from penstock_lab.prove import together
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.together import Together
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("C18")]


def prove(goal: int) -> Outcome:
    outcome = Outcome(Together.name, Together.promise, Together.unit)
    Together().run(Trials(Subject(options={"max_model_len": 200}), outcome, goal=goal, seed=1))
    return outcome


@pytest.fixture(autouse=True)
def one_rush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "ARRIVAL_RATES", (1.0,))


def test_a_sample() -> None:
    """Guards against features that are right alone and wrong together, on a real model."""
    outcome = prove(25)
    assert outcome.wrong == []
    assert outcome.tried == 25
    assert outcome.figures["aborted"]
    assert outcome.figures["preemptions"]
    assert outcome.figures["drafts"]  # how many are accepted depends on who is aborted when


def test_what_depends_on_the_crowd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that cannot fail: here logits are one unit in the last place higher in company."""
    right = ModelRunner.without_padding

    def wrong(self: ModelRunner, logits: Any) -> Any:
        logits = right(self, logits)
        return logits if len(logits) == 1 else self.ops.tensor(np.nextafter(as_array(logits), np.float32(np.inf)))

    monkeypatch.setattr(ModelRunner, "without_padding", wrong)
    outcome = prove(8)
    assert "log-probabilities of" in outcome.wrong[0]


def test_lost_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that does not look at the blocks."""
    monkeypatch.setattr(KVCacheManager, "free", lambda *_: None)
    with pytest.raises(PenstockError, match="block"):
        prove(2)
