"""Pooling requests among generating ones, on a scripted executor: each gets its vector, whatever happens around it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import frames
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.outputs import FinishReason
from penstock.interface.pooling import MAX_POOLED_BYTES, PoolingParams
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import SchedulerOutput
from penstock_lab.mock import HIDDEN_SIZE
from tests.engine.test_engine import prompt_of, scripted
from tests.fakes_engine import expected_outputs, make_engine, request, run, token_ids

KINDS = ("LAST", "MEAN", "CLS", "ALL")


def pooled(name: str, prompt: list[int], kind: str) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams.for_pooling(PoolingParams(pooling_type=kind, normalize=False)))


def alone(prompt: list[int], kind: str) -> bytes | None:
    engine = make_engine()
    engine.add_request(pooled("a", prompt, kind))
    return run(engine)["a"][0].pooled


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    chunk=st.integers(3, 70),
    blocks=st.integers(8, 30),
    caching=st.booleans(),
    failing=st.sets(st.integers(0, 12), max_size=3),
    depth=st.sampled_from([1, 3]),
)
def test_a_vector_is_what_it_is_alone(
    lengths: list[int], chunk: int, blocks: int, caching: bool, failing: set[int], depth: int
) -> None:
    """Guards against a pooling request that samples, hangs, keeps its blocks, skips cached tokens that it needs, or
    gets another vector beside others, in chunks, after a preemption or a failed step; and against one that disturbs
    those that generate. A prompt fills the whole context."""
    engine = make_engine(
        num_blocks=blocks,
        max_num_batched_tokens=max(chunk, 4),
        max_num_seqs=4,
        max_model_len=max(91, *lengths),
        enable_prefix_caching=caching,
        depth=depth,
    )

    def fail(step: SchedulerOutput) -> set[str]:
        if len(step.scheduled) > 1 and step.step_id in failing:
            raise RuntimeError("scripted")
        return set()

    scripted(engine).fail = fail
    for index, length in enumerate(lengths):
        kind = KINDS[index % len(KINDS)]
        engine.add_request(pooled(f"pool {index}", prompt_of(length, 1), kind))  # all begin alike
        engine.add_request(request(f"text {index}", prompt_of(min(length, 80), 1), max_tokens=3))
    outputs = run(engine)
    for index, length in enumerate(lengths):
        (output,) = outputs[f"pool {index}"]
        assert (output.finish_reason, output.new_token_ids, output.error) == (FinishReason.STOP, [], None)
        assert output.pooled == alone(prompt_of(length, 1), KINDS[index % len(KINDS)])
        assert token_ids(outputs[f"text {index}"]) == expected_outputs(prompt_of(min(length, 80), 1), 3)
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


def test_only_the_last_token_may_use_the_cache() -> None:
    """Guards against a mean without the tokens that were found in the cache, and a last token that computes them."""
    engine = make_engine()
    for name, kind in (("first", "LAST"), ("last", "LAST"), ("mean", "MEAN")):
        engine.add_request(pooled(name, prompt_of(100), kind))
        (output,) = run(engine)[name]
        assert output.num_cached_tokens == (96 if name == "last" else 0)
        assert len(output.pooled or b"") == 4 * HIDDEN_SIZE


def test_vectors_fit_into_frames() -> None:
    """Guards against an engine whose step ends with more hidden states than a frame to its client may have."""
    vectors = bytes(MAX_POOLED_BYTES)
    outputs = [EngineOutput(str(index), 0, [], pooled=vectors if index % 2 else None) for index in range(10)]
    parts = list(frames.in_parts(outputs))
    assert [output for part in parts for output in part] == outputs
    sizes = [sum(len(output.pooled or b"") for output in part) for part in parts]
    assert max(sizes) <= frames.MAX_POOLED_IN_FRAME
    assert len(parts) == 3
    assert list(frames.in_parts([])) == [[]]  # a step without outputs still carries the engine's statistics
