"""The stages of gpu_check.py that run whole engines: the bits of requests, and the time of steps."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.assembly import BuiltEngine, build_engine
from penstock.config import EngineConfig
from penstock.interface.messages import EngineOutput, EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.weights.sources import DummyRows

Row = dict[str, Any]
VOCAB = 1000
LENGTHS = (5, 120, 300, 505, 1, 250, 127, 40, 700, 125)
TOKENS = 16
SHAPE: Row = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED: Row = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window": 200,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EIGHT_B: Row = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
FORMS: dict[str, tuple[Row, Row]] = {
    "llama": ({}, {}),
    "llama, float32": ({}, {"dtype": "float32"}),
    "llama, int8": ({}, {"quantization": "int8"}),
    "llama, int4": ({}, {"quantization": "int4"}),
    "llama, int8 cache": ({}, {"kv_cache_dtype": "int8"}),
    "gemma2": (WINDOWED, {}),
}
CROWDS: dict[str, Row] = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 60, "max_num_seqs": 5},
    "with drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "preempted": {"max_num_batched_tokens": 200},
    "cached": {"enable_prefix_caching": True},
}
ENGINE: Row = {
    "kernels": "triton",
    "block_size": 128,
    "load_format": "dummy",
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2**27,
}


def build(directory: str, **options: Any) -> BuiltEngine:
    return build_engine(EngineConfig.from_options(model=directory, **ENGINE | options))


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    found = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    found[8][:256] = found[3][:256]  # a prefix that another prompt has, too
    found[7] = found[7][:4] * 10  # something to look up
    return found


def ask(engine: Any, indices: list[int]) -> dict[int, tuple[Any, ...]]:
    """Return the ids and log-probabilities of requests that are asked together. Odd ones are sampled."""
    texts = prompts()
    for index in indices:
        params = SamplingParams(
            temperature=0.8 * (index % 2), seed=3, max_tokens=TOKENS, ignore_eos=True, logprobs=3, top_k=50
        )
        engine.add_request(EngineRequest(str(index), texts[index], params))
    outputs: dict[int, list[EngineOutput]] = {index: [] for index in indices}
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(str(output.error))
            outputs[int(output.request_id)].append(output)
    return {
        index: ([token for item in found for token in item.new_token_ids], [e for i in found for e in i.logprobs or []])
        for index, found in outputs.items()
    }


def bits_of_requests() -> Iterator[Row]:
    """Compare what requests answer in a crowd with what they answer alone, bit by bit."""
    everyone = list(range(len(LENGTHS)))
    for name, (fields, options) in FORMS.items():
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(SHAPE | fields))
            base = {"max_num_seqs": 16, "max_model_len": 1024, "enable_prefix_caching": False} | options
            engine = build(directory, **base, max_num_batched_tokens=2048).engine
            alone = {index: ask(engine, [index])[index] for index in everyone}
            row: Row = {"name": name, "comparisons": 0, "differ": {}}
            for crowd, changes in CROWDS.items():
                built = build(directory, **base | changes)
                if crowd == "preempted":
                    block_bytes = built.cache_bytes // built.engine.kv_cache.num_blocks
                    few = 8 * len(built.engine.kv_cache.groups)
                    built = build(directory, **base | changes, kv_cache_memory_bytes=few * block_bytes)
                count = watch(built.engine.scheduler)
                found = ask(built.engine, everyone)
                if crowd == "cached":  # the first time stored what the second one finds
                    found = ask(built.engine, everyone)
                differ = [index for index in everyone if found[index] != alone[index]]
                row["comparisons"] += len(everyone)
                if differ:
                    row["differ"][crowd] = differ
                if crowd == "preempted":
                    row["preempted"] = len(count)
                del built
            row["distinct answers"] = len({tuple(ids) for ids, _ in alone.values()})
            yield row


def watch(scheduler: Any) -> list[str]:
    """Note which requests are preempted from now on."""
    found: list[str] = []
    preempt = scheduler.preempt

    def note(item: Any) -> Any:
        found.append(item.request_id)
        return preempt(item)

    scheduler.preempt = note
    return found


def fill_quickly() -> None:
    """Let the rows of dummy weights be the same few random numbers, which takes no time."""
    numbers = np.random.default_rng(0).standard_normal(2**24).astype(np.float32) / 64
    slowly = DummyRows.read

    def read(self: DummyRows, start: int, stop: int) -> Any:
        shape = (stop - start, *self.shape[1:])
        return slowly(self, start, stop) if len(self.shape) == 1 else np.resize(numbers, shape)

    DummyRows.read = read  # type: ignore[method-assign]


def steps() -> Iterator[Row]:
    """Time decode steps and prompts of an 8B model with random weights, through the whole engine."""
    fill_quickly()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE | EIGHT_B))
        began = time.perf_counter()
        options = {"max_num_seqs": 128, "max_model_len": 8320, "max_num_batched_tokens": 8192}
        built = build(directory, **options, enable_prefix_caching=False, kv_cache_memory_bytes=20 * 2**30)
        engine = built.engine
        yield {"name": "start", "seconds": round(time.perf_counter() - began, 1)}
        free, total = torch.cuda.mem_get_info()
        yield {"name": "memory", "used_gib": round((total - free) / 2**30, 2)}
        random = np.random.default_rng(1)
        for batch in (1, 8, 32, 128):
            for index in range(batch):
                params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
                ids = random.integers(3, 128000, 1024 if batch <= 32 else 256).tolist()
                engine.add_request(EngineRequest(f"{batch} {index}", ids, params))
            times = timed(engine, batch)
            middle = statistics.median(times[-24:])
            yield {
                "name": f"decode, batch {batch}", "ms": round(1e3 * middle, 2), "tokens_s": round(batch / middle),
                "first_ms": [round(1e3 * value, 1) for value in times[:8]],
            }  # fmt: skip
        for length in (2048, 8192):
            found = []
            for turn in range(3):
                params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
                ids = random.integers(3, 128000, length).tolist()
                engine.add_request(EngineRequest(f"prompt {length} {turn}", ids, params))
                found.append(sum(timed(engine, 0)))
            yield {
                "name": f"prompt of {length}",
                "ms": round(1e3 * min(found), 1),
                "first_ms": round(1e3 * found[0], 1),
            }


def timed(engine: Any, batch: int) -> list[float]:
    """Run all requests, and return the seconds of each step in which `batch` of them got a token, or of all."""
    times = []
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        if not batch or len(outputs) == batch:
            times.append(time.perf_counter() - began)
    return times
