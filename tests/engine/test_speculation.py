"""Speculation in the engine, on the ScriptedExecutor: drafts, right or wrong, change how many steps a text takes, and
neither a token nor a block."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.engine.speculation import Speculation, ring_slack
from penstock.interface.outputs import FinishReason
from penstock.interface.step import CacheGroup, DraftQuery
from penstock_lab.prove.every_draft import EveryDraft
from tests.fakes_drafts import Oracle
from tests.fakes_engine import VOCAB, expected_outputs, make_engine, request, run, token_ids

pytestmark = pytest.mark.covers("C18")


def oracle(window: int | None = None, **options: object) -> Oracle:
    options = {"vocab_size": VOCAB, **options}
    return Oracle(lambda _, ids, count: expected_outputs(ids, count, window), **options)  # type: ignore[arg-type]


def speculation(proposer: Oracle, most: int = 5) -> Speculation:
    return Speculation(proposer, most, policy=EveryDraft())


def spent(engine: Engine) -> int:
    return engine.stats().num_steps_total


def test_right_drafts_save_their_steps() -> None:
    """Guards against drafts that are proposed and never computed, and tokens after the drafts that are lost."""
    found = speculation(oracle(), 4)
    engine = make_engine(speculation=found)
    engine.add_request(request("a", [1, 2, 3], 20))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == expected_outputs([1, 2, 3], 20)
    assert spent(engine) == 1 + 19 // 5 + 1  # the prompt, then 5 tokens a step
    assert [output.start_index for output in outputs] == [0, 1, 6, 11, 16]
    stats = engine.stats()
    assert stats.num_drafts_total == 4
    assert stats.num_draft_tokens_total == stats.num_accepted_tokens_total == 4 + 4 + 4 + 3
    assert stats.num_accepted_tokens_per_pos_total == [4, 4, 4, 3]
    assert sum(output.num_accepted_tokens for output in outputs) == 15


def test_wrong_drafts_cost_no_token() -> None:
    """Guards against a rejected draft in the text, and against lengths that count it as computed."""
    engine = make_engine(speculation=speculation(oracle(share=0.0)))
    engine.add_request(request("a", [1, 2, 3], 12))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == expected_outputs([1, 2, 3], 12)
    assert spent(engine) == 12
    assert sum(output.num_rejected_tokens for output in outputs) == engine.stats().num_draft_tokens_total == 40
    assert engine.stats().num_accepted_tokens_total == 0


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_random_drafts_change_nothing_but_the_number_of_steps(seed: int) -> None:
    """Guards, over windows, rings, shared prefixes, preemptions, aborts, failed steps and resumptions, against blocks
    released or registered for tokens that were only guessed, and rows of a ring overwritten by them."""
    random = Random(seed)
    window = random.choice([None, 20, 33])
    engine = make_engine(
        num_blocks=random.choice([14, 20, 60]),
        windows=random.choice([(window,), (None, window)]),
        max_num_seqs=random.choice([2, 4, 8]),
        max_num_batched_tokens=random.choice([8, 13, 64]),
        max_model_len=160,
        user_rows=random.random() < 0.3,
        speculation=speculation(oracle(window, share=random.choice([0.0, 0.5, 0.9, 1.0]), random=random), 7),
    )
    executor = engine.executor
    executor.fail = lambda step: _trouble(random)  # type: ignore[attr-defined]
    shared = random.choices(range(VOCAB), k=50)
    wanted: dict[str, list[int]] = {}
    given: dict[str, list[int]] = {}
    for index in range(random.randint(1, 8)):
        prompt = shared[: random.randrange(50)] + random.choices(range(VOCAB), k=random.randint(1, 20))
        total = random.randint(1, 60)
        whole = expected_outputs(prompt, total, window)
        given[str(index)] = whole[: random.randrange(total)] if random.random() < 0.3 else []
        wanted[str(index)] = whole[len(given[str(index)]) :]
        engine.add_request(request(str(index), prompt, total, output_token_ids=given[str(index)]))
    found: dict[str, list[int]] = {name: [] for name in wanted}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
            if output.finish_reason is FinishReason.ERROR:
                wanted[output.request_id] = found[output.request_id]
        engine.check_integrity()
        if random.random() < 0.02 and engine._requests:
            name = random.choice(list(engine._requests))
            engine.abort(name)
            wanted[name] = wanted[name][: len(found[name])]
    assert found == wanted
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def _trouble(random: Random) -> set[str]:
    if random.random() < 0.02:
        raise ValueError("scripted")
    return set()


def test_a_text_ends_within_its_drafts() -> None:
    """Guards against tokens after an end token or max_tokens, and a cached prefix that reaches beyond the text."""
    whole = expected_outputs([5], 40)
    for count in range(1, 40):
        engine = make_engine(eos_token_ids=(whole[count - 1],), speculation=speculation(oracle(), 16))
        first = whole.index(whole[count - 1])
        engine.add_request(request("a", [5], 40))
        outputs = run(engine)["a"]
        assert token_ids(outputs) == whole[: first + 1]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
        again = make_engine(max_model_len=1 + count, speculation=speculation(oracle(), 16))
        again.add_request(request("a", [5], 100))
        outputs = run(again)["a"]
        assert token_ids(outputs) == whole[:count]
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_min_tokens_and_stop_tokens_within_drafts() -> None:
    """Guards against an end token among the drafts that counts before min_tokens, or is passed over after them."""
    whole = expected_outputs([9, 9], 30)
    engine = make_engine(speculation=speculation(oracle(), 8))
    engine.add_request(request("a", [9, 9], 30, stop_token_ids=[whole[3], whole[17]], min_tokens=10))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == whole[:18]
    assert outputs[-1].stop_reason == whole[17]


def test_drafts_take_only_what_is_left_over() -> None:
    """Guards against a request preempted, or a stream without its token, because another's drafts took the room."""
    engine = make_engine(num_blocks=4, max_num_seqs=4, max_num_batched_tokens=6, speculation=speculation(oracle(), 5))
    for name in "abcd":
        engine.add_request(request(name, [ord(name)], 16))
    engine.step()
    while engine.has_work:
        outputs = engine.step()
        engine.check_integrity()
        running = {item.request_id for item in engine.executor.steps[-1].scheduled}  # type: ignore[attr-defined]
        assert running <= {output.request_id for output in outputs}
        assert engine.executor.steps[-1].num_tokens <= 6  # type: ignore[attr-defined]
    assert engine.stats().num_preemptions_total == 0


class Broken(Oracle):
    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        raise RuntimeError("scripted")


def test_a_proposer_that_fails_costs_the_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a draft model out of memory that ends requests which do not need it."""
    engine = make_engine(speculation=speculation(Broken(lambda *_: [])))
    engine.add_request(request("a", [1], 5))
    assert token_ids(run(engine)["a"]) == expected_outputs([1], 5)
    assert "proposer of drafts failed" in caplog.text


def test_the_end_of_a_request_reaches_the_proposer() -> None:
    """Guards against a proposer that grows with every request that ever was."""
    proposer = oracle()
    engine = make_engine(speculation=speculation(proposer))
    for name in "ab":
        engine.add_request(request(name, [3], 4))
    engine.step()
    engine.abort("b")
    run(engine)
    assert sorted(proposer.forgotten) == ["a", "b"]


def test_a_ring_tolerates_what_it_has_to_spare() -> None:
    """Guards against a draft in the row of a token that the next one still attends to."""
    assert ring_slack(CacheGroup((0,), 16, 1, 16, ring=True)) == 1
    assert ring_slack(CacheGroup((0,), 20, 1, 32, ring=True)) == 13
