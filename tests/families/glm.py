"""GLM and GLM-4 0414: half of each head rotated, in interleaved pairs; the latter has norms behind branches, too."""

from transformers import Glm4Config, Glm4ForCausalLM, GlmConfig, GlmForCausalLM

from tests.families.case import Case

IDS = {"pad_token_id": 0, "eos_token_id": 2}

CASES = [
    Case("glm", GlmForCausalLM, GlmConfig, IDS | {"head_dim": 16}),
    Case("glm-no-bias", GlmForCausalLM, GlmConfig, IDS | {
        "head_dim": 12, "attention_bias": False, "tie_word_embeddings": True, "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }, shape=True),
    Case("glm4", Glm4ForCausalLM, Glm4Config, IDS | {"head_dim": 8, "attention_bias": False}),
    Case("glm4-biases", Glm4ForCausalLM, Glm4Config, IDS | {
        "head_dim": 20, "num_key_value_heads": 6, "tie_word_embeddings": True,
    }, shape=True),
]  # fmt: skip
