"""gpt-oss: sink logits, windows on every second layer, biases of experts and of the router, yarn without truncation."""

from transformers import GptOssConfig, GptOssForCausalLM

from tests.families.case import Case

GPT_OSS = {
    "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 16, "sliding_window": 16,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 15000.0, "factor": 8.0, "truncate": False,
                        "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip

CASES = [
    Case("gpt-oss", GptOssForCausalLM, GptOssConfig, GPT_OSS, full=True),
    Case("gpt-oss-8-queries-a-kv-head", GptOssForCausalLM, GptOssConfig, GPT_OSS | {
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10, "num_experts_per_tok": 1,
        "num_local_experts": 5, "tie_word_embeddings": True, "attention_bias": False,
    }, shape=True),
    Case("gpt-oss-multi-head", GptOssForCausalLM, GptOssConfig, GPT_OSS | {
        "num_key_value_heads": 6, "num_hidden_layers": 3, "rope_parameters": None,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    }, shape=True),
]  # fmt: skip
