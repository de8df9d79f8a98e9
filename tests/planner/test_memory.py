"""The cache plan: enough, not more than allowed, and refused with numbers where it cannot work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EngineConfig
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.errors import InvalidRequestError
from penstock.model_config import ModelConfig
from penstock.planner.memory import MAX_SHARE, free_memory_bytes, plan_kv_cache

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head dim, float32
PLENTY = 2**40


def model(window: int | None = None) -> ModelConfig:
    if window is None:
        return ModelConfig.from_dict(BASE)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return ModelConfig.from_dict({**BASE, **mistral})


def plan(model_config: ModelConfig, free: int = PLENTY, **options):
    return plan_kv_cache(EngineConfig.from_options(**options).resolve(model_config), model_config, free)


def test_what_the_sequences_need():
    found = plan(model(), max_num_seqs=8)
    assert found.num_bytes == 8 * 512 * TOKEN_BYTES
    assert found.groups[0].num_blocks == 8 * 512 // 16
    assert "8 sequences of 512 tokens" in found.reason


def test_at_most_a_share_of_the_free_memory():
    free = 10 * 512 * TOKEN_BYTES
    found = plan(model(), free, max_num_seqs=32)
    assert 0.95 * MAX_SHARE * free < found.num_bytes <= MAX_SHARE * free
    assert "of the free memory" in found.reason


def test_as_given():
    given = 20 * 512 * TOKEN_BYTES
    found = plan(model(), given, max_num_seqs=2, kv_cache_memory_bytes=given)
    assert found.num_bytes == given
    with pytest.raises(InvalidRequestError, match="at most the free memory"):
        plan(model(), given - 1, max_num_seqs=2, kv_cache_memory_bytes=given)


def test_a_window_needs_no_more_than_the_window():
    assert plan(model(32), max_num_seqs=8, max_num_batched_tokens=64).num_bytes < 8 * 512 * TOKEN_BYTES / 4


def test_too_little_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequestError, match=r"max_model_len = 512, which needs 0\.5 MiB"):
        plan(model(), kv_cache_memory_bytes=512 * TOKEN_BYTES // 2)
    with pytest.raises(InvalidRequestError, match="kv_cache_memory_bytes"):
        plan(model(), 0)


@settings(max_examples=80, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 600)),
    seqs=st.integers(1, 64),
    chunk=st.integers(1, 700),
    length=st.integers(2, 512),
    block_size=st.sampled_from([16, 32, 64, 512]),
    free=st.integers(0, 2**24),
)
def test_a_plan_always_holds_one_longest_sequence(window, seqs, chunk, length, block_size, free):
    """Otherwise a request within max_model_len would be refused, or wait for ever."""
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": chunk, "max_model_len": length}
    try:
        found = plan(model(window), free, block_size=block_size, **options)
    except InvalidRequestError:
        return
    assert found.num_bytes <= free * MAX_SHARE
    manager = KVCacheManager(found.groups)
    assert manager.fits_alone(length, chunk)


def test_the_machine_has_memory():
    assert 2**20 < free_memory_bytes() < 2**50
