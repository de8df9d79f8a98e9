"""The cache plan: enough, not more than allowed, and refused with numbers where it cannot work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly.memory import MAX_SHARE, plan_kv_cache
from penstock.config import EngineConfig
from penstock.engine.kv_cache_manager import KVCacheManager
from penstock.errors import InvalidRequestError
from penstock.kernels.attention.items import cache_token_bytes
from penstock.kernels.cpu.host import free_memory_bytes
from penstock.models.config_json import parse_model_config
from penstock.spec.model_config import ModelConfig
from tests.kernels.packed import levels

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
        return parse_model_config(BASE)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return parse_model_config({**BASE, **mistral})


def plan(model_config: ModelConfig, free: int = PLENTY, **options):
    options = {"kernels": "reference", **options}  # which pads nothing
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


def test_a_block_as_long_as_a_request_is_a_row():
    """Guards against blocks longer than any request, and a ring shorter than its window or longer than needed."""
    whole = plan(model(), max_num_seqs=8, block_size=4096, max_model_len=500)
    assert [(group.block_size, group.num_blocks, group.ring) for group in whole.groups] == [(512, 8, False)]
    ring = plan(model(40), max_num_seqs=8, block_size=512, max_num_batched_tokens=300)
    assert [(group.block_size, group.num_blocks, group.ring) for group in ring.groups] == [(48, 8, True)]
    assert ring.num_bytes == 8 * 48 * TOKEN_BYTES
    wide = plan(model(500), max_num_seqs=8, block_size=512)
    assert [(group.block_size, group.num_blocks, group.ring) for group in wide.groups] == [(512, 8, False)]


def test_rows_turn_prefix_reuse_off_and_say_so():
    """Guards against an option that is accepted and ignored in silence."""
    config = EngineConfig.from_options(block_size=512).resolve(model())
    assert not config.cache.enable_prefix_caching
    assert "block_size" in config.reasons
    assert config.reasons["enable_prefix_caching"].startswith("off: a block is a whole request")
    config = EngineConfig.from_options(block_size=496).resolve(model())
    assert config.cache.enable_prefix_caching
    assert "enable_prefix_caching" not in config.reasons


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("token_scales", [True, False])
def test_an_int8_cache_takes_little_more_than_half(head_dim, token_scales):
    """Guards against scales that eat what int8 saves, and against padding beyond the bfloat16 cache's."""
    bf16 = cache_token_bytes(8, head_dim, "bfloat16")
    assert cache_token_bytes(8, head_dim, "int8", token_scales=token_scales) <= 0.57 * bf16


def test_planned_bytes_are_the_backends():
    """Guards against a plan for another layout than the one allocated: padded for cpu, as it is for the reference."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 20, "torch_dtype": "bfloat16"}
    narrow = parse_model_config({**BASE, **shape})
    tokens = 4 * 512 * 4  # layers, positions, requests
    expected = {"bfloat16": 4 * 32, "float32": 8 * 32, "int8": 2 * 32 + 16}
    for dtype, num_bytes in expected.items():
        if levels():
            found = plan(narrow, max_num_seqs=4, kernels="cpu", kv_cache_dtype=dtype)
            assert found.num_bytes == tokens * 2 * num_bytes
    found = plan(narrow, max_num_seqs=4, kv_cache_dtype="int8", kv_cache_scales="file")
    assert found.num_bytes == tokens * 2 * 2 * 20


def test_too_little_is_refused_with_the_numbers():
    with pytest.raises(InvalidRequestError, match=r"max_model_len = 512, which needs 0\.5 MiB"):
        plan(model(), kv_cache_memory_bytes=512 * TOKEN_BYTES // 2)
    with pytest.raises(InvalidRequestError, match="kv_cache_memory_bytes"):
        plan(model(), 0)


@settings(max_examples=80)
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
    manager = KVCacheManager(found.groups, enable_prefix_caching=False)
    assert manager.fits_alone(length, chunk)


def test_the_machine_has_memory():
    assert 2**20 < free_memory_bytes() < 2**50
