"""A config.json means what Transformers means by it: the same keys are given to its own classes."""

import json
from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any

import pytest
from transformers import (
    ApertusConfig,
    ArceeConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from penstock.errors import ModelLoadError
from penstock.models.config_json import parse_model_config
from penstock.spec.model_config import ModelConfig, QueryScale
from tests.models.configs import EXPERTS, LLAMA, PHI3, QWEN2, QWEN3_MOE

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "ApertusForCausalLM": ApertusConfig,
    "ArceeForCausalLM": ArceeConfig,
    "BloomForCausalLM": BloomConfig,
    "Cohere2ForCausalLM": Cohere2Config,
    "CohereForCausalLM": CohereConfig,
    "Glm4ForCausalLM": Glm4Config,
    "GlmForCausalLM": GlmConfig,
    "NemotronForCausalLM": NemotronConfig,
    "StableLmForCausalLM": StableLmConfig,
    "Starcoder2ForCausalLM": Starcoder2Config,
    "Ernie4_5ForCausalLM": Ernie4_5Config,
    "Exaone4ForCausalLM": Exaone4Config,
    "FalconForCausalLM": FalconConfig,
    "GPT2LMHeadModel": GPT2Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "GemmaForCausalLM": GemmaConfig,
    "GptOssForCausalLM": GptOssConfig,
    "GraniteForCausalLM": GraniteConfig,
    "LlamaForCausalLM": LlamaConfig,
    "Ministral3ForCausalLM": Ministral3Config,
    "MinistralForCausalLM": MinistralConfig,
    "MistralForCausalLM": MistralConfig,
    "MixtralForCausalLM": MixtralConfig,
    "Olmo2ForCausalLM": Olmo2Config,
    "Olmo3ForCausalLM": Olmo3Config,
    "Phi3ForCausalLM": Phi3Config,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "SeedOssForCausalLM": SeedOssConfig,
    "SmolLM3ForCausalLM": SmolLM3Config,
}

# What Transformers' config of five layers is made with, where that is not the common thing; and which numbers are not
# Transformers' of that name, nor ModelConfig's default.
MADE_WITH: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": {"num_key_value_heads": 4, "head_dim": 96, "vocab_size": 128256},
    "BloomForCausalLM": {},
    "Cohere2ForCausalLM": {"num_key_value_heads": 4},
    "FalconForCausalLM": {},
    "GPT2LMHeadModel": {},
    "StableLmForCausalLM": {"num_key_value_heads": 4},
    "Starcoder2ForCausalLM": {"num_key_value_heads": 4, "head_dim": 96, "vocab_size": 50304},
}

EVERY_FOURTH = (4096, 4096, 4096, None, 4096)  # layer has no window
NUMBERS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {
        "hidden_act": "gelu_tanh",
        "intermediate_size": 4 * 64,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "alibi": True,
        "scaled_alibi": False,
        "embedding_norm": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
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
    "GemmaForCausalLM": {"embedding_scale": 3072**0.5, "hidden_act": "gelu_tanh", "norm_unit_offset": True},
    "Gemma2ForCausalLM": {
        "norm_unit_offset": True,
        "embedding_scale": 2304**0.5,
        "hidden_act": "gelu_tanh",
        "attention_scale": 256**-0.5,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_windows": (4096, None, 4096, None, 4096),
    },
    "Gemma3ForCausalLM": {
        "norm_unit_offset": True,
        "embedding_scale": 2304**0.5,
        "hidden_act": "gelu_tanh",
        "attention_scale": 256**-0.5,
        "qk_norm": True,
        "layer_windows": (4096,) * 5,
    },
    "ApertusForCausalLM": {"hidden_act": "xielu", "qk_norm": True, "gated_mlp": False},
    "ArceeForCausalLM": {"hidden_act": "relu2", "gated_mlp": False},
    "CohereForCausalLM": {"norm": "layer", "num_parallel_norms": 1},
    "Cohere2ForCausalLM": {
        "norm": "layer",
        "num_parallel_norms": 1,
        "layer_windows": EVERY_FOURTH,
        "rotary_layers": tuple(window is not None for window in EVERY_FOURTH),
    },
    "Glm4ForCausalLM": {"branch_norms": True},
    "NemotronForCausalLM": {
        "norm": "layer",
        "norm_bias": True,
        "norm_unit_offset": True,
        "hidden_act": "relu2",
        "gated_mlp": False,
    },
    "StableLmForCausalLM": {"norm": "layer", "norm_bias": True, "head_dim": 80},
    "Starcoder2ForCausalLM": {
        "norm": "layer",
        "norm_bias": True,
        "hidden_act": "gelu_tanh",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "Exaone4ForCausalLM": {
        "qk_norm": True,
        "layer_windows": EVERY_FOURTH,
        "rotary_layers": tuple(window is not None for window in EVERY_FOURTH),
    },
    "GraniteForCausalLM": {"attention_scale": 1.0},
    "GptOssForCausalLM": {
        "hidden_act": "clamped_silu",
        "layer_windows": (128, None, 128, None, 128),
        "sink_logits": True,
        "attention_out_bias": True,
        "num_experts": 128,
        "moe_intermediate_size": 2880,
        "sparse_layers": (True,) * 5,
    },
    "Ministral3ForCausalLM": {"query_scale": QueryScale(beta=0.1, length=16384)},
    "MinistralForCausalLM": {"layer_windows": (4096,) * 5},
    "MistralForCausalLM": {"layer_windows": (4096,) * 5},
    "MixtralForCausalLM": {"moe_intermediate_size": 14336, "sparse_layers": (True,) * 5},
    "Olmo2ForCausalLM": {"qk_norm": True},
    "Olmo3ForCausalLM": {"qk_norm": True, "layer_windows": EVERY_FOURTH},
    "Qwen2ForCausalLM": {"attention_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "sparse_layers": (True,) * 5},
    "SmolLM3ForCausalLM": {"rotary_layers": tuple(window is not None for window in EVERY_FOURTH)},
}
COMMON = {"hidden_act": "silu", "layer_windows": (None,) * 5}
# Read with a check of their own, or not from a config of Transformers at all.
READ_ELSEWHERE = {"rope", "local_rope", "dtype", "norm_eps", "extra", "default_sampling", "ignored_generation"}
READ_ELSEWHERE |= {"is_text_part", "notes", "source"}
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")


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
