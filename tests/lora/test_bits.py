"""The promise with adapters: a request's bits depend on its own adapter, and on nothing else.

Requests take turns with three adapters and with none. Each is first asked alone: those with an adapter of an engine
that has loaded only this one, the others of an engine without LoRA. Then all are asked in crowds, in every other way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineRequest
from penstock.interface.pooling import PoolingParams
from penstock.interface.sampling_params import SamplingParams
from tests.answers import MAX_MODEL_LEN, PROMPTS, WATCHED, Answer, answer, ask, check, request
from tests.families.case import all_cases
from tests.kernels.packed import levels
from tests.lora.peft_adapters import make_adapter

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "quantization_group_size": 32},
}
LARGE = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 500}  # products of several panels and items
SIZES: dict[str, dict[str, Any]] = {"llama": LARGE, "mixtral": LARGE}
CASES = {case.name: case for case in all_cases()}
MODELS = [
    *(("llama", form) for form in FORMS),
    ("falcon-40b", "bfloat16"),
    ("mixtral", "bfloat16"),
    ("gpt2", "float32"),
]
NAMES = [None, "a", "b", "c"]  # of the adapters of the requests, in turns
FIELDS: dict[str, dict[str, Any]] = {"a": {"r": 8}, "b": {"r": 3, "use_rslora": True}, "c": {"r": 5, "use_dora": True}}
Make = Callable[..., BuiltEngine]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes an engine. adapters: the names of those it loads, in this order; (): it has no LoRA."""
    name, form = request.param
    at = tmp_path_factory.mktemp(name)
    model, directory = CASES[name].make(at, seed=7, **SIZES.get(name, {}))
    for seed, (adapter, fields) in enumerate(FIELDS.items()):
        make_adapter(model, at / adapter, seed=seed, **fields).unload()
    fixed = {
        "model": str(directory), "dtype": "bfloat16", "kernels": "cpu", "threads": 1, "max_num_seqs": len(PROMPTS),
        "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False, **FORMS[form],
    }  # fmt: skip

    def build(adapters: tuple[str, ...] = ("a", "b", "c"), **options: Any) -> BuiltEngine:
        lora: dict[str, Any] = {"lora_modules": [f"{adapter}={at / adapter}" for adapter in adapters]}
        lora |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 8} if adapters else {}
        return build_engine(EngineConfig.from_options(**{**fixed, **lora, **options}))

    return build


def with_adapter(index: int, **options: Any) -> EngineRequest:
    return replace(request(index, **options), adapter=NAMES[index % len(NAMES)])


@pytest.fixture(scope="module")
def alone(make: Make) -> dict[int, Answer]:
    """What each request answers by itself, in one piece, of an engine that has only its own adapter."""
    engines = {name: make(() if name is None else (name,), max_num_batched_tokens=2048).engine for name in NAMES}
    found = {}
    for index in WATCHED:
        source = with_adapter(index)
        found[index] = answer(ask(engines[source.adapter], [source])[index])
    return found


CROWDS: dict[str, dict[str, Any]] = {
    "at once, 2 threads": {"threads": 2},
    "chunks, few rows, other slots": {
        "adapters": ("c", "a", "b"), "max_num_batched_tokens": 13, "max_num_seqs": 5, "threads": 3, "block_size": 64,
    },
    "room for more": {"max_loras": 7, "max_lora_rank": 32, "max_num_batched_tokens": 50},
    "drafts": {"speculative_config": {"method": "ngram"}, "threads": 2},
}  # fmt: skip


@pytest.mark.parametrize("crowd", CROWDS)
def test_crowds(make: Make, alone: dict[int, Answer], crowd: str) -> None:
    """Guards against sums whose order depends on the rows beside them, on the threads, on the slot, on the room for
    adapters or on the chunk; and, in rows without an adapter, against products whose activation is computed apart."""
    check(ask(make(**CROWDS[crowd]).engine, map(with_adapter, range(len(PROMPTS)))), alone)


def test_cached(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against blocks that another adapter, or none, has computed: the second time, each finds its own."""
    engine = make(enable_prefix_caching=True, threads=2).engine
    every = [replace(with_adapter(5, prompt_logprobs=False), request_id=str(20 + n), adapter=name)
             for n, name in enumerate(NAMES)]  # fmt: skip
    first = ask(engine, every)
    assert [first[20 + n][-1].num_cached_tokens for n in range(4)] == [0] * 4
    for _ in range(2):
        found = ask(engine, [with_adapter(index, prompt_logprobs=False) for index in WATCHED])
        check(found, alone, prompts=False)
    assert found[5][-1].num_cached_tokens == 64


def test_preempted_and_resumed(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against a request that comes back, to its row or to another engine, with other bits or another adapter."""
    tight = {"max_num_batched_tokens": 30, "threads": 2}
    probe = make(**tight)
    block_bytes = probe.cache_bytes // probe.engine.kv_cache.num_blocks
    few = 9 * len(probe.engine.kv_cache.groups)
    engine = make(**tight, kv_cache_memory_bytes=few * block_bytes).engine
    last = sorted(range(len(PROMPTS)), key=lambda index: index in WATCHED)  # those that come last have to go
    check(ask(engine, map(with_adapter, last)), alone)
    assert engine.stats().num_preemptions_total
    known = {index: alone[index][0][: 1 + index] for index in WATCHED}
    found = ask(engine, [with_adapter(index, output_token_ids=known[index]) for index in WATCHED])
    for index, ids in known.items():
        assert answer(found[index])[:2] == (alone[index][0][len(ids) :], alone[index][1][len(ids) :])


def test_adapters_matter(make: Make, alone: dict[int, Answer]) -> None:
    """Guards against adapters that are never applied, of which everything above would be true."""
    engine = make().engine
    answers = []
    for name in NAMES:
        found = ask(engine, [replace(request(0), adapter=name)])
        answers.append(answer(found[0]))
    assert all(answers[i][1] != answers[j][1] for i in range(4) for j in range(i))


def run(engine: Engine, requests: list[EngineRequest]) -> list[Any]:
    """The outputs of requests that are no completions."""
    for item in requests:
        engine.add_request(item)
    found = []
    while engine.has_work:
        found += engine.step()
    return sorted(found, key=lambda output: output.request_id)


@pytest.mark.parametrize("make", [("llama", "bfloat16")], ids="-".join, indirect=True)
def test_vectors_and_beams(make: Make) -> None:
    """Guards against hidden states, and beams that are forked, of another adapter."""
    beams = SamplingParams(use_beam_search=True, n=3, max_tokens=6, temperature=0)
    for kind in (SamplingParams.for_pooling(PoolingParams(pooling_type="MEAN", normalize=False)), beams):
        sources = [EngineRequest(str(n), PROMPTS[3], kind, adapter=name) for n, name in enumerate(NAMES)]
        together = run(make(threads=2).engine, sources)
        for source, output in zip(sources, together, strict=True):
            (by_itself,) = run(make(() if source.adapter is None else (source.adapter,)).engine, [source])
            assert (output.pooled, output.hypotheses) == (by_itself.pooled, by_itself.hypotheses)
        assert len({(output.pooled, repr(output.hypotheses)) for output in together}) == 4


@pytest.mark.parametrize("make", [("llama", "bfloat16"), ("llama", "int8")], ids="-".join, indirect=True)
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks(make: Make, alone: dict[int, Answer], split: dict[str, int]) -> None:
    """Guards against a part of an adapter that meets another part of the weight, and sums in another order."""
    engine = make(**split, threads=1).engine
    try:
        check(ask(engine, map(with_adapter, range(len(PROMPTS)))), alone)
    finally:
        engine.shutdown()
