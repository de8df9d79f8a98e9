"""The promise: a request's tokens and log-probabilities have the same bits, however it is computed.

Tiny random models and the demo model, with the native kernels at this machine's level: those of MAIN in every form of
weights and cache, the others in FEW. Each request is first asked alone, in one piece, on one thread; then in crowds
that are cut, shared, preempted, resumed and stored in every other way. Of every other family
families/test_engine.py takes a sample.
"""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from tests.answers import MAX_MODEL_LEN, PROMPTS, WATCHED, Answer, ask, ask_alone, check, check_resumed, request
from tests.families.case import all_cases
from tests.kernels.packed import levels

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library"), pytest.mark.covers("F6", "C19")]
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int8-x2": {"quantization": "int8-x2"},
    "int4": {"quantization": "int4", "quantization_group_size": 32},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "float32, int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
# Products of several panels and items, so that threads share them.
SIZES = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 500}
MODELS = {case.name: case for case in all_cases() if case.full}
SINKS = {"attention_sinks": 3, "sliding_window": 14}
MAIN = ("demo", "llama", "gemma2", "gpt-oss", "mixtral")
FEW = ("bfloat16", "float32, int8 cache")  # with quantised weights only other products would be computed
CASES = [(model, form) for model in ("demo", *MODELS) for form in (FORMS if model in MAIN else FEW)]
CASES += [("sinks", "bfloat16"), ("sinks", "float32, int8 cache")]
Make = Callable[..., BuiltEngine]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `model` is for each model's name."""
    made = {name: case.make(tmp_path_factory.mktemp(name), seed=7, **SIZES)[1] for name, case in MODELS.items()}
    return {"demo": "demo", **{name: str(path) for name, path in made.items()}, "sinks": str(made["llama"])}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def make(request: pytest.FixtureRequest, directories: dict[str, str]) -> Make:
    """Makes an engine; options may differ, the model and its form do not."""
    model, form_name = request.param
    form = {
        "model": directories[model],
        "dtype": "bfloat16",
        "kernels": "cpu",
        "threads": 1,
        "max_num_seqs": len(PROMPTS),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
        **FORMS[form_name],
        **(SINKS if model == "sinks" else {}),
    }
    return lambda **options: build_engine(EngineConfig.from_options(**{**form, **options}))


@pytest.fixture(scope="module")
def alone(make: Make) -> dict[int, Answer]:
    """What each request answers by itself, in one piece, on one thread, with nothing cached."""
    return ask_alone(make(max_num_batched_tokens=2048).engine)


@pytest.mark.covers("M11", "A19")
@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2, "block_size": MAX_MODEL_LEN},
        {"max_num_batched_tokens": 13, "max_num_seqs": 5, "threads": 3, "block_size": 64},
    ],
    ids=["at once, 2 threads, user rows", "chunks of 13, 3 threads, blocks of 64"],
)
def test_in_company(options: dict[str, Any], make: Make, alone: dict[int, Answer]) -> None:
    """Guards against a bit that depends on the other rows of a step, on where a chunk ends, on the threads, or on how
    the cache is laid out."""
    check(ask(make(**options).engine, map(request, range(len(PROMPTS)))), alone)


@pytest.mark.covers("F5", "M7", "M10")
def test_token_by_token(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against a prompt that is not the same as its tokens one after the other."""
    few = {index: alone[index] for index in (0, 1, 2)}
    check(ask(make(max_num_batched_tokens=1, max_num_seqs=1).engine, map(request, few)), few)


def test_with_a_prefix(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against keys and values whose bits depend on the step that computed them: found whole, in part, while
    another request is still computing them, or in pinned blocks."""
    engine = make(enable_prefix_caching=True, threads=2, max_num_batched_tokens=64).engine
    for cached in ([0, 0, 0, 0, 0, 32], [0, 16, 32, 0, 64, 64]):
        found = ask(engine, [request(index, prompt_logprobs=False) for index in (*WATCHED, 12)])
        assert [found[index][-1].num_cached_tokens for index in WATCHED] == cached
        check(found, alone, prompts=False)
        engine.pin(f"pin {cached[1]}", PROMPTS[WATCHED[-1]])


def test_preempted(make: Make, alone: dict[int, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that comes back with other bits: recomputed as one prompt, tokens it had included."""
    tight = {"max_num_batched_tokens": 30, "threads": 2}
    probe = make(**tight)
    block_bytes = probe.cache_bytes // probe.engine.kv_cache.num_blocks
    few = 9 * len(probe.engine.kv_cache.groups)
    engine = make(**tight, kv_cache_memory_bytes=few * block_bytes).engine
    preempted, preempt = [], engine.scheduler.preempt
    monkeypatch.setattr(
        engine.scheduler, "preempt", lambda item: (preempted.append(int(item.request_id)), preempt(item))
    )
    last = sorted(range(len(PROMPTS)), key=lambda index: index in WATCHED)  # those that come last have to go
    check(ask(engine, map(request, last)), alone)
    assert set(preempted) & set(WATCHED)


def test_resumed(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against a continuation, after the process died, that is not the one which would have come."""
    check_resumed(make(max_num_batched_tokens=50).engine, alone)


def test_prompts_and_sampling_matter(alone: dict[int, Answer]) -> None:
    """Guards against a model that always says the same, of which everything above would be true."""
    assert len({tuple(ids) for ids, _, _ in alone.values()}) == len(alone)
