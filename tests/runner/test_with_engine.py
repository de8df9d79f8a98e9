"""The real engine on the LocalExecutor: blocks shared, released, preempted and reused, all at once.

With CacheModel every token is computed from what the caches hold, so a slot that is wrong in any way is a wrong token.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import register_logits_processor
from penstock.engine.engine import Engine
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.engine.policies import Scheduling
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.interface.step import CacheGroup
from penstock.kernels.reference import ReferenceOps
from penstock.models.config_json import load_model_config
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from penstock.spec.model_config import ModelConfig
from penstock.weights.loader import load_model
from tests.fakes import CacheModel, FakeOps, resolved_config, tiny_config

VOCAB = 50
LIMITS = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "max_model_len": 128}


def engine_for(
    model: Any,
    ops: Any,
    groups: list[CacheGroup],
    *,
    model_config: ModelConfig | None = None,
    enable_prefix_caching: bool = True,
    make_executor: Callable[[ModelRunner], LocalExecutor] = LocalExecutor,
    **limits: int,
) -> Engine:
    limits = {**LIMITS, **limits}
    num_layers = sum(len(group.layers) for group in groups)
    model_config = model_config or tiny_config(VOCAB, num_hidden_layers=num_layers)
    runner = ModelRunner(model, ops, groups, resolved_config(**limits), model_config)
    scheduling = Scheduling(**{name: limits.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens")})
    return Engine(
        make_executor(runner),
        KVCacheManager(groups, enable_prefix_caching=enable_prefix_caching),
        scheduling=scheduling,
        vocab_size=VOCAB,
        **limits,
    )


def run(engine: Engine) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.kv_cache.check_integrity()
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks
    return outputs


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    assert all(output.error is None for output in outputs)
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("windows", [(None,), (20,), (None, 20, None, 7)])
@pytest.mark.parametrize("num_blocks", [10, 40])
def test_a_crowd_gets_the_right_tokens(windows: tuple[int | None, ...], num_blocks: int) -> None:
    """Guards against rows and blocks mixed up by preemption, prefix hits or released window blocks.

    Ten blocks are too few for five requests, so some are preempted; the shared prefix makes cache hits.
    """
    model = CacheModel(windows, VOCAB)
    groups = [
        CacheGroup(tuple(i for i, w in enumerate(windows) if w == window), window, num_blocks, 16)
        for window in dict.fromkeys(windows)
    ]
    engine, rng = engine_for(model, FakeOps(), groups), random.Random(3)
    prefix = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = {
        str(i): prefix[: rng.choice([0, 20, 40])] + [rng.randrange(VOCAB)] * rng.randint(1, 30) for i in range(16)
    }
    outputs: dict[str, list[EngineOutput]] = {}
    for name, prompt in prompts.items():  # they join while others run
        engine.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=25)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for name, more in run(engine).items():
        outputs.setdefault(name, []).extend(more)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == model.continued(prompt, 25), name
    if num_blocks == 10 and None in windows:
        assert engine.stats().num_preemptions_total > 0


@pytest.mark.covers("F3", "M8")
@pytest.mark.parametrize("windows", [(None,), (20,), (None, 20, None, 7)])
def test_user_rows_give_the_right_tokens(windows: tuple[int | None, ...]) -> None:
    """Guards against a ring read where it has been written over, by chunks longer and shorter than the window, and
    against rows that a request finds as another one left them."""
    model = CacheModel(windows, VOCAB)
    groups = [
        CacheGroup(
            tuple(i for i, w in enumerate(windows) if w == window),
            window,
            3,
            128 if window is None else -(-window // 16) * 16,
            ring=window is not None,
        )
        for window in dict.fromkeys(windows)
    ]
    rng = random.Random(5)
    prompts = {str(i): [rng.randrange(VOCAB) for _ in range(rng.choice([1, 16, 33, 90]))] for i in range(12)}
    for chunk in (6, 40):
        engine = engine_for(
            model, FakeOps(), groups, max_num_batched_tokens=chunk, max_model_len=128, enable_prefix_caching=False
        )
        for name, prompt in prompts.items():
            engine.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=30)))
        outputs = run(engine)
        for name, prompt in prompts.items():
            assert tokens_of(outputs[name]) == model.continued(prompt, 30), name


def test_aborts_free_the_rows() -> None:
    """Guards against rows that leak: 40 requests through 5 rows, a third of them aborted."""
    model = CacheModel([None], VOCAB)
    engine = engine_for(model, FakeOps(), [CacheGroup((0,), None, 40, 16)])
    for i in range(40):
        engine.add_request(EngineRequest(str(i), [i], SamplingParams(temperature=0.0, max_tokens=4)))
        engine.step()
        if i % 3 == 0:
            engine.abort(str(i))
    run(engine)
    engine.add_request(EngineRequest("last", [1, 2], SamplingParams(temperature=0.0, max_tokens=4)))
    assert tokens_of(run(engine)["last"]) == model.continued([1, 2], 4)


# --- a real model ----------------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def llama_engine(directory: Path, num_blocks: int = 40, **limits: int) -> Engine:
    """A two-layer Llama with dummy weights, which are the same every time."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    config, ops = load_model_config(directory), ReferenceOps(torch.float32)
    model = load_model(directory, config, ops, "dummy")
    groups = [CacheGroup((0, 1), None, num_blocks, 16)]
    return engine_for(model, ops, groups, model_config=config, **limits)


def requests(seeds: Sequence[int], **params: Any) -> list[EngineRequest]:
    """Prompts of mixed lengths; odd ones are sampled, even ones greedy."""
    made = []
    for seed in seeds:
        prompt = [random.Random(seed).randrange(VOCAB) for _ in range(1 + 9 * seed % 45)]
        temperature = 0.8 * (seed % 2)
        made.append(
            EngineRequest(str(seed), prompt, SamplingParams(temperature=temperature, seed=seed, logprobs=1, **params))
        )
    return made


def test_generated_tokens_scored_in_one_pass(tmp_path: Path) -> None:
    """Guards against wrong positions, masks or slots anywhere: a decode's log-probabilities must be a prompt's.

    Generated in a crowd with chunks of 7 and preemptions, then scored as one prompt in one step.
    """
    engine = llama_engine(tmp_path, num_blocks=14, max_num_batched_tokens=7)
    asked = requests(range(10), max_tokens=40)
    for item in asked:
        engine.add_request(item)
    outputs = run(engine)
    assert engine.stats().num_preemptions_total > 0
    for item in asked:
        tokens = tokens_of(outputs[item.request_id])
        whole = llama_engine(tmp_path, max_num_batched_tokens=128)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        whole.add_request(EngineRequest("whole", [*item.prompt_token_ids, *tokens], params))
        scored = [entry for output in run(whole)["whole"] for entry in output.prompt_logprobs or []]
        reported = [entry for output in outputs[item.request_id] for entry in output.logprobs or []]
        assert [entry.token_ids[0] for entry in scored[-len(tokens) :]] == tokens
        found = [entry.logprobs[0] for entry in reported]
        assert found == pytest.approx([entry.logprobs[0] for entry in scored[-len(tokens) :]], abs=1e-4)


def test_a_resumed_request_goes_on(tmp_path: Path) -> None:
    """Guards against outputs that come back as a prompt: penalties, minimum length and noise would start afresh."""
    params = {"max_tokens": 20, "min_tokens": 18, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    asked = requests(range(4), repetition_penalty=1.2, **params)
    engine = llama_engine(tmp_path)
    for item in asked:
        engine.add_request(item)
    whole = {name: tokens_of(outputs) for name, outputs in run(engine).items()}
    engine = llama_engine(tmp_path)
    for item in asked:
        half = whole[item.request_id][:9]
        engine.add_request(EngineRequest(item.request_id, item.prompt_token_ids, item.params, output_token_ids=half))
    rest = {name: tokens_of(outputs) for name, outputs in run(engine).items()}
    assert {name: tokens[:9] + rest[name] for name, tokens in whole.items()} == whole


@pytest.mark.covers("F9")
def test_a_row_is_used_a_thousand_times() -> None:
    """Guards against tokens, tables or parameters that a request leaves in its row, however it ends: at its length, at
    a stop token, or aborted."""
    model = CacheModel((None,), VOCAB)
    limits = {"max_num_seqs": 1, "max_model_len": 32, "enable_prefix_caching": False}
    engine, rng = engine_for(model, FakeOps(), [CacheGroup((0,), None, 1, 32)], **limits), random.Random(7)
    answers: dict[tuple[int, ...], list[int]] = {}
    for index in range(1_000):
        prompt = [index % VOCAB] * rng.choice((1, 3, 9))
        if (key := tuple(prompt)) not in answers:
            answers[key] = model.continued(prompt, 2)
        answer = answers[key]
        end = rng.choice((1, 1, 2))
        stops = rng.random() < 0.5
        fields = {"max_tokens": 2, "stop_token_ids": [answer[end - 1]]} if stops else {"max_tokens": end}
        engine.add_request(EngineRequest("row", prompt, SamplingParams(temperature=0.0, **fields)))
        if rng.random() < 0.05:
            engine.step()
            engine.abort("row")
            continue
        found = [token for output in iter_steps(engine) for token in output.new_token_ids]
        assert found == answer[: answer.index(answer[end - 1]) + 1 if stops else end]
    engine.check_integrity()
    assert engine.kv_cache.num_free == engine.kv_cache.num_blocks


# Each changes what the row before the next request answers: the sampler's own arrays, and what only some rows have.
LEFT_BEHIND: list[dict[str, Any]] = [
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_p": 0.01},
    {"min_p": 0.9},
    {"seed": 99},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"logit_bias": {7: 100.0}},
    {"repetition_penalty": 1.9, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"suppress_tokens": list(range(1, VOCAB))},
    {"typical_p": 0.01},
    {"mirostat": 2, "mirostat_tau": 0.01},
    {"logits_processors": {"only_token_7": {}}},
    {"use_beam_search": True, "n": 2, "temperature": 0.0, "seed": None},
]


@register_logits_processor("only_token_7")
def only_token_7(logits: torch.Tensor, args: Any) -> torch.Tensor:
    return logits.masked_fill(torch.arange(VOCAB) != 7, float("-inf"))


@pytest.mark.covers("F9")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_leaves_no_parameters_to_the_next(temperature: float, tmp_path: Path) -> None:
    """Guards against a sampling parameter of the request before in the same row: the next one answers as in a fresh
    engine."""

    def ask(engine: Engine, **fields: Any) -> list[Any]:
        params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True} | fields)
        engine.add_request(EngineRequest("row", [3, 4, 5], params))
        return [(out.new_token_ids, out.logprobs, out.prompt_logprobs, out.error) for out in iter_steps(engine)]

    expected = ask(llama_engine(tmp_path, max_num_seqs=1), temperature=temperature)
    engine = llama_engine(tmp_path, max_num_seqs=1)
    for fields in LEFT_BEHIND:
        assert ask(engine, **fields)[-1][-1] is None
        assert ask(engine, temperature=temperature) == expected, fields


def iter_steps(engine: Engine) -> Iterator[EngineOutput]:
    while engine.has_work:
        yield from engine.step()


@pytest.mark.covers("M26")
def test_logits_are_computed_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that computes logits at every position of its prompts, which takes gigabytes."""
    model, rows = CacheModel((None,), VOCAB), []
    compute = model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "compute_logits", counted)
    engine = engine_for(model, FakeOps(), [CacheGroup((0,), None, 20, 16)], max_num_batched_tokens=64)
    prompts = {"a": [1, 2, 3], "b": [4] * 9, "c": [5] * 30}
    for name, prompt in prompts.items():
        engine.add_request(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=2)))
    outputs = run(engine)
    assert rows == [3, 3]  # 42 tokens of prompts, then a token of each request
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == model.continued(prompt, 2)
