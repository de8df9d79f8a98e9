"""The engine on a scripted executor: who gets which tokens, whatever the crowd, the cache and the chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.errors import EngineError, InvalidRequestError, PenstockError
from penstock.interface.messages import EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup
from tests.fakes_engine import ScriptedExecutor, expected_outputs, make_engine, request, run, token_ids


def scripted(engine) -> ScriptedExecutor:
    assert isinstance(engine.executor, ScriptedExecutor)
    return engine.executor


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 997 for i in range(length)]


def test_one_request_gets_its_tokens_and_ends_by_length():
    engine = make_engine()
    engine.add_request(request("a", [5, 6, 7], max_tokens=5))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == expected_outputs([5, 6, 7], 5)
    assert [output.start_index for output in outputs] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


REQUESTS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 30), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(
    requests=REQUESTS,
    chunk=st.integers(3, 70),
    rows=st.integers(1, 5),
    blocks=st.integers(11, 40),
    windows=st.sampled_from([(None,), (20,), (None, 9), (33, 1)]),
    sinks=st.sampled_from([0, 4, 33]),
    chunked=st.booleans(),
    caching=st.booleans(),
    user_rows=st.booleans(),
    depth=st.sampled_from([1, 2, 4]),
)
def test_any_crowd_gives_every_request_its_solo_tokens(
    requests, chunk, rows, blocks, windows, sinks, chunked, caching, user_rows, depth
):
    """Guards against lost, shared or too early reused blocks: chunks, preemption, prefix hits, windows that slide or do
    not, sinks, rings at once, in one step after the other or several in flight.

    The executor checks on every step that each cached position still holds what its request wrote.
    """
    engine = make_engine(
        num_blocks=max(1, blocks - 10) if user_rows else blocks,
        windows=windows,
        sinks=sinks,
        chunked=chunked,
        user_rows=user_rows,
        max_num_seqs=rows,
        max_num_batched_tokens=max(chunk, rows),
        max_model_len=160,
        enable_prefix_caching=caching,
        depth=depth,
    )
    outputs: dict[str, list] = {}
    pending = list(enumerate(requests))
    while pending or engine.has_work:
        while pending and pending[0][1][2] <= len(scripted(engine).steps):
            index, (length, count, _, family) = pending.pop(0)
            flow = f"flow {family}"
            engine.add_request(request(str(index), prompt_of(length, family), max_tokens=count, flow=flow))
        if not engine.has_work and pending:
            index, (length, count, _, family) = pending.pop(0)
            engine.add_request(request(str(index), prompt_of(length, family), max_tokens=count))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        assert len(engine.scheduler.running) <= rows
        assert scripted(engine).steps[-1].num_tokens <= max(chunk, rows)
    window = min(window or 10**9 for window in windows)
    for index, (length, count, _, family) in enumerate(requests):
        expected = expected_outputs(prompt_of(length, family), count, window)
        assert token_ids(outputs[str(index)]) == expected[: 160 - length]
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


@settings(max_examples=40)
@given(cut=st.integers(0, 20), length=st.integers(1, 60), chunk=st.integers(2, 40))
def test_resumed_request_goes_on_as_if_it_had_never_stopped(cut, length, chunk):
    """Tokens that come back as outputs count for lengths and positions, and are not sent again."""
    prompt = prompt_of(length)
    expected = expected_outputs(prompt, 20)
    engine = make_engine(max_num_batched_tokens=chunk, max_num_seqs=2)
    engine.add_request(request("a", prompt, max_tokens=20, output_token_ids=expected[:cut]))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == expected[cut:]
    assert outputs[0].start_index == cut
    assert outputs[-1].finish_reason == FinishReason.LENGTH


def test_chunks_mix_with_decodes_and_never_stall_them():
    """A long prompt must not hold up a stream: the decode gets its token in every step."""
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add_request(request("stream", [1, 2, 3], max_tokens=12))
    engine.step()
    engine.add_request(request("long", prompt_of(60), max_tokens=1))
    for _ in range(8):
        assert "stream" in {output.request_id for output in engine.step()}
    sizes = [{item.request_id: item.num_new_tokens for item in step.scheduled} for step in scripted(engine).steps[1:]]
    assert all(step == {"stream": 1, "long": 7} for step in sizes[:7])


def test_prefix_is_found_again_and_reported():
    engine = make_engine()
    prompt = prompt_of(50)
    engine.add_request(request("first", prompt, max_tokens=1))
    assert run(engine)["first"][-1].num_cached_tokens == 0
    engine.add_request(request("second", prompt, max_tokens=4))
    outputs = run(engine)["second"]
    assert outputs[-1].num_cached_tokens == 48
    assert token_ids(outputs) == expected_outputs(prompt, 4)
    assert engine.stats().num_cached_tokens_total == 48


def test_whole_blocks_of_prompt_leave_one_token_to_compute():
    """A prompt of exactly whole blocks, all cached, would have no logits to sample from."""
    engine = make_engine()
    for name in "ab":
        engine.add_request(request(name, prompt_of(32), max_tokens=3))
        assert token_ids(run(engine)[name]) == expected_outputs(prompt_of(32), 3)
    assert scripted(engine).steps[3].scheduled[0].num_computed_tokens == 16


@pytest.mark.covers("J22")
def test_choices_of_one_prompt_compute_it_once():
    """Sent together, the second choice waits for the first one's blocks instead of computing them again."""
    engine = make_engine(max_num_batched_tokens=64)
    for choice in range(3):
        engine.add_request(request(f"c{choice}", prompt_of(200), max_tokens=2, choice=choice))
    run(engine)
    computed = sum(step.num_tokens for step in scripted(engine).steps)
    assert computed == 200 + 2 * 8 + 3  # the prompt once, 8 tokens beyond the last whole block twice, 3 decodes


def test_least_recently_used_content_goes_first():
    engine = make_engine(num_blocks=8, max_model_len=128)
    for name, start in (("old", 1), ("new", 2)):
        engine.add_request(request(name, prompt_of(33, start), max_tokens=1))
        run(engine)
    engine.add_request(request("filler", prompt_of(90, 3), max_tokens=1))
    run(engine)
    engine.add_request(request("new again", prompt_of(33, 2), max_tokens=1))
    assert run(engine)["new again"][-1].num_cached_tokens == 32
    engine.add_request(request("old again", prompt_of(33, 1), max_tokens=1))
    assert run(engine)["old again"][-1].num_cached_tokens == 0


def test_youngest_is_preempted_and_recomputed():
    engine = make_engine(num_blocks=6, max_model_len=80, enable_prefix_caching=False)
    for index in range(3):
        engine.add_request(request(str(index), prompt_of(30, index), max_tokens=40))
    outputs = run(engine)
    assert engine.stats().num_preemptions_total > 0
    for index in range(3):
        assert token_ids(outputs[str(index)]) == expected_outputs(prompt_of(30, index), 40)
        starts = [output.start_index for output in outputs[str(index)]]
        assert starts == list(range(40))  # nothing twice, nothing left out


def test_a_big_request_is_not_overtaken_for_ever():
    """Small ones that would fit must not keep a big one, at the head of the queue, waiting."""
    engine = make_engine(num_blocks=10, max_model_len=160, max_num_seqs=4)
    for index in range(3):
        engine.add_request(request(f"s{index}", prompt_of(20, index), max_tokens=20))
    engine.step()
    engine.add_request(request("big", prompt_of(120, 5), max_tokens=2))
    for index in range(3, 30):
        engine.add_request(request(f"s{index}", prompt_of(20, index), max_tokens=20))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order.index("big") <= 3


def test_released_blocks_keep_a_window_models_memory_constant():
    engine = make_engine(num_blocks=4, windows=(20,), max_model_len=512, max_num_batched_tokens=16, max_num_seqs=1)
    engine.add_request(request("a", prompt_of(100), max_tokens=300))
    assert token_ids(run(engine)["a"]) == expected_outputs(prompt_of(100), 300, 20)


@pytest.mark.covers("M8")
def test_a_ring_is_one_block_for_any_length():
    """Guards against a second block, or a released one: ten windows of tokens stay in the first row they got."""
    engine = make_engine(num_blocks=1, windows=(20,), user_rows=True, max_num_batched_tokens=30, max_num_seqs=1)
    assert engine.kv_cache.block_size == 32
    engine.add_request(request("a", prompt_of(70), max_tokens=130))
    assert token_ids(run(engine)["a"]) == expected_outputs(prompt_of(70), 130, 20)
    shares = [item for step in scripted(engine).steps for item in step.scheduled]
    assert {tuple(item.num_released_blocks) for item in shares} == {(0,)}
    assert not any(item.new_block_ids[0] for item in shares)


def test_one_block_a_request_beside_a_ring():
    """Guards against tables of layers without a window that grow, and requests that are let in without a block."""
    engine = make_engine(num_blocks=3, windows=(None, 20), user_rows=True, max_model_len=200)
    for index in range(8):
        engine.add_request(request(str(index), prompt_of(30 + index, index), max_tokens=40))
    outputs = run(engine)
    for index in range(8):
        assert token_ids(outputs[str(index)]) == expected_outputs(prompt_of(30 + index, index), 40, 20)
    tables = [new.block_tables for step in scripted(engine).steps for new in step.new_requests]
    assert {len(table) for pair in tables for table in pair} == {1}
    assert max(len(step.scheduled) for step in scripted(engine).steps) == 3


def test_rings_and_prefix_reuse_exclude_each_other():
    """Guards against a prefix found in a ring, whose rows are another position's by then."""
    with pytest.raises(PenstockError, match="ring"):
        KVCacheManager([CacheGroup((0,), 20, 4, 32, ring=True)], enable_prefix_caching=True)
    with pytest.raises(PenstockError, match="common block size"):
        KVCacheManager([CacheGroup((0,), None, 4, 16), CacheGroup((1,), 20, 4, 32)])


def test_prefix_hit_with_a_window_needs_only_what_the_window_sees():
    engine = make_engine(windows=(20,), num_blocks=64)
    engine.add_request(request("a", prompt_of(100), max_tokens=1))
    run(engine)
    engine.add_request(request("b", prompt_of(100), max_tokens=2))
    outputs = run(engine)["b"]
    assert outputs[-1].num_cached_tokens == 96
    assert token_ids(outputs) == expected_outputs(prompt_of(100), 2, 20)
    table = [step.new_requests[0] for step in scripted(engine).steps if step.new_requests][1].block_tables[0]
    assert table[:4] == [-1] * 4
    assert -1 not in table[4:]


@pytest.mark.parametrize(
    ("options", "reason", "stop_reason", "count"),
    [
        ({}, FinishReason.STOP, None, 3),
        ({"ignore_eos": True}, FinishReason.LENGTH, None, 8),
        ({"min_tokens": 4}, FinishReason.LENGTH, None, 8),
        ({"ignore_eos": True, "stop_token_ids": "fifth"}, FinishReason.STOP, "fifth", 5),
    ],
)
def test_ends(options, reason, stop_reason, count):
    """End tokens, stop tokens, min_tokens (which end tokens below it do not end) and max_tokens."""
    expected = expected_outputs([1, 2, 3], 8)
    if "stop_token_ids" in options:
        options["stop_token_ids"], stop_reason = [expected[4]], expected[4]
    engine = make_engine(eos_token_ids=(expected[2],))
    engine.add_request(request("a", [1, 2, 3], **options))
    outputs = run(engine)["a"]
    assert token_ids(outputs) == expected[:count]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)


def test_resumed_at_its_very_end_finishes_without_a_step():
    engine = make_engine()
    engine.add_request(request("a", [1, 2], max_tokens=3, output_token_ids=[4, 5, 6]))
    (output,) = run(engine)["a"]
    assert (output.start_index, output.new_token_ids, output.finish_reason) == (3, [], FinishReason.LENGTH)
    assert scripted(engine).steps == []


def test_abort_of_a_request_that_was_resumed_at_its_end():
    """It is in no queue any more, but its id is taken and its output must not come after the abort."""
    engine = make_engine()
    engine.add_request(request("a", [1, 2], max_tokens=1, output_token_ids=[4]))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request(request("a", [1, 2]))
    assert engine.abort("a")
    assert not engine.abort("a")
    assert run(engine) == {}


def test_prompt_logprobs_come_once_and_in_order_even_after_a_preemption():
    engine = make_engine(num_blocks=6, max_model_len=90, max_num_batched_tokens=10, max_num_seqs=2)
    engine.add_request(request("old", prompt_of(20, 3), max_tokens=60))
    engine.step()
    engine.add_request(request("young", prompt_of(40), max_tokens=10, prompt_logprobs=0))
    outputs = run(engine)
    assert engine.stats().num_preemptions_total > 0
    pieces = [
        (output.prompt_logprobs_start, output.prompt_logprobs) for output in outputs["young"] if output.prompt_logprobs
    ]
    flat = [entry.token_ids[0] for _, piece in pieces for entry in piece]
    assert flat == prompt_of(40)[1:]
    assert [start for start, _ in pieces] == [
        1 + sum(len(piece) for _, piece in pieces[:i]) for i in range(len(pieces))
    ]


def test_prompt_logprobs_read_no_cached_prefix():
    engine = make_engine()
    engine.add_request(request("a", prompt_of(64), max_tokens=1))
    run(engine)
    engine.add_request(request("b", prompt_of(64), max_tokens=1, prompt_logprobs=1))
    assert run(engine)["b"][-1].num_cached_tokens == 0


def test_abort_anywhere_gives_everything_back():
    for steps in range(8):
        engine = make_engine(max_num_batched_tokens=20, max_num_seqs=2)
        for name in "abc":
            engine.add_request(request(name, prompt_of(50, ord(name)), max_tokens=6))
        for _ in range(steps):
            engine.step()
        assert engine.abort("b")
        assert not engine.abort("b")
        outputs = run(engine)
        assert token_ids(outputs.get("c", [])) == expected_outputs(prompt_of(50, ord("c")), 6)
        assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_a_failed_request_does_not_touch_its_neighbours():
    engine = make_engine()
    scripted(engine).fail = lambda step: {"bad"} if len(scripted(engine).steps) == 3 else set()
    for name in ("bad", "good"):
        engine.add_request(request(name, prompt_of(20, len(name)), max_tokens=6))
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason == FinishReason.ERROR
    assert outputs["bad"][-1].error == "scripted"
    assert token_ids(outputs["good"]) == expected_outputs(prompt_of(20, 4), 6)


def test_a_request_that_fails_alone_ends():
    """One exception in the forward pass must not stop the engine (and blocks it half wrote are not reused)."""
    engine = make_engine()

    def fail_twice(step):
        if len(scripted(engine).steps) in (2, 3):
            raise RuntimeError("boom")
        return set()

    scripted(engine).fail = fail_twice
    engine.add_request(request("a", prompt_of(40), max_tokens=6))
    engine.step()
    assert engine.step() == []
    (output,) = engine.step()
    assert output.error == "RuntimeError: boom"
    engine.add_request(request("b", prompt_of(40), max_tokens=6))
    assert token_ids(run(engine)["b"]) == expected_outputs(prompt_of(40), 6)
    assert engine.stats().num_failed_steps_total == 2


def test_a_step_without_memory_costs_no_request():
    """Guards against answers that end with an error because memory was short for a moment: they can go on elsewhere."""
    engine = make_engine()

    def fail(step):
        raise MemoryError

    scripted(engine).fail = fail
    engine.add_request(request("a", prompt_of(40), max_tokens=6))
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.has_work
    assert engine.abort("a")
    engine.check_integrity()
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


def test_an_engine_that_fails_every_step_says_so():
    engine = make_engine()

    def always(step):
        raise RuntimeError("broken")

    scripted(engine).fail = always
    for index in range(2):
        engine.add_request(request(str(index), [1], max_tokens=6))
        assert "broken" in run(engine)[str(index)][-1].error
    engine.add_request(request("last", [1], max_tokens=6))
    with pytest.raises(EngineError, match="broken"):
        run(engine)


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("a", []), "prompt"),
        (request("a", [997]), "prompt"),
        (request("a", [-1]), "prompt"),
        (request("a", [1] * 512), "prompt"),
        (request("open", [1]), "request_id"),
        (EngineRequest("a", [1], SamplingParams(temperature=1.0)), "seed"),
    ],
)
def test_impossible_requests_are_answered_at_admission(bad, param):
    engine = make_engine()
    engine.add_request(request("open", [1]))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(bad)
    assert caught.value.param == param
    assert token_ids(run(engine)["open"]) == expected_outputs([1], 8)


def test_a_request_that_could_never_fit_the_cache_is_refused():
    engine = make_engine(num_blocks=4, max_model_len=512)
    with pytest.raises(InvalidRequestError, match="do not fit the cache"):
        engine.add_request(request("a", prompt_of(30), max_tokens=100))


def test_64_requests_of_mixed_lengths_through_16_rows():
    engine = make_engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=1024)
    lengths = [1 + (i * 53) % 400 for i in range(64)]
    for index, length in enumerate(lengths):
        engine.add_request(request(str(index), prompt_of(length, index), max_tokens=10))
    outputs = run(engine)
    for index, length in enumerate(lengths):
        assert token_ids(outputs[str(index)]) == expected_outputs(prompt_of(length, index), 10)
    assert scripted(engine).max_rows == 16
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
