"""The same bits where everything is wide: K 14336 in eight leaves, a vocabulary of 128256, contexts of several spans.

Two layers of random weights, of which only config.json is on disk. One side of each wide product is narrow (256), and
so are the heads together: what is cut anew, when there is more of it, is the other side.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.assembly import build_engine
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.interface.messages import EngineRequest
from penstock.interface.sampling_params import SamplingParams
from penstock.kernels.attention.items import SPAN
from tests.hf_models import random_ids
from tests.kernels.packed import levels

pytestmark = pytest.mark.skipif(not levels(), reason="no native library")
SHAPE = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
    "hidden_size": 256,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int4": {"quantization": "int4"},
    "int8-x2, int8 cache": {"quantization": "int8-x2", "kv_cache_dtype": "int8"},
}
# Whole spans before a context's last; the attention of the forms not named is bfloat16's own, or float32's.
SPANS = {"bfloat16": 2, "int8-x2, int8 cache": 2}
WATCHED = (0, 1)
Answer = tuple[list[int], list[Any]]


def prompts(spans: int) -> list[list[int]]:
    """A long one, one that begins like it, and two short ones."""
    vocab_size = SHAPE["vocab_size"]
    long = random_ids(spans * SPAN + 150, 1, vocab_size)
    return [long, long[: SPAN + 70] + random_ids(90, 2, vocab_size), random_ids(70, 3), random_ids(30, 4)]


def ask(engine: Engine, prompts: list[list[int]], indices: Sequence[int]) -> dict[int, Answer]:
    """Ids and log-probabilities of what follows these prompts, asked together; odd ones are sampled."""
    found: dict[int, Answer] = {index: ([], []) for index in indices}
    for index in indices:
        params = SamplingParams(temperature=0.9 * (index % 2), seed=5, max_tokens=6, ignore_eos=True, logprobs=4)
        engine.add_request(EngineRequest(str(index), prompts[index], params))
    while engine.has_work:
        for output in engine.step():
            ids, logprobs = found[int(output.request_id)]
            ids.extend(output.new_token_ids)
            logprobs.extend(output.logprobs or [])
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_of_a_wide_stack(form: str, tmp_path: Path) -> None:
    """Guards against sums that are cut another way when there is more of everything: rows, columns, spans, threads."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    asked = prompts(SPANS.get(form, 1))

    def make(**options: Any) -> Engine:
        common = {"model": str(tmp_path), "load_format": "dummy", "kernels": "cpu", "max_model_len": 4608}
        return build_engine(EngineConfig.from_options(**common, max_num_seqs=4, **FORMS[form], **options)).engine

    engine = make(threads=1, max_num_batched_tokens=8192, enable_prefix_caching=False, kv_cache_memory_bytes=2**27)
    alone = {index: ask(engine, asked, [index])[index] for index in WATCHED}
    assert alone[0] != alone[1]
    del engine
    engine = make(threads=2, max_num_batched_tokens=1100, kv_cache_memory_bytes=2**27)
    crowd = ask(engine, asked, range(len(asked)))  # in chunks; the second finds the beginning of the first
    assert engine.stats().num_cached_tokens_total > SPAN
    for index in WATCHED:
        assert crowd[index] == alone[index], f"prompt {index}"
