"""Arcee and Apertus: feed-forward branches without a gate."""

from transformers import ApertusConfig, ApertusForCausalLM, ArceeConfig, ArceeForCausalLM

from tests.families.case import Case
from tests.hf_models import LLAMA3_ROPE

CASES = [
    Case("arcee", ArceeForCausalLM, ArceeConfig, {"head_dim": 16}),
    Case("arcee-biases", ArceeForCausalLM, ArceeConfig, {
        "attention_bias": True, "mlp_bias": True, "num_attention_heads": 8, "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }, shape=True),
    Case("apertus", ApertusForCausalLM, ApertusConfig, {"pad_token_id": 0, "rope_parameters": LLAMA3_ROPE}, full=True),
    Case("apertus-biases", ApertusForCausalLM, ApertusConfig, {
        "pad_token_id": 0, "attention_bias": True, "num_key_value_heads": 6, "tie_word_embeddings": True,
    }, shape=True),
]  # fmt: skip
