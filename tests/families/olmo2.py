"""OLMo 2: norms behind the branches, and of q and k over all heads."""

from transformers import Olmo2Config, Olmo2ForCausalLM

from tests.families.case import Case

CASES = [
    Case("olmo2", Olmo2ForCausalLM, Olmo2Config, {"pad_token_id": 0, "num_key_value_heads": 6}),
    Case("olmo2-3-queries-a-kv-head", Olmo2ForCausalLM, Olmo2Config, {"pad_token_id": 0}, shape=True),
    Case("olmo2-grouped-tied-biases", Olmo2ForCausalLM, Olmo2Config, {
        "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True,
    }, shape=True),
]  # fmt: skip
