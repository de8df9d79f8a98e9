"""Llama, Mistral, Ministral, Qwen2 and Qwen3: every switch of the shared block."""

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.families.case import Case
from tests.hf_models import LLAMA3_ROPE

CASES = [
    Case("llama", LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    Case("llama-biases", LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    Case("mistral", MistralForCausalLM, MistralConfig, {"sliding_window": 16}, full=True),
    Case(
        "ministral",
        MinistralForCausalLM,
        MinistralConfig,
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    Case("qwen2", Qwen2ForCausalLM, Qwen2Config, {"num_attention_heads": 8, "num_key_value_heads": 1}),
    Case("qwen3", Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
]
