"""The engine's promises as `penstock check` tries them: kept on real engines, and broken ones are noticed."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_lab.check import proofs
from penstock_lab.check.proofs import INT8_CACHE, SPREAD, WRONG, Generated, Setting, difference, make_prompts, prove
from penstock_lab.check.report import Proof, Report
from penstock_lab.cli.check import verdict_line
from tests.families.case import Case, all_cases
from tests.hf_models import TINY, make_llama
from tests.kernels.packed import levels

FULL = [case for case in all_cases() if case.full]


@pytest.mark.parametrize("kernels", ["reference", *(["cpu"] if levels() else [])])
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_promises_are_kept(case: Case, kernels: str, tmp_path: Path) -> None:
    """Guards against an engine whose answers depend on how they were computed, on a model with every feature."""
    _, directory = case.make(tmp_path)
    setting = Setting(directory, "float32", kernels, make_prompts(40, TINY["vocab_size"]))
    found = list(prove(setting))
    assert all(proof.passed for proof in found), found
    assert len(found) == 8
    exact = [proof.error for proof in found if proof.allowed == 0]
    assert len(exact) == (6 if kernels == "cpu" else 0)
    assert all(proof.error > 0 for proof in found if proof.name.startswith("int8"))


BROKEN: dict[str, tuple[str, Any]] = {  # the option by which the engine of a proof is known
    "chunks of 13 = whole": ("max_num_batched_tokens", 13),
    "blocks of 64 = blocks of 16": ("block_size", 64),
    "int8 cache": ("kv_cache_dtype", "int8"),
}


def with_options(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Engines of the proofs get options that are changed."""
    build = proofs.EngineConfig.from_options
    changed = staticmethod(lambda **given: build(**given | change(given)))
    monkeypatch.setattr(proofs, "EngineConfig", type("Changed", (), {"from_options": changed}))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against proofs that cannot fail: one engine computes with another model."""
    (_, directory), (_, other) = make_llama(tmp_path), make_llama(tmp_path, seed=1)
    option, value = BROKEN[name]
    with_options(monkeypatch, lambda given: {"model": str(other)} if given.get(option) == value else {})
    found = list(prove(Setting(directory, "float32", "reference", make_prompts(30, TINY["vocab_size"]))))
    assert [proof.name for proof in found if not proof.passed] == [name]


def test_a_prefix_that_is_never_found_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache that is off, and so cannot be wrong."""
    _, directory = make_llama(tmp_path)
    with_options(monkeypatch, lambda given: {"enable_prefix_caching": False})
    setting = Setting(directory, "float32", "reference", make_prompts(30, TINY["vocab_size"]))
    found = {proof.name: proof for proof in prove(setting)}
    assert found["cached prefix = computed"].error == math.inf


@pytest.mark.parametrize(("error", "verdict"), [(0.015, "ok"), (0.06, "costly"), (0.3, "broken")])
def test_rounding_that_costs_a_model_much_is_advised_against(error: float, verdict: str) -> None:
    """Guards against a sound model that fails for an option that it need not use, and a wrong one that passes."""
    proof = Proof("int8 cache", error, INT8_CACHE, SPREAD, WRONG)
    report = Report(
        model="m", architecture="a", weights="w", kernels="cpu", dtype="float32", prompt_len=1, proofs=(proof,)
    )
    assert (proof.verdict, report.passed) == (verdict, verdict != "broken")
    assert ("better without int8 cache" in verdict_line(report)) is (verdict == "costly")


def test_differences() -> None:
    """Guards against answers that differ in their ids or their length alone."""
    answer = Generated([1, 2], [-1.0, -2.0], [-3.0], 0)
    assert difference(answer, answer) == 0
    assert difference(Generated([1, 3], [-1.0, -2.0], [-3.0], 0), answer) == math.inf
    assert difference(Generated([1, 2], [-1.0, -2.5], [-3.0], 0), answer) == 0.5
    assert difference(Generated([1, 2], [-1.0, -2.0], [], 0), answer) == math.inf
    assert difference(Generated([1, 2], [-1.0, math.nan], [-3.0], 0), answer) == math.inf
