"""The memory ledger: `memory` makes an engine fit, or is refused with a change that fits."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.assembly import build_engine
from penstock.assembly.memory import Ledger, ModelSizes
from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from tests.assembly.test_memory import PLENTY, model
from tests.kernels.packed import levels

MIB = 2**20
WEIGHTS = {None: 40 * MIB, "int8": 20 * MIB, "int4": 12 * MIB}
LEDGER = Ledger(
    model(),
    lambda scheme: ModelSizes(WEIGHTS[scheme and scheme.name], 8192, 100, 128),
    runtime_bytes=30 * MIB,
    free_bytes=PLENTY,
)


def config(**options) -> EngineConfig:
    return EngineConfig.from_options(kernels="reference", **options).resolve(LEDGER.model)


@given(memory=st.integers(60 * MIB, 200 * MIB), seqs=st.integers(1, 64), tokens=st.integers(64, 4096))
@settings(max_examples=60)
def test_what_is_planned_fits(memory: int, seqs: int, tokens: int) -> None:
    """Guards against a cache, or a context, that is chosen too large for the memory given, or smaller than it needs."""
    asked = config(memory=memory, max_num_seqs=min(seqs, tokens), max_num_batched_tokens=tokens)
    try:
        chosen, plan = LEDGER.fit(asked)
    except InvalidRequestError:
        assume(False)  # which memory is refused, and with which words, is the next test's subject
    assert plan.total <= memory
    assert plan.total == sum(plan.entries.values())
    length = chosen.scheduler.max_model_len
    if length < 512:
        assert "room for" in chosen.reasons["max_model_len"]
        longer = replace(chosen, scheduler=replace(chosen.scheduler, max_model_len=length + 64))
        with pytest.raises(InvalidRequestError):
            LEDGER.plan(longer)


@pytest.mark.parametrize("memory", [66 * MIB, 75 * MIB, 82 * MIB, 92 * MIB])
def test_a_refusal_names_a_change_that_fits(memory: int) -> None:
    """Guards against advice that, once followed, is refused again."""
    asked = {"memory": memory, "max_model_len": 512, "max_num_batched_tokens": 2048}
    with pytest.raises(InvalidRequestError, match="is too little") as caught:
        LEDGER.fit(config(**asked))
    advice = re.search(r"; (\w+) = (\w+) fits, or memory = ([\d.]+) MiB", str(caught.value))
    assert advice is not None, caught.value
    name, value, enough = advice.groups()
    LEDGER.fit(config(**asked | {name: int(value) if value.isdigit() else value}))
    LEDGER.fit(config(**asked | {"memory": int((float(enough) + 0.1) * MIB)}))
    with pytest.raises(InvalidRequestError):
        LEDGER.fit(config(**asked | {"memory": int((float(enough) - 0.1) * MIB)}))


def test_a_context_that_was_asked_for_is_not_cut() -> None:
    """Guards against a user's max_model_len that is silently made smaller."""
    asked = {"memory": 92 * MIB, "max_num_batched_tokens": 2048}
    assert LEDGER.fit(config(**asked))[0].scheduler.max_model_len < 512
    with pytest.raises(InvalidRequestError, match="max_model_len = 512 needs"):
        LEDGER.fit(config(**asked, max_model_len=512))


def test_torch_is_not_planned() -> None:
    """Guards against a limit that is accepted and not kept."""
    with pytest.raises(InvalidRequestError, match="memory"):
        build_engine(EngineConfig.from_options(kernels="reference", memory=2**33))


@pytest.mark.skipif(not levels(), reason="no native library")
def test_the_engine_follows_the_plan() -> None:
    """Guards against a plan that the engine does not follow."""
    built = build_engine(EngineConfig.from_options(memory=2**33, max_num_seqs=2))
    assert built.info.memory["cache"] == built.cache_bytes
    assert built.info.choices_made["memory"].startswith(f"{sum(built.info.memory.values()) / MIB:.1f} MiB: runtime")


def test_the_cache_takes_what_the_rest_leaves() -> None:
    """Guards against a share of the free memory where the whole of it was given."""
    _, plenty = LEDGER.fit(config(memory=2**34, max_num_seqs=8))
    _, tight = LEDGER.fit(config(memory=plenty.total - plenty.cache.num_bytes // 4, max_num_seqs=8))
    assert 0.74 * plenty.cache.num_bytes < tight.cache.num_bytes <= 0.75 * plenty.cache.num_bytes
    assert "the rest of the memory given" in tight.cache.reason
