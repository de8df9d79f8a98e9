"""ModelConfig: what Transformers means by a config.json, and what is refused."""

import json
import re
import tomllib
from dataclasses import MISSING
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.errors import ModelLoadError, NotSupportedError
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.registry import DOCUMENTATION
from penstock.spec.model_config import ModelConfig

ROOT = Path(__file__).parents[1]
CLASSES: dict[str, type[PreTrainedConfig]] = {
    "FalconForCausalLM": FalconConfig,
    "GPT2LMHeadModel": GPT2Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "GemmaForCausalLM": GemmaConfig,
    "LlamaForCausalLM": LlamaConfig,
    "MinistralForCausalLM": MinistralConfig,
    "MistralForCausalLM": MistralConfig,
    "MixtralForCausalLM": MixtralConfig,
    "Olmo2ForCausalLM": Olmo2Config,
    "Phi3ForCausalLM": Phi3Config,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | EXPERTS


def saved(architecture: str, **fields: Any) -> dict[str, Any]:
    """config.json as Transformers writes it, with every default spelt out."""
    config = CLASSES[architecture](architectures=[architecture], **fields)
    contents: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return contents


# What Transformers' config of five layers is made with, where that is not the common thing; and which numbers are not
# Transformers' of that name, nor ModelConfig's default.
MADE_WITH: dict[str, dict[str, Any]] = {"FalconForCausalLM": {}, "GPT2LMHeadModel": {}}
NUMBERS: dict[str, dict[str, Any]] = {
    "FalconForCausalLM": {
        "hidden_act": "gelu",
        "intermediate_size": 4 * 4544,
        "num_key_value_heads": 1,
        "num_parallel_norms": 1,
    },
    "GPT2LMHeadModel": {
        "hidden_act": "gelu_tanh",
        "intermediate_size": 4 * 768,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "GemmaForCausalLM": {"embedding_scale": 3072**0.5, "hidden_act": "gelu_tanh"},
    "Gemma2ForCausalLM": {
        "embedding_scale": 2304**0.5,
        "hidden_act": "gelu_tanh",
        "attention_scale": 256**-0.5,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_windows": (4096, None, 4096, None, 4096),
    },
    "Gemma3ForCausalLM": {
        "embedding_scale": 2304**0.5,
        "hidden_act": "gelu_tanh",
        "attention_scale": 256**-0.5,
        "qk_norm": True,
        "layer_windows": (4096,) * 5,
    },
    "MinistralForCausalLM": {"layer_windows": (4096,) * 5},
    "MistralForCausalLM": {"layer_windows": (4096,) * 5},
    "MixtralForCausalLM": {"moe_intermediate_size": 14336, "sparse_layers": (True,) * 5},
    "Olmo2ForCausalLM": {"qk_norm": True},
    "Qwen2ForCausalLM": {"attention_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "sparse_layers": (True,) * 5},
}
COMMON = {"hidden_act": "silu", "layer_windows": (None,) * 5}
# Read with a check of their own, or not from a config of Transformers at all.
READ_ELSEWHERE = {"rope", "local_rope", "dtype", "norm_eps", "extra", "default_sampling", "ignored_generation"}
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("diff", [True, False])
def test_reads_what_transformers_writes(architecture: str, diff: bool) -> None:
    """Guards against a key of Transformers that we call unknown, and against a number read from the wrong key. Every
    number of ModelConfig is held against Transformers' of that name, or against what stands above."""
    made_with = MADE_WITH.get(architecture, {"num_key_value_heads": 4, "head_dim": 96})
    theirs = CLASSES[architecture](architectures=[architecture], dtype="bfloat16", num_hidden_layers=5, **made_with)
    ours = parse_model_config(json.loads(theirs.to_json_string(use_diff=diff)))
    defaults = {item.name: item.default for item in fields_of(ModelConfig) if item.default is not MISSING}
    special = COMMON | NUMBERS.get(architecture, {})
    for name in {item.name for item in fields_of(ModelConfig)} - READ_ELSEWHERE - {"eos_token_ids", "architecture"}:
        wanted = special[name] if name in special else getattr(theirs, name, defaults.get(name))
        assert getattr(ours, name) == wanted, name
    assert (ours.architecture, ours.dtype) == (architecture, "bfloat16")
    assert ours.norm_eps == next(getattr(theirs, name) for name in EPSILONS if hasattr(theirs, name))
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert ours.eos_token_ids == tuple(token for token in ends if token is not None)
    theirs_by_type = getattr(theirs, "rope_parameters", None) or {}
    for rope, kind in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        parameters = (
            theirs_by_type if kind == "full_attention" and kind not in theirs_by_type else theirs_by_type.get(kind)
        )
        assert (rope.theta if rope else None) == (parameters or {}).get("rope_theta")


def test_defaults_of_an_old_file() -> None:
    """Guards against Llama 2's files, which name no key/value heads, no head_dim and no rope_theta."""
    config = parse_model_config(LLAMA)
    assert (config.num_key_value_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
    assert (config.dtype, config.tie_word_embeddings, config.hidden_act) == ("float32", False, "silu")
    assert parse_model_config(LLAMA | {"torch_dtype": "float16"}).dtype == "float16"
    assert parse_model_config(LLAMA | {"torch_dtype": "float16", "dtype": "bfloat16"}).dtype == "bfloat16"
    assert parse_model_config(LLAMA | {"use_cache": True, "num_beams": 4, "_name_or_path": "x"}) == config


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [None] * 4),
        ({"use_sliding_window": True}, [None] * 4),  # max_window_layers is 28
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
        ({"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}, [None, None, None, 8]),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [None] * 4),
        ({"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 8}, [None] * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
    ],
)
def test_windows_of_qwen(fields: dict[str, Any], expected: list[int | None]) -> None:
    """Guards against windows on the wrong layers: the same keys are given to Transformers."""
    theirs = Qwen2Config(num_hidden_layers=4, **fields)
    ours = parse_model_config(QWEN2 | {"num_hidden_layers": 4} | fields).layer_windows
    assert list(ours) == expected
    assert [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types] == expected


# Shapes and switches as published with well-known checkpoints, bookkeeping included.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Falcon 7B": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
        "vocab_size": 65024,
    },
    "Falcon 40B": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 8192, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
        "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
        "vocab_size": 65024,
    },
    "Falcon RW 1B": {
        "alibi": True, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
        "hidden_size": 2048, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": False, "new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24,
        "parallel_attn": False, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
        "vocab_size": 50304,
    },
    "Falcon 11B": {
        "activation": "gelu", "alibi": False, "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0,
        "bias": False, "bos_token_id": 11, "eos_token_id": 11, "ff_factor": 4, "ffn_hidden_size": 16384,
        "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 8192, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1,
        "parallel_attn": True, "rope_scaling": None, "rope_theta": 500042.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.39.2", "use_cache": True, "vocab_size": 65024,
    },
    "Gemma 2B": {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
        "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
    },
    "Gemma 2 2B": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "Llama 2 7B": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
    },
    "Llama 3.2 1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Qwen2.5 0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3 0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Mixtral 8x7B": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen3 30B A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Phi-3 mini 4k": {  # its auto_map has to be taken out: code of a checkpoint is never run
        "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
    },
    "OLMo 2 7B": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": False, "vocab_size": 100352,
    },
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [True] * 4),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True]),
    ],
)
def test_sparse_layers_of_qwen(fields: dict[str, Any], expected: list[bool]) -> None:
    """Guards against experts in the wrong layers: the same keys are given to Transformers."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "vocab_size": 8}
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | EXPERTS | fields | {"num_key_value_heads": 2}))
    assert [hasattr(layer.mlp, "experts") for layer in theirs.model.layers] == expected
    ours = parse_model_config(QWEN3_MOE | {"num_hidden_layers": 4} | fields)
    assert list(ours.sparse_layers) == expected
    assert not ours.norm_topk_prob  # what Transformers takes where the file is silent


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("num_experts", {"num_experts": 0}),
        ("num_local_experts", {"num_experts": None}),
        ("mlp_only_layers", {"mlp_only_layers": [3]}),
        ("mlp_only_layers", {"mlp_only_layers": [True]}),
        ("mlp_only_layers", {"mlp_only_layers": 0}),
        ("decoder_sparse_step", {"decoder_sparse_step": 0}),
        ("norm_topk_prob", {"norm_topk_prob": 1}),
        ("max_window_layers", {"use_sliding_window": True, "max_window_layers": 2}),
    ],
)
def test_experts_that_make_no_sense_are_named(key: str, fields: dict[str, Any]) -> None:
    """Guards against a model that is built with other experts than its file says."""
    with pytest.raises(ModelLoadError, match=key):
        parse_model_config(QWEN3_MOE | fields)


def test_windows_of_qwen3_moe() -> None:
    """Guards against a window that is on although the switch is off: then all layers have it, or none."""
    window = {"sliding_window": 7}
    assert parse_model_config(QWEN3_MOE | window | {"max_window_layers": 1}).layer_windows == (None,) * 3
    assert parse_model_config(QWEN3_MOE | window | {"use_sliding_window": True}).layer_windows == (7,) * 3


PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "max_position_embeddings": 8192}
PAIRS = len(range(0, LLAMA["hidden_size"] // LLAMA["num_attention_heads"], 2))
LONGROPE = {"type": "longrope", "short_factor": [1.0] * PAIRS, "long_factor": [2.0] * PAIRS}


def test_original_context_of_phi3() -> None:
    """Guards against factors and an attention factor chosen by another context than Transformers': 4096 where the file
    is silent, and beside the section only."""
    rope = parse_model_config(PHI3 | {"rope_scaling": LONGROPE}).rope
    sizes = {name: PHI3[name] for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")}
    theirs = Phi3Config(rope_scaling=dict(LONGROPE), **sizes)
    assert rope is not None
    assert theirs.rope_parameters["original_max_position_embeddings"] == 4096
    assert (rope.original_max_position_embeddings, rope.factor) == (4096, 2.0)
    for beside, inside in (({}, 64), ({"original_max_position_embeddings": 64}, 4096)):
        scaling = LONGROPE | {"original_max_position_embeddings": inside}
        with pytest.raises(ModelLoadError, match="rope_scaling: original_max_position_embeddings"):
            parse_model_config(PHI3 | beside | {"rope_scaling": scaling})


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_scalings_that_phi3_does_not_have(kind: str) -> None:
    """Guards against a scaling that Transformers refuses here, or takes for longrope ("yarn")."""
    with pytest.raises(ModelLoadError, match="rope_scaling"):
        parse_model_config(PHI3 | {"rope_scaling": {"type": kind, "factor": 2.0}})


def test_keys_of_phi4_mini() -> None:
    """Guards against refusing a published file for two keys that change nothing, and against ignoring them where they
    say something."""
    same = parse_model_config(PHI3 | {"full_attn_mod": 1, "interpolate_factor": 1})
    assert same == parse_model_config(PHI3)
    with pytest.raises(ModelLoadError, match="interpolate_factor"):
        parse_model_config(PHI3 | {"interpolate_factor": 2})


def test_rotary_keys_beside_those_of_each_kind_of_layer() -> None:
    """Guards against refusing a null, and against a base or scaling that is read by nobody."""
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


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


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


def test_generation_config_goes_first() -> None:
    """Guards against chat models that end only at config.json's token: their own end token stands in
    generation_config.json."""
    generation = {"eos_token_id": [7, 2, 7], "bos_token_id": 5, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    config = parse_model_config(LLAMA, generation)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 2), 5)
    assert config.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    alone = parse_model_config(LLAMA, {})
    assert (alone.eos_token_ids, alone.bos_token_id, alone.default_sampling) == ((2,), 1, {})


def test_sampling_defaults_count_only_where_transformers_samples() -> None:
    """Guards against a temperature taken from a file whose author generates greedily. The repetition penalty is no
    part of sampling and counts always."""
    fields = {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert parse_model_config(LLAMA, fields).default_sampling == {"repetition_penalty": 1.1}
    assert parse_model_config(LLAMA, fields | {"do_sample": True}).default_sampling == fields


def test_do_sample_false_is_greedy_and_temperature_zero_loads() -> None:
    """Guards against drawing at temperature 1 where the author says not to draw, and against a model that does not
    load because its file spells greedy as temperature 0."""
    assert parse_model_config(LLAMA, {"do_sample": False, "top_p": 0.9}).default_sampling == {"temperature": 0.0}
    fields = {"do_sample": True, "temperature": 0, "top_k": 20}
    assert parse_model_config(LLAMA, fields).default_sampling == {"temperature": 0.0, "top_k": 20}
    assert parse_model_config(LLAMA, {"temperature": 0.0, "top_p": 0.0}).default_sampling == {}


def test_generation_keys_that_are_not_applied_are_told() -> None:
    """Guards against settings that are accepted and ignored: what changes the answer and is not built, and what nobody
    knows, is listed. Neutral values and bookkeeping are not; a limit of new tokens is applied."""
    told = {"watermarking_config": {"x": 1}, "guidance_scale": 3, "num_beams": 4, "nonsense": 1, "max_length": 4096}
    odd = {"early_stopping": 0, "num_return_sequences": True}
    quiet = {"num_beam_groups": 1, "length_penalty": 1, "suppress_tokens_at": None, "bad_words_ids": []}
    book = {
        "transformers_version": "4.40",
        "_from_model_config": True,
        "pad_token_id": [0],
        "cache_implementation": "x",
    }
    config = parse_model_config(LLAMA, told | odd | quiet | book | {"max_new_tokens": 64, "eos_token_id": 3})
    assert config.ignored_generation == tuple(sorted(told | odd))
    assert config.default_sampling == {"max_tokens": 64}
    assert parse_model_config(LLAMA, quiet | book).ignored_generation == ()


def test_what_transformers_writes_for_generation_is_all_known() -> None:
    """Guards against a complaint about the defaults of Transformers' own GenerationConfig, spelt out."""
    for theirs in (GenerationConfig(), GenerationConfig.from_model_config(LlamaConfig())):
        contents = json.loads(theirs.to_json_string(use_diff=False))
        assert parse_model_config(LLAMA, contents | {"bos_token_id": 1, "eos_token_id": 2}).ignored_generation == ()


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": False}])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", [0.9]),
        ("min_p", float("nan")),
        ("top_k", 1.5),
        ("repetition_penalty", "1"),
        ("repetition_penalty", 10**400),
        ("max_new_tokens", "64"),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_wrong_generation_values_are_named(key: str, value: object, do_sample: dict[str, Any]) -> None:
    """Guards against a value of a wrong type that is skipped because it would not count."""
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {key} = "):
        parse_model_config(LLAMA, do_sample | {key: value})


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("num_hidden_layers", 4096),
        ("hidden_size", 2**20),
        ("intermediate_size", 2**20),
        ("num_attention_heads", 2**16),
        ("head_dim", 2**16),
        ("vocab_size", 2**24),
        ("max_position_embeddings", 2**24),
    ],
)
def test_sizes_beyond_any_model_are_refused(key: str, largest: int) -> None:
    """Guards against a MemoryError, or minutes, over a tuple of 2^31 layers: key, value and limit are named."""
    for value in (largest + 1, 2**31 - 1):
        with pytest.raises(ModelLoadError, match=f"{key} = {value} is not allowed.* to {largest}"):
            parse_model_config(LLAMA | {key: value})
    assert getattr(parse_model_config(LLAMA | {"head_dim": 8, key: largest}), key) == largest


def test_neutral_values_of_another_number_type() -> None:
    """Guards against refusing 1 where 1.0 is meant."""
    assert parse_model_config(LLAMA | {"partial_rotary_factor": 1}) == parse_model_config(LLAMA)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 33}, "hidden_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"hidden_act": "relu"}, "hidden_act"),
    ({"dtype": "float8"}, "dtype"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"sliding_window": 8}, "sliding_window"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"eos_token_id": 100}, "eos_token_id"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"bos_token_id": -1}, "bos_token_id"),
    ({"model_type": "mistral"}, "model_type"),
    ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_scaling": {"type": "magic"}}, "rope_scaling: type"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling: beta"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "type"),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 1}}, "beta_fast"),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
    ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"rope_theta": 10**400}, "rope_theta"),  # no float holds it
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_scaling": {"type": "linear", "factor": -(10**400)}}, "factor"),
    ({"is_decoder": 0}, "is_decoder"),
    ({"rope_interleaved": 0}, "rope_interleaved"),
    ({"partial_rotary_factor": True}, "partial_rotary_factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": True}}, "partial_rotary_factor"),
    ({"pruned_heads": []}, "pruned_heads"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_wrong_values_are_named(fields: dict[str, Any], named: str) -> None:
    """Guards against a checkpoint that is computed wrongly instead of refused."""
    with pytest.raises(ModelLoadError) as caught:
        parse_model_config(LLAMA | fields)
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("key", [key for key in LLAMA if not key.endswith("token_id")])
def test_missing_keys_are_named(key: str) -> None:
    """Guards against a default that stands in for a number only the file can know."""
    with pytest.raises(ModelLoadError, match=key):
        parse_model_config({name: value for name, value in LLAMA.items() if name != key})


def test_keys_an_architecture_does_not_have_may_only_agree() -> None:
    """Guards against a bias that the file announces and the architecture leaves out."""
    for architecture, model_type in (("MistralForCausalLM", "mistral"), ("Qwen3ForCausalLM", "qwen3")):
        base = LLAMA | {"architectures": [architecture], "model_type": model_type, "head_dim": 8}
        assert not parse_model_config(base | {"mlp_bias": False}).mlp_bias
        with pytest.raises(ModelLoadError, match="mlp_bias"):
            parse_model_config(base | {"mlp_bias": True})
    with pytest.raises(ModelLoadError, match="use_sliding_window"):
        parse_model_config(MISTRAL | {"use_sliding_window": False})
    with pytest.raises(ModelLoadError, match="attention_bias"):
        parse_model_config(QWEN2 | {"attention_bias": False})
    with pytest.raises(ModelLoadError, match="layer_types"):
        parse_model_config(QWEN2 | {"layer_types": ["sliding_attention"] * 3})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "proportional"),
    ],
)
def test_what_is_planned_is_refused_as_such(fields: dict[str, Any], named: str) -> None:
    """Guards against an error that calls a well-formed checkpoint broken."""
    with pytest.raises(NotSupportedError, match=named):
        parse_model_config(LLAMA | fields)


def test_errors_name_the_documentation_that_exists() -> None:
    """Guards against an error that sends users to a page of the source tree, which `pip install` does not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == DOCUMENTATION
    with pytest.raises(ModelLoadError) as caught:
        parse_model_config(LLAMA | {"architectures": ["NewForCausalLM"]})
    (page,) = re.findall(rf"{DOCUMENTATION}/(\S+)", str(caught.value))
    assert (ROOT / "docs" / page).is_file()


ODD = [None, True, -1, 0, 3, 2**70, 0.5, float("inf"), "", "text", [], [None], [[]], [{}], ["a", 1], {}, {"a": []}]


@pytest.mark.parametrize("name", PUBLISHED)
def test_any_value_of_any_key_is_read_or_refused(name: str) -> None:
    """Guards against a TypeError out of a damaged file: whatever stands at a key, also inside rope_scaling and in
    generation_config.json, the answer is a ModelConfig or one of our errors."""
    base = PUBLISHED[name] | {"rope_parameters": None, "layer_types": None, "auto_map": None}
    scaling = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "truncate": True, "rope_theta": 1e4, "type": "yarn"}
    sampling = ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"]
    sampling += ["max_new_tokens", "suppress_tokens", "num_beams", "nonsense"]
    refused = 0
    for value in ODD:
        tries = [(base | {key: value}, {}) for key in base]
        tries += [(base | {"rope_scaling": scaling | {key: value}}, {}) for key in scaling]
        tries += [(base, {"do_sample": True, key: value}) for key in sampling]
        for config, generation in tries:
            try:
                assert isinstance(parse_model_config(config, generation), ModelConfig)
            except (ModelLoadError, NotSupportedError):
                refused += 1
    assert refused > 200


def test_unknown_architectures_and_remote_code() -> None:
    """Guards against running code of a checkpoint, and against an error that leaves the reader guessing."""
    with pytest.raises(ModelLoadError, match=r"Qwen9ForCausalLM.*supported are .*Mistral.*nearest: Qwen[23]For"):
        parse_model_config(LLAMA | {"architectures": ["Qwen9ForCausalLM"]})
    with pytest.raises(ModelLoadError, match="auto_map"):
        parse_model_config(LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}})


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "JSON"), ("[1]", "object"), ('{"architectures": []}', "architectures"), (None, "no such")],
)
def test_bad_files_are_named(content: str | None, named: str, tmp_path: Path) -> None:
    """Guards against a traceback where the name of the file is wanted."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=named) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
