"""Llama 4: chunks, layers that do not rotate, a shared expert, weighed inputs, dense layers of another width."""

from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.families.case import Case

LLAMA4 = {
    "num_local_experts": 6, "head_dim": 16, "intermediate_size_mlp": 112, "attention_chunk_size": 20,
    "no_rope_layer_interval": 2, "floor_scale": 16, "attn_scale": 0.3, "pad_token_id": 0,
}  # fmt: skip
SCOUT_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

CASES = [
    Case("llama4", Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"rope_parameters": SCOUT_ROPE}, full=True),
    Case("llama4-dense-layers", Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {
        "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_chunk_size": 7,
        "num_experts_per_tok": 2, "tie_word_embeddings": True, "attention_bias": True, "attn_temperature_tuning": False,
        "num_attention_heads": 8, "num_key_value_heads": 1, "no_rope_layer_interval": 3,
    }, shape=True),
]  # fmt: skip
