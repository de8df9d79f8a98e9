"""Mixtures of experts: numbers of experts, in all and of those chosen, and what surrounds them."""

from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.families.case import Case

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
QWEN2_MOE = {
    "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
GLM = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
    "head_dim": 16,
}  # fmt: skip
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "head_dim": 16}
MINIMAX = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
PHIMOE = {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0}

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
    Case("qwen2-moe", Qwen2MoeForCausalLM, Qwen2MoeConfig, QWEN2_MOE, full=True),
    Case("qwen2-moe-dense-layers-windows", Qwen2MoeForCausalLM, Qwen2MoeConfig, QWEN2_MOE | {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True,
        "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1, "use_sliding_window": True,
        "sliding_window": 16, "max_window_layers": 3,
    }, shape=True),
    Case("glm4-moe", Glm4MoeForCausalLM, Glm4MoeConfig, GLM | {
        "n_group": 4, "topk_group": 2, "use_qk_norm": True, "num_hidden_layers": 3,
    }, full=True),
    Case("glm4-moe-plain-biases", Glm4MoeForCausalLM, Glm4MoeConfig, GLM | {
        "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 2,
        "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1,
    }, shape=True),
    Case("ernie4-5-moe", Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, ERNIE | {"num_hidden_layers": 3}),
    Case("ernie4-5-moe-some-layers", Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, ERNIE | {
        "moe_num_shared_experts": 0, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2,
        "tie_word_embeddings": False,
    }, shape=True),
    Case("minimax-m2", MiniMaxM2ForCausalLM, MiniMaxM2Config, MINIMAX | {"rotary_dim": 8}),
    Case("minimax-m2-whole-rotary", MiniMaxM2ForCausalLM, MiniMaxM2Config, MINIMAX | {
        "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True,
    }, shape=True),
    Case("phimoe", PhimoeForCausalLM, PhimoeConfig, PHIMOE | {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.24, "long_mscale": 1.24,
            "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 512,
        },
    }),
    Case("phimoe-window-tied", PhimoeForCausalLM, PhimoeConfig, PHIMOE | {
        "num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 16, "tie_word_embeddings": True,
        "attention_bias": False,
    }, shape=True),
    Case("olmoe", OlmoeForCausalLM, OlmoeConfig, OLMOE | {"num_key_value_heads": 6}),
    Case("olmoe-grouped-biases-tied", OlmoeForCausalLM, OlmoeConfig, OLMOE | {
        "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": True, "num_experts_per_tok": 8,
    }, shape=True),
]  # fmt: skip
