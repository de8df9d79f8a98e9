"""Llama and the families that differ from it by numbers only: every switch of the shared block."""

from typing import Any

from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.families.case import Case
from tests.hf_models import LLAMA3_ROPE

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
UPPER_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
# The factor of the queries grows at every 16 tokens, so that prompts have several.
GROWING = YARN_ROPE | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "mscale": 1.0}
SMOLLM3 = {"pad_token_id": 0, "num_hidden_layers": 3, "no_rope_layer_interval": 2}


def llama(name: str, **fields: Any) -> Case:
    return Case(f"llama-{name}", LlamaForCausalLM, LlamaConfig, fields, shape=True)


CASES = [
    Case(
        "llama", LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}, full=True
    ),
    Case(
        "llama-biases",
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 20},
        shape=True,
    ),
    llama("plain"),
    llama("one-query-a-kv-head", num_key_value_heads=6),
    llama("8-queries-a-kv-head", num_attention_heads=8, num_key_value_heads=1),
    llama("16-queries-a-kv-head", num_attention_heads=16, num_key_value_heads=1, head_dim=6),
    llama("head-10", head_dim=10, num_attention_heads=3, num_key_value_heads=3),
    llama("gelu", hidden_act="gelu"),
    llama("gelu-tanh", hidden_act="gelu_pytorch_tanh"),
    llama("linear-rope", rope_parameters=LINEAR_ROPE),
    llama("yarn", rope_parameters=YARN_ROPE),
    Case("mistral", MistralForCausalLM, MistralConfig, {"sliding_window": 16}, full=True),
    Case("mistral-window-1", MistralForCausalLM, MistralConfig, {"sliding_window": 1}, shape=True),
    Case("mistral-no-window", MistralForCausalLM, MistralConfig, {"sliding_window": None}, shape=True),
    Case(
        "ministral",
        MinistralForCausalLM,
        MinistralConfig,
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    Case("qwen2", Qwen2ForCausalLM, Qwen2Config, {"num_attention_heads": 8, "num_key_value_heads": 1}),
    Case("qwen2-window", Qwen2ForCausalLM, Qwen2Config, UPPER_WINDOW | {"num_hidden_layers": 3}, shape=True),
    Case("qwen3", Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    Case(
        "qwen3-window",
        Qwen3ForCausalLM,
        Qwen3Config,
        UPPER_WINDOW | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
        shape=True,
    ),
    Case("ernie4.5", Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 16, "use_bias": True}),
    Case(
        "ernie4.5-untied",
        Ernie4_5ForCausalLM,
        Ernie4_5Config,
        {"head_dim": 6, "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": False},
        shape=True,
    ),
    Case(
        "ministral3", Ministral3ForCausalLM, Ministral3Config, {"rope_parameters": GROWING, "head_dim": 16}, full=True
    ),
    Case(
        "ministral3-window",
        Ministral3ForCausalLM,
        Ministral3Config,
        {"rope_parameters": GROWING, "head_dim": 10, "sliding_window": 16, "num_key_value_heads": 6},
        shape=True,
    ),
    Case("seed-oss", SeedOssForCausalLM, SeedOssConfig, {"head_dim": 16}),
    Case(
        "seed-oss-biases",
        SeedOssForCausalLM,
        SeedOssConfig,
        {"head_dim": 20, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        shape=True,
    ),
    Case("smollm3", SmolLM3ForCausalLM, SmolLM3Config, SMOLLM3),
    Case(
        "smollm3-window",
        SmolLM3ForCausalLM,
        SmolLM3Config,
        SMOLLM3 | {"use_sliding_window": True, "sliding_window": 16, "attention_bias": True, "mlp_bias": True},
        shape=True,
    ),
]
