"""Mixtral and Qwen3-MoE: numbers of experts and of those chosen, renormalised or not, sparse and dense layers."""

from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.families.case import Case

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}

CASES = [
    Case("mixtral", MixtralForCausalLM, MixtralConfig, MIXTRAL, full=True),
    Case("mixtral-window-tied", MixtralForCausalLM, MixtralConfig, MIXTRAL | {
        "num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 16, "tie_word_embeddings": True,
    }, shape=True),
    Case("mixtral-top-1", MixtralForCausalLM, MixtralConfig, {
        "num_local_experts": 5, "num_experts_per_tok": 1,
    }, shape=True),
    Case("mixtral-all", MixtralForCausalLM, MixtralConfig, {
        "num_local_experts": 3, "num_experts_per_tok": 3, "num_key_value_heads": 6, "head_dim": 10,
    }, shape=True),
    Case("qwen3-moe", Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {"norm_topk_prob": True}),
    Case("qwen3-moe-8-queries-a-kv-head", Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 10,
    }, shape=True),
    Case("qwen3-moe-multi-head", Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {
        "num_key_value_heads": 6,
    }, shape=True),
    Case("qwen3-moe-dense-layers", Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True,
    }, shape=True),
    Case("qwen3-moe-many-experts", Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {
        "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "tie_word_embeddings": True,
    }, shape=True),
]  # fmt: skip
