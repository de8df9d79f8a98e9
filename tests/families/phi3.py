"""Phi-3: fused projections in the checkpoint, a window, part of a head rotated."""

from transformers import Phi3Config, Phi3ForCausalLM

from tests.families.case import Case

PHI3 = {"pad_token_id": 0}  # its own default lies beyond a small vocabulary

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "attention_factor": 1.19,
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}

CASES = [
    Case("phi3", Phi3ForCausalLM, Phi3Config, PHI3 | {"sliding_window": 16}),
    Case("phi3-multi-head-tied", Phi3ForCausalLM, Phi3Config, PHI3 | {
        "num_key_value_heads": 6, "tie_word_embeddings": True,
    }, shape=True),
    Case("phi3-8-queries-a-kv-head", Phi3ForCausalLM, Phi3Config, PHI3 | {
        "num_attention_heads": 8, "num_key_value_heads": 1,
    }, shape=True),
    Case("phi3-partial-rotary", Phi3ForCausalLM, Phi3Config, PHI3 | {
        "num_attention_heads": 3, "num_key_value_heads": 1, "partial_rotary_factor": 0.75,
    }, shape=True),
    Case("phi3-longrope", Phi3ForCausalLM, Phi3Config, PHI3 | {
        "max_position_embeddings": 512, "original_max_position_embeddings": 512, "rope_parameters": LONGROPE,
    }, shape=True),
]  # fmt: skip
