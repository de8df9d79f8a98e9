"""Gemma 1 to 4: caps small enough to bend scores, windows smaller than the prompts, two rotary bases."""

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
)

from tests.families.case import Case

SLIDING, FULL = "sliding_attention", "full_attention"
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}  # scores and logits are a few units apart
GEMMA2 = CAPS | {"sliding_window": 16, "query_pre_attn_scalar": 24, "head_dim": 16}
TWO_BASES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA3 = {
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "rope_parameters": TWO_BASES,
}
GEMMA4 = {
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 40,
    "num_key_value_heads": 6,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
}
EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}

CASES = [
    Case("gemma", GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
    Case(
        "gemma-one-kv-head",
        GemmaForCausalLM,
        GemmaConfig,
        {"head_dim": 10, "num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True},
        shape=True,
    ),
    Case("gemma-multi-head", GemmaForCausalLM, GemmaConfig, {"head_dim": 20, "num_key_value_heads": 6}, shape=True),
    Case("gemma2", Gemma2ForCausalLM, Gemma2Config, GEMMA2, full=True),
    Case(
        "gemma2-untied",
        Gemma2ForCausalLM,
        Gemma2Config,
        GEMMA2 | {"tie_word_embeddings": False, "num_key_value_heads": 6, "num_hidden_layers": 3, "head_dim": 20},
        shape=True,
    ),
    Case("gemma3", Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    Case(
        "gemma3-one-kv-head",
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GEMMA3
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "layer_types": [FULL, SLIDING, FULL],
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        shape=True,
    ),
    Case("gemma4", Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4),
    Case("gemma4-experts", Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4 | EXPERTS, full=True),
    Case(
        "gemma4-own-values",
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4
        | {
            "attention_k_eq_v": False,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "global_head_dim": 10,
            "layer_types": [FULL, SLIDING, FULL],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": 1e4, "factor": 4.0},
                SLIDING: TWO_BASES[SLIDING],
            },
        },
        shape=True,
    ),
]
