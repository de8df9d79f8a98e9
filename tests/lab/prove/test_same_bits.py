"""The proof of the same bits: a sample of it passes, and it finds an engine that breaks the promise."""

from typing import Any

import numpy as np
import pytest

from penstock.engine import kv_cache_manager
from penstock.kernels.tensors import as_array
from penstock.runner.model_runner import ModelRunner
from penstock_lab.prove import axes
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.same_bits import SameBits
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")


def prove(goal: int, *, seed: int = 0, **options: Any) -> Outcome:
    outcome = Outcome(SameBits.name, SameBits.promise, SameBits.unit)
    SameBits().run(Trials(Subject(options=options), outcome, goal=goal, seed=seed))
    return outcome


@pytest.fixture(autouse=True)
def small_crowds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "CROWDS", (1, 2, 3, 8))
    monkeypatch.setattr(axes, "ENTRY_WEIGHTS", {"offline": 1})


@pytest.mark.parametrize("via", axes.ENTRY_WEIGHTS)
def test_a_sample_of_the_product(via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bit that depends on anything but the request, here, in AsyncLLM and over HTTP, where the engine
    is killed in between."""
    monkeypatch.setattr(axes, "ENTRY_WEIGHTS", {via: 1})
    outcome = prove(40 if via == "offline" else 12)  # the others start processes for each of their engines
    assert outcome.wrong == []
    assert outcome.passed
    tried = outcome.details["comparisons"]
    assert tried[f"via: {via}"] == outcome.tried
    assert via == "offline" or tried["disturbance: engine killed"]
    assert outcome.details["left out"] == {}


def test_a_kernel_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that cannot fail: here logits are one unit in the last place higher in company."""
    right = ModelRunner.without_padding

    def wrong(self: ModelRunner, logits: Any) -> Any:
        logits = right(self, logits)
        return logits if len(logits) == 1 else self.ops.tensor(np.nextafter(as_array(logits), np.float32(np.inf)))

    monkeypatch.setattr(ModelRunner, "without_padding", wrong)
    outcome = prove(25)
    assert outcome.num_wrong > 3
    assert "log-probabilities" in outcome.wrong[0]
    assert "repeat it with --only same-bits --seed" in outcome.wrong[0]


def test_a_cache_that_confuses_prompts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a proof that cannot fail: here a block is known by its place in the prompt, not by its content."""
    monkeypatch.setitem(axes.LAYOUTS, "prefixes", {"kept": {"enable_prefix_caching": True}})
    monkeypatch.setitem(axes.LAYOUTS, "blocks", {"of 16": {"block_size": 16}})
    monkeypatch.setattr(kv_cache_manager, "hash_block", lambda parent, token_ids: parent + b"x")
    assert prove(30).num_wrong > 3
