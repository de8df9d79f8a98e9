"""Which config.json files are read: of any age and spelling, and as published."""

import pytest

from penstock.errors import ModelLoadError
from penstock.models.config_json import parse_model_config
from tests.models.configs import LLAMA, LLAMA3, MISTRAL, PHI3, PUBLISHED, QWEN2, QWEN3_MOE


def test_defaults_of_an_old_file() -> None:
    """Guards against Llama 2's files, which name no key/value heads, no head_dim and no rope_theta."""
    config = parse_model_config(LLAMA)
    assert (config.num_key_value_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
    assert (config.dtype, config.tie_word_embeddings, config.hidden_act) == ("float32", False, "silu")
    assert parse_model_config(LLAMA | {"torch_dtype": "float16"}).dtype == "float16"
    assert parse_model_config(LLAMA | {"torch_dtype": "float16", "dtype": "bfloat16"}).dtype == "bfloat16"
    assert parse_model_config(LLAMA | {"use_cache": True, "num_beams": 4, "_name_or_path": "x"}) == config


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "Gemma 2 2B": (4096, None) * 13,
    "Gemma 3 1B": ((512,) * 5 + (None,)) * 4 + (512, 512),
    "Phi-3 mini 4k": (2047,) * 32,
}  # the others see everything


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    """Guards against strictness that refuses the checkpoints people have."""
    config = parse_model_config(PUBLISHED[name])
    assert config.layer_windows == WINDOWS.get(name, (None,) * config.num_hidden_layers)
    assert config.dtype == PUBLISHED[name]["torch_dtype"]


def test_windows_of_mistral() -> None:
    """Guards against 7B v0.1 (4096) and v0.2 (null) being read alike."""
    assert parse_model_config(MISTRAL).layer_windows == (4096,) * 3
    assert parse_model_config(MISTRAL | {"sliding_window": None}).layer_windows == (None,) * 3
    assert parse_model_config(MISTRAL | {"sliding_window": 7}).layer_windows == (7,) * 3


def test_windows_of_qwen3_moe() -> None:
    """Guards against a window that is on although the switch is off: then all layers have it, or none."""
    window = {"sliding_window": 7}
    assert parse_model_config(QWEN3_MOE | window | {"max_window_layers": 1}).layer_windows == (None,) * 3
    assert parse_model_config(QWEN3_MOE | window | {"use_sliding_window": True}).layer_windows == (7,) * 3


def test_keys_of_phi4_mini() -> None:
    """Guards against refusing a published file for two keys that change nothing, and against ignoring them where they
    say something."""
    same = parse_model_config(PHI3 | {"full_attn_mod": 1, "interpolate_factor": 1})
    assert same == parse_model_config(PHI3)
    with pytest.raises(ModelLoadError, match="interpolate_factor"):
        parse_model_config(PHI3 | {"interpolate_factor": 2})


def test_rotary_keys_beside_those_of_each_kind_of_layer() -> None:
    """Guards against refusing a null, and against a base or scaling that is accepted and has no effect."""
    both = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 4}
    fields = LLAMA | gemma3 | {"rope_parameters": both}
    assert parse_model_config(fields | {"rope_scaling": None}) == parse_model_config(fields)
    for key, value in (("rope_theta", 1e5), ("rope_local_base_freq", 1e5), ("rope_scaling", {"rope_type": "default"})):
        with pytest.raises(ModelLoadError, match=f"{key} = .* beside rope_parameters"):
            parse_model_config(fields | {key: value})


def test_cache_groups() -> None:
    """Guards against a group order that depends on the window instead of the first layer."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    assert parse_model_config(QWEN2 | fields).cache_groups() == [((0, 2), 8), ((1,), None)]
    assert parse_model_config(LLAMA).cache_groups() == [((0, 1, 2), None)]


@pytest.mark.parametrize("kind", ["llama3", "linear", "default"])
def test_both_spellings_of_rotary_scaling(kind: str) -> None:
    """Guards against a checkpoint of one age being served without its scaling."""
    numbers = {"llama3": LLAMA3, "linear": {"factor": 2.0}, "default": {}}[kind]
    older = parse_model_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": kind} | numbers})
    newer = parse_model_config(LLAMA | {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | numbers})
    both = parse_model_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "type": kind} | numbers})
    assert older.rope == newer.rope == both.rope
    assert (older.rope.rope_type, older.rope.theta) == (kind, 5e5)
    assert older.rope.factor == numbers.get("factor", 1.0)


def test_neutral_values_of_another_number_type() -> None:
    """Guards against refusing 1 where 1.0 is meant."""
    assert parse_model_config(LLAMA | {"partial_rotary_factor": 1}) == parse_model_config(LLAMA)
