"""Failures in the engine room: whoever is to blame fails alone; everybody else gets the tokens that it gets alone."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import kv_cache_manager
from penstock.engine.block_pool import BlockPool
from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.interface.outputs import FinishReason
from penstock.interface.step import SchedulerOutput
from tests.engine.test_engine import prompt_of, scripted
from tests.fakes_engine import expected_outputs, make_engine, request, run, token_ids

LENGTHS = (40, 3, 21, 60, 17)
NUM_TOKENS = 8


def ask_all(engine: Engine, names: Iterable[str] = "abcde") -> None:
    for name, length in zip(names, LENGTHS, strict=True):
        engine.add_request(request(name, prompt_of(length, ord(name)), max_tokens=NUM_TOKENS))


def check_all(outputs: dict[str, Any], failed: Iterable[str] = ()) -> None:
    for name, length in zip("abcde", LENGTHS, strict=True):
        if name in failed:
            assert outputs[name][-1].finish_reason == FinishReason.ERROR
        else:
            assert token_ids(outputs[name]) == expected_outputs(prompt_of(length, ord(name)), NUM_TOKENS)
            assert all(output.error is None for output in outputs[name])


@settings(max_examples=60)
@given(
    poisonous=st.sets(st.sampled_from("abcde"), max_size=2),
    after=st.integers(0, 6),
    chunk=st.integers(5, 80),
    blocks=st.integers(9, 40),
    depth=st.sampled_from([1, 2, 4]),
)
def test_a_request_that_breaks_its_steps_fails_alone(
    poisonous: set[str], after: int, chunk: int, blocks: int, depth: int
) -> None:
    """Guards against an exception in the model that ends every request which happened to be in the same step."""
    engine = make_engine(num_blocks=blocks, max_num_batched_tokens=chunk, max_num_seqs=5, depth=depth)

    def fail(step: SchedulerOutput) -> set[str]:
        """A poisonous request breaks every step that it is in, once it has some outputs."""
        known = scripted(engine).rows | {new.request_id: new for new in step.new_requests}
        for item in step.scheduled:
            row = known[item.request_id]
            if item.request_id in poisonous and len(row.token_ids) - row.num_prompt_tokens >= after:
                raise RuntimeError("poison")
        return set()

    scripted(engine).fail = fail
    ask_all(engine)
    outputs = run(engine)
    check_all(outputs, poisonous)
    assert all(outputs[name][-1].error == "RuntimeError: poison" for name in poisonous)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


@pytest.mark.parametrize("failing", range(1, 14))
def test_a_step_that_fails_once_costs_nobody_anything(failing: int) -> None:
    """Guards against an error of the moment that ends requests which had nothing to do with it."""
    engine = make_engine(max_num_batched_tokens=40, max_num_seqs=5)

    def fail(step: SchedulerOutput) -> set[str]:
        if len(scripted(engine).steps) == failing:
            raise OSError("of the moment")
        return set()

    scripted(engine).fail = fail
    ask_all(engine)
    check_all(run(engine))


def test_a_step_without_memory_leaves_its_requests_as_they_were() -> None:
    """Guards against requests that end, or lose a token, for a lack of memory that is not theirs: whoever steps the
    engine hears of it, and may step it again."""
    engine = make_engine(max_num_batched_tokens=40, max_num_seqs=5)

    def fail(step: SchedulerOutput) -> set[str]:
        if len(scripted(engine).steps) == 3:
            raise MemoryError
        return set()

    scripted(engine).fail = fail
    ask_all(engine)
    outputs = [output for _ in range(2) for output in engine.step()]
    with pytest.raises(MemoryError):
        engine.step()
    found = run(engine)
    for output in reversed(outputs):
        found.setdefault(output.request_id, []).insert(0, output)
    check_all(found)


def test_no_memory_for_a_request_that_is_tried_alone_forgets_no_other() -> None:
    """Guards against a second failure that lets the others, of whom one is to blame, run together again."""
    engine = make_engine(max_num_batched_tokens=40, max_num_seqs=5)

    def fail(step: SchedulerOutput) -> set[str]:
        if len(scripted(engine).steps) in (3, 5):
            raise RuntimeError("scripted") if len(scripted(engine).steps) == 3 else MemoryError
        return set()

    scripted(engine).fail = fail
    ask_all(engine)
    outputs = [output for _ in range(4) for output in engine.step()]
    with pytest.raises(MemoryError):
        engine.step()
    alone = engine.scheduler._alone
    assert len(alone) > 1
    outputs += engine.step()
    assert len(engine.executor.steps[-1].scheduled) == 1  # type: ignore[attr-defined]
    found = run(engine)
    for output in reversed(outputs):
        found.setdefault(output.request_id, []).insert(0, output)
    check_all(found)


def test_aborting_the_one_that_is_tried_goes_on_with_the_next() -> None:
    """Guards against a queue that waits for ever for a request that is gone."""
    engine = make_engine(max_num_seqs=5)
    scripted(engine).fail = lambda step: {}["x"] if len(scripted(engine).steps) == 1 else set()
    ask_all(engine)
    engine.step()
    for name in "ab":
        assert engine.abort(name)
    outputs = run(engine)
    assert "a" not in outputs
    assert set(outputs) == set("cde")
    for name, length in zip("cde", LENGTHS[2:], strict=True):
        assert token_ids(outputs[name]) == expected_outputs(prompt_of(length, ord(name)), NUM_TOKENS)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [*((BlockPool, name) for name in ("allocate", "share", "release", "register", "lookup")),
     (kv_cache_manager, "hash_block")],
)  # fmt: skip
def test_bookkeeping_that_breaks_off_is_made_anew(
    owner: Any, name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against blocks that leak, tokens that are lost and an engine that dies when an allocation or a commit
    raises half-way: each call of a run does so in turn."""
    original = getattr(owner, name)
    calls = failing = 0

    def break_off(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError("injected")
        return original(*args)

    monkeypatch.setattr(owner, name, break_off)
    while calls >= failing:
        calls, failing = 0, failing + 1
        engine = make_engine(num_blocks=14, max_num_batched_tokens=30, max_num_seqs=5, depth=depth)
        ask_all(engine)
        outputs = run(engine)
        failed = {key for key, found in outputs.items() if found[-1].error is not None}
        assert len(failed) <= 1  # whose results could not be committed
        assert all(outputs[key][-1].error == "MemoryError: injected" for key in failed)
        check_all(outputs, failed)
        assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
        engine.add_request(request("after", [1], max_tokens=1))
        run(engine)
        assert set(scripted(engine).rows) == {"after"}  # the executor has forgotten all others
    assert failing > 3


def test_an_engine_that_always_fails_says_so() -> None:
    """Guards against an engine that tries for ever."""
    engine = make_engine()
    scripted(engine).fail = lambda step: {}["broken"]
    ask_all(engine)
    with pytest.raises(EngineError, match="3 steps in a row failed"):
        run(engine)
