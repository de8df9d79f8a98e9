"""Granite 3, and Granite 4 without experts: factors far enough from 1 that each of them matters."""

from transformers import GraniteConfig, GraniteForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.families.case import Case

FACTORS = {
    "embedding_multiplier": 4.0,  # larger ones leave the branches little weight
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "rms_norm_eps": 0.01,
}
HYBRID = FACTORS | {
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
    "mamba_n_heads": 2,
}

CASES = [
    Case("granite", GraniteForCausalLM, GraniteConfig, FACTORS | {"tie_word_embeddings": True}, full=True),
    Case("granite-biases", GraniteForCausalLM, GraniteConfig, FACTORS | {
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6,
    }, shape=True),
    Case("granite-4", GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, HYBRID | {
        "position_embedding_type": "rope", "tie_word_embeddings": True,
    }),
    Case("granite-4-no-rotary", GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, HYBRID | {
        "attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 1,
    }, shape=True),
]  # fmt: skip
