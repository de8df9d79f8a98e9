"""OLMo 2, OLMo 3 and EXAONE 4: norms behind the branches, and of q and k."""

from transformers import Exaone4Config, Exaone4ForCausalLM, Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM

from tests.families.case import Case

SLIDING, FULL = "sliding_attention", "full_attention"
ONLY_FULL_IS_SCALED = {
    FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64},
    SLIDING: {"rope_type": "default", "rope_theta": 5e5},
}
WINDOWS = {"sliding_window": 16, "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}

CASES = [
    Case("olmo2", Olmo2ForCausalLM, Olmo2Config, {"pad_token_id": 0, "num_key_value_heads": 6}),
    Case("olmo2-3-queries-a-kv-head", Olmo2ForCausalLM, Olmo2Config, {"pad_token_id": 0}, shape=True),
    Case("olmo2-grouped-tied-biases", Olmo2ForCausalLM, Olmo2Config, {
        "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True,
    }, shape=True),
    Case("olmo3", Olmo3ForCausalLM, Olmo3Config, WINDOWS | {"rope_parameters": ONLY_FULL_IS_SCALED}),
    Case("olmo3-multi-head-biases", Olmo3ForCausalLM, Olmo3Config, {
        "sliding_window": 16, "num_hidden_layers": 4, "num_key_value_heads": 6, "attention_bias": True,
    }, shape=True),
    Case("exaone4", Exaone4ForCausalLM, Exaone4Config, WINDOWS | {"head_dim": 16}),
    Case("exaone4-no-window", Exaone4ForCausalLM, Exaone4Config, {
        "sliding_window": None, "layer_types": [FULL] * 2, "tie_word_embeddings": True,
        "num_attention_heads": 8, "num_key_value_heads": 1,
    }, shape=True),
]  # fmt: skip
