"""Cohere and Cohere 2: parallel branches, layer norms without a bias, interleaved rotary embedding."""

from transformers import Cohere2Config, Cohere2ForCausalLM, CohereConfig, CohereForCausalLM

from tests.families.case import Case

IDS = {"pad_token_id": 0, "logit_scale": 0.6}

CASES = [
    Case("cohere", CohereForCausalLM, CohereConfig, IDS | {"use_qk_norm": True}, full=True),
    Case("cohere-plain-untied", CohereForCausalLM, CohereConfig, IDS | {
        "tie_word_embeddings": False, "attention_bias": True, "num_attention_heads": 8, "num_key_value_heads": 1,
    }, shape=True),
    Case("cohere2", Cohere2ForCausalLM, Cohere2Config, IDS | {
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    }),
    Case("cohere2-4-layers", Cohere2ForCausalLM, Cohere2Config, IDS | {
        "sliding_window": 16, "num_hidden_layers": 4, "attention_bias": True,
    }, shape=True),
]  # fmt: skip
