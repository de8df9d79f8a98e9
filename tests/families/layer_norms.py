"""StableLM, StarCoder2 and Nemotron: layer norms in Llama's place of RMS norms."""

from transformers import (
    NemotronConfig,
    NemotronForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.families.case import Case

CASES = [
    Case("stablelm", StableLmForCausalLM, StableLmConfig, {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    Case("stablelm-parallel", StableLmForCausalLM, StableLmConfig, {
        "partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    }, shape=True),
    Case("starcoder2", Starcoder2ForCausalLM, Starcoder2Config, {"sliding_window": 16}),
    Case("starcoder2-no-bias", Starcoder2ForCausalLM, Starcoder2Config, {
        "use_bias": False, "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": False,
    }, shape=True),
    Case("nemotron", NemotronForCausalLM, NemotronConfig, {"head_dim": 8}, full=True),
    Case("nemotron-biases", NemotronForCausalLM, NemotronConfig, {
        "attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True,
    }, shape=True),
]  # fmt: skip
