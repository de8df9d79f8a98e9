"""config.json files as models were published with them, shortened only where a key repeats what another file shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import EngineConfig, SchedulerConfig
from penstock.errors import InvalidRequestError, ModelLoadError
from penstock.layers.rotary import inverse_frequencies
from penstock.models.config_json import load_model_config, parse_model_config
from penstock.models.registry import find_model
from penstock.spec.model_config import QueryScale

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_CODER = {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 8192, "max_position_embeddings": 262144,
    "max_window_layers": 62, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 2560,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts": 160, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "output_router_logits": False, "qkv_bias": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True,
    "vocab_size": 49152, "unk_token_id": 0,
}  # fmt: skip
FALCON3 = SMOLLM2 | {"activation": "swiglu", "head_dim": 256, "hidden_size": 2304, "rope_theta": 1000042}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModel": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
    "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
    "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_cache": True, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
GLM4 = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
STABLELM2 = {
    "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 13824, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_parallel_residual": True,
    "use_qkv_bias": False, "vocab_size": 100352,
}  # fmt: skip
STARCODER2 = {
    "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
    "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
    "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
    "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MINITRON = {
    "architectures": ["NemotronForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2", "hidden_size": 3072, "initializer_range": 0.0134,
    "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "nemotron",
    "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
AFM = {
    "architectures": ["ArceeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 128, "hidden_act": "relu2", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 18432, "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "arcee",
    "num_attention_heads": 20, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "type": "yarn",
    },
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
APERTUS = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 3,
    "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
    "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 131072,
}  # fmt: skip
ERNIE_45 = {
    "architectures": ["Ernie4_5_ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"},
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 128, "num_hidden_layers": 18, "pad_token_id": 0, "rms_norm_eps": 1e-05, "use_cache": False,
    "vocab_size": 103424, "rope_theta": 500000, "use_bias": False, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
}  # fmt: skip
QWEN25_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vision_config": {"depth": 32},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "model_type": "qwen3_vl"},
}  # fmt: skip
QWEN3_VL_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": "qwen3_vl_moe"},
}  # fmt: skip
GEMMA4_26B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
    "eoa_token_index": 258883, "eoi_token_id": 258882, "image_token_id": 258880, "initializer_range": 0.02,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
        "dtype": "bfloat16", "enable_moe_block": True, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
        "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "intermediate_size": 2112,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
        "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": 8,
        "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "tie_word_embeddings": True, "video_token_id": 258884, "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}  # fmt: skip
MISTRAL_SMALL_31 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
}  # fmt: skip
GRANITE33 = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49159,
}  # fmt: skip
GRANITE4_MICRO = GRANITE33 | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 2560, "init_method": "mup",
    "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 80, "mamba_proj_bias": False, "mlp_bias": None, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0,
    "num_local_experts": 0, "output_router_logits": False, "position_embedding_type": "rope",
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "vocab_size": 100352,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 128012,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
LLLG = ["sliding_attention"] * 3 + ["full_attention"]
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "layer_types": LLLG * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                     "original_max_position_embeddings": 8192, "rope_type": "yarn"},
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False,
    "vocab_size": 100278,
}  # fmt: skip
EXAONE4_32B = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392, "layer_types": LLLG * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
    "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 155136,
}  # fmt: skip
INTERNLM3 = {
    "architectures": ["InternLM3ForCausalLM"], "attention_dropout": 0.0, "bias": False, "bos_token_id": 1,
    "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"}, "eos_token_id": [2, 128131],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240,
    "max_position_embeddings": 32768, "model_type": "internlm3", "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "pad_token_id": 2, "qkv_bias": False, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128512,
}  # fmt: skip
MIMO = {
    "architectures": ["MiMoForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768,
    "max_window_layers": 32, "model_type": "mimo", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_theta": 640000,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 151680,
}  # fmt: skip
MINISTRAL3_8B = MISTRAL_SMALL_31 | {
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
        "vocab_size": 131072,
    },
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_hidden_layers": 62,
    "hidden_size": 3072, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 1536, "vocab_size": 200064, "num_experts_per_tok": 8, "num_local_experts": 256,
    "max_position_embeddings": 196608, "rope_theta": 5000000, "rotary_dim": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "use_cache": True, "tie_word_embeddings": False, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "use_mtp": True, "mtp_transformer_layers": 1,
    "num_mtp_modules": 3, "shared_intermediate_size": 0, "scoring_func": "sigmoid", "dtype": "bfloat16",
}  # fmt: skip
GLM_45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
    "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
    "model_type": "bloom", "n_embed": 4096, "n_inner": None, "n_layer": 30, "num_attention_heads": 32,
    "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 4, "seq_length": 4096, "skip_bias_add": True,
    "skip_bias_add_qkv": False, "slow_but_exact": False, "torch_dtype": "bfloat16", "unk_token_id": 0,
    "use_cache": True, "vocab_size": 250880,
}  # fmt: skip
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4",
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_cache": True,
        "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "llama4_vision_model"},
}  # fmt: skip
PHI35_MOE = {
    "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"}, "bos_token_id": 1,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 4096,
    "initializer_range": 0.02, "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True,
    "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
    "original_max_position_embeddings": 4096, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    },
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
WHOLE = {
    "BLOOM": (BLOOM, "BloomForCausalLM", 4096),
    "MiniMax-M2": (MINIMAX_M2, "MiniMaxM2ForCausalLM", 3072),
    "GLM-4.5-Air": (GLM_45_AIR, "Glm4MoeForCausalLM", 4096),
    "Qwen3-8B": (QWEN3, "Qwen3ForCausalLM", 4096),
    "Qwen3-Coder": (QWEN3_CODER, "Qwen3MoeForCausalLM", 6144),
    "SmolLM2": (SMOLLM2, "LlamaForCausalLM", 576),
    "Falcon3": (FALCON3, "LlamaForCausalLM", 2304),
    "gpt-oss-20b": (GPT_OSS, "GptOssForCausalLM", 2880),
    "Phi-3.5-MoE": (PHI35_MOE, "PhimoeForCausalLM", 4096),
    "Phi-4-mini": (PHI4_MINI, "Phi3ForCausalLM", 3072),
    "Granite 3.3 2B": (GRANITE33, "GraniteForCausalLM", 2048),
    "Granite 4.0 Micro": (GRANITE4_MICRO, "GraniteMoeHybridForCausalLM", 2560),
    "SmolLM3": (SMOLLM3, "SmolLM3ForCausalLM", 2048),
    "OLMo 3 7B": (OLMO3, "Olmo3ForCausalLM", 4096),
    "EXAONE 4.0 32B": (EXAONE4_32B, "Exaone4ForCausalLM", 5120),
    "Seed-OSS 36B": (SEED_OSS, "SeedOssForCausalLM", 5120),
    "MiMo 7B": (MIMO, "MiMoForCausalLM", 4096),
    "InternLM3 8B": (INTERNLM3, "InternLM3ForCausalLM", 4096),
    "ERNIE 4.5 0.3B": (ERNIE_45, "Ernie4_5ForCausalLM", 1024),
    "Command R7B": (COMMAND_R7B, "Cohere2ForCausalLM", 4096),
    "GLM-4 0414": (GLM4, "Glm4ForCausalLM", 4096),
    "StableLM 2 12B": (STABLELM2, "StableLmForCausalLM", 5120),
    "StarCoder2 3B": (STARCODER2, "Starcoder2ForCausalLM", 3072),
    "Minitron 4B": (MINITRON, "NemotronForCausalLM", 3072),
    "AFM 4.5B": (AFM, "ArceeForCausalLM", 2560),
    "Apertus 8B": (APERTUS, "ApertusForCausalLM", 4096),
}
TEXT_PARTS = {
    "Llama 4 Scout": (LLAMA4_SCOUT, "Llama4ForCausalLM", 5120),
    "Gemma 3 4B": (GEMMA3_4B, "Gemma3ForCausalLM", 2560),
    "Qwen2.5-VL 7B": (QWEN25_VL, "Qwen2ForCausalLM", 3584),
    "Gemma 4 26B-A4B": (GEMMA4_26B, "Gemma4ForCausalLM", 2816),
    "Qwen3-VL 2B": (QWEN3_VL, "Qwen3ForCausalLM", 2048),
    "Qwen3-VL 30B-A3B": (QWEN3_VL_MOE, "Qwen3MoeForCausalLM", 2048),
    "Mistral Small 3.1": (MISTRAL_SMALL_31, "MistralForCausalLM", 5120),
    "Ministral 3 8B": (MINISTRAL3_8B, "Ministral3ForCausalLM", 4096),
}
WINDOWS = {
    "Llama 4 Scout": 8192,
    "Phi-3.5-MoE": 131072,
    "Phi-4-mini": 262144,
    "Command R7B": 4096,
    "StarCoder2 3B": 4096,
    "OLMo 3 7B": 4096,
    "EXAONE 4.0 32B": 4096,
}  # of layer 5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", [*WHOLE, *TEXT_PARTS])
def test_is_read(name: str) -> None:
    """Guards against a real file that is refused for a key that changes nothing, or at the value that means off."""
    config, architecture, hidden_size = (WHOLE | TEXT_PARTS)[name]
    found = parse_model_config(config)
    assert (found.architecture, found.hidden_size, found.dtype) == (architecture, hidden_size, "bfloat16")
    assert found.is_text_part == (name in TEXT_PARTS)
    assert found.layer_windows[5] == WINDOWS.get(name)
    assert ("vision_config" in found.notes) == (name in TEXT_PARTS)
    assert ("auto_map" in found.notes) == ("auto_map" in config)


ENCODER = {
    "gradient_checkpointing": False, "hidden_size": 768, "initializer_range": 0.02, "num_attention_heads": 12,
    "transformers_version": "4.47.0", "torch_dtype": "float32", "num_hidden_layers": 12, "intermediate_size": 3072,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
        "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
    },
    "all-mpnet-base-v2": ENCODER | {
        "architectures": ["MPNetForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "model_type": "mpnet", "pad_token_id": 1,
        "relative_attention_num_buckets": 32, "vocab_size": 30527,
    },
    "ModernBERT-base": ENCODER | {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "hidden_activation": "gelu", "initializer_cutoff_factor": 2.0,
        "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_hidden_layers": 22, "pad_token_id": 50283,
        "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True,
        "vocab_size": 50368,
    },
    "jina-embeddings-v2-base-en": ENCODER | {
        "architectures": ["JinaBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "attn_implementation": None,
        "classifier_dropout": None, "emb_pooler": "mean", "feed_forward_type": "geglu", "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "max_position_embeddings": 8192, "model_type": "bert",
        "model_max_length": 8192, "pad_token_id": 0, "position_embedding_type": "alibi", "type_vocab_size": 2,
        "use_cache": True, "vocab_size": 30528,
    },
}  # fmt: skip


def test_encoders_are_read() -> None:
    """Guards against a published file that is refused for a key that changes nothing, and the numbers of another."""
    found = {name: parse_model_config(config) for name, config in ENCODERS.items()}
    contexts = {name: model.max_position_embeddings for name, model in found.items()}
    assert list(contexts.values()) == [512, 512, 8192, 8192]
    modern = found["ModernBERT-base"]
    assert modern.layer_windows[:5] == (None, 65, 65, None, 65)
    assert modern.rope is not None
    assert modern.local_rope is not None
    assert (modern.rope.theta, modern.local_rope.theta) == (160000.0, 10000.0)
    assert [model.num_token_types for model in found.values()] == [0, 0, 0, 2]
    assert {model.hidden_size for model in found.values()} == {768}


def test_what_routers_and_heads_of_mixtures_do() -> None:
    """Guards against a rotation of whole heads, a shared expert that is left out, and layers that predict further
    tokens counted as the model's own."""
    glm, minimax = parse_model_config(GLM_45_AIR), parse_model_config(MINIMAX_M2)
    assert glm.rope is not None
    assert minimax.rope is not None
    assert (glm.rope.rotary_dim(128), minimax.rope.rotary_dim(128)) == (64, 64)
    assert (glm.router_scores, minimax.router_scores) == ("sigmoid", "sigmoid")
    assert (glm.shared_expert_intermediate_size, minimax.shared_expert_gate) == (1408, None)
    assert glm.sparse_layers == (False,) + (True,) * 45
    assert (glm.num_hidden_layers, glm.num_nextn_predict_layers) == (46, 1)
    assert minimax.qk_norm_together
    assert (glm.exact_router, minimax.exact_router) == (True, False)


def test_layers_of_llama4() -> None:
    """Guards against chunks in a layer that sees everything, a factor of queries that rotate, sizes of the other kind
    of branch, and frequencies of Scout that are interpolated where there is nothing between kept and divided ones."""
    scout = parse_model_config(LLAMA4_SCOUT)
    assert scout.layer_windows == (8192, 8192, 8192, None) * 12
    assert scout.rotary_layers == (True, True, True, False) * 12
    assert scout.query_scale == QueryScale(beta=0.1, length=8192, offset=1, only_unrotated=True)
    assert (scout.intermediate_size, scout.moe_intermediate_size, scout.shared_expert_intermediate_size) == (
        16384, 8192, 8192,
    )  # fmt: skip
    assert scout.rope is not None
    plain = 500000.0 ** -(np.arange(64) / 64)
    found = inverse_frequencies(scout.rope, 128, np.zeros((1, 1)), is_long=False)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(found, np.where(turns < 1, plain / 16, plain))
    text = LLAMA4_SCOUT["text_config"]
    assert isinstance(text, dict)
    maverick = text | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None}
    other = parse_model_config(LLAMA4_SCOUT | {"text_config": maverick})
    assert other.sparse_layers == (False, True) * 24
    assert (scout.qk_unit_norm, other.qk_unit_norm) == (True, False)


def test_sizes_that_a_text_part_leaves_out() -> None:
    """Guards against sizes of another Gemma, and end tokens that only the file around the section has."""
    found = parse_model_config(GEMMA3_4B)
    sizes = found.vocab_size, found.num_attention_heads, found.num_key_value_heads, found.head_dim
    assert sizes == (262208, 8, 4, 256)
    assert (found.max_position_embeddings, found.eos_token_ids) == (131072, (1, 106))
    assert found.rope is not None
    assert (found.rope.rope_type, found.rope.factor) == ("linear", 8.0)


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    """Guards against a checkpoint of MiMo that is refused for them, and against a layer of the model left out."""
    table = find_model("MiMoForCausalLM").read_table()
    assert table.ignores("model.mtp_layers.0.self_attn.q_proj.weight")
    assert not table.ignores("model.layers.0.self_attn.q_proj.weight")


def test_numbers_that_follow_from_other_keys() -> None:
    """Guards against layers that rotate where they should not, and against factors of another form."""
    found = parse_model_config(GRANITE33)
    assert (found.embedding_scale, found.attention_scale, found.residual_scale) == (12.0, 0.015625, 0.22)
    assert found.logit_scale == 1 / 8
    assert parse_model_config(SMOLLM3).rotary_layers == (True, True, True, False) * 9
    exaone = parse_model_config(EXAONE4_32B)
    assert exaone.rotary_layers == (True, True, True, False) * 16
    without = parse_model_config(EXAONE4_32B | {"sliding_window": None, "layer_types": None})
    assert (without.rotary_layers, set(without.layer_windows)) == ((), {None})
    olmo = parse_model_config(OLMO3)
    assert olmo.rope is not None
    assert olmo.local_rope is not None
    assert (olmo.rope.rope_type, olmo.local_rope.rope_type) == ("yarn", "default")
    ministral = parse_model_config(MINISTRAL3_8B)
    assert ministral.query_scale == QueryScale(beta=0.1, length=16384)
    assert ministral.rope is not None
    assert ministral.rope.attention_factor == 1.0


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN3_CODER, {"qkv_bias": True}, "qkv_bias = True"),
        (QWEN3_CODER, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512"),
        (QWEN3_CODER, {"use_qk_norm": False}, "use_qk_norm = False"),
        (SMOLLM2, {"logit_scale": 2}, """logit_scale = 2 is unknown.*--hf-overrides '{"logit_scale": null}'"""),
        (QWEN3_VL, {"logit_scale": 2}, """logit_scale = 2 is unknown.*'{"logit_scale": null}'"""),
        (QWEN3_VL, {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (
            QWEN3_VL,
            {"text_config": QWEN3_VL["text_config"] | {"magic": 1}},
            """text_config: magic = 1 is unknown.*'{"text_config": {"magic": null}}'""",
        ),
        (MISTRAL_SMALL_31, {"text_config": {"model_type": "mistral4"}}, "mistral4' is not supported in Mistral3For"),
        (MISTRAL_SMALL_31, {"text_config": 5}, "text_config = 5 must be an object"),
        (GRANITE4_MICRO, {"layer_types": ["mamba"] * 39 + ["attention"]}, "layer_types.*mamba layers are not support"),
        (
            QWEN3,
            {"architectures": ["NewForCausalLM"], "linear_num_key_heads": 16},
            "a hybrid model: some of its layers",
        ),
        (
            MISTRAL_SMALL_31 | {"text_config": {"kv_lora_rank": 512}},
            {"architectures": ["NewForConditionalGeneration"]},
            "latent attention",
        ),
        (
            SMOLLM2,
            {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": [{"ffn": {}}]},
            "a pruned model: its layers have different heads and sizes",
        ),
        (PHI35_MOE, {"rope_scaling": PHI35_MOE["rope_scaling"] | {"long_mscale": 1.0}}, "the same as short_mscale"),
        (PHI35_MOE, {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        (
            LLAMA4_SCOUT,
            {"text_config": LLAMA4_SCOUT["text_config"] | {"rope_scaling": YARN}},
            "use_qk_norm.*attention_factor",
        ),
        (GRANITE4_MICRO, {"num_local_experts": 62}, "num_local_experts = 62"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ],
)
def test_what_changes_the_result_is_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    """Guards against keys that are accepted with any value, and against a remedy that does not help."""
    with pytest.raises(ModelLoadError, match=message):
        parse_model_config(config | change)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(config: dict[str, Any]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return written


def test_overrides(write: Any) -> None:
    """Guards against overrides that replace a whole section, or do not reach the section of the text part."""
    directory = write(SMOLLM2 | {"logit_scale": 2})
    assert load_model_config(directory, {"logit_scale": None, "rms_norm_eps": 1e-6}).norm_eps == 1e-6
    directory = write(QWEN3_VL)
    found = load_model_config(directory, {"text_config": {"num_hidden_layers": 2}})
    assert (found.num_hidden_layers, found.hidden_size) == (2, 2048)
    with pytest.raises(ModelLoadError, match="num_hidden_layers = 'two'"):
        load_model_config(directory, {"text_config": {"num_hidden_layers": "two"}})


@pytest.mark.parametrize("config", [QWEN3, QWEN3_VL, QWEN3 | {"rope_scaling": YARN | {"factor": 2.0}}])
def test_rope_scaling(write: Any, config: dict[str, Any]) -> None:
    """Guards against a lost rope_theta, and against scaling that stands beside that of the file."""
    directory = write(config)
    plain, scaled = load_model_config(directory), load_model_config(directory, None, YARN)
    assert plain.rope is not None
    assert scaled.rope is not None
    assert (scaled.rope.rope_type, scaled.rope.factor, scaled.rope.theta) == ("yarn", 4.0, plain.rope.theta)


@pytest.mark.parametrize("by_type", [False, True])
def test_rope_scaling_with_the_keys_of_transformers_5(write: Any, by_type: bool) -> None:
    """Guards against two sections that contradict each other."""
    section: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    config = {**QWEN3, "rope_parameters": section}
    if by_type:
        text = GEMMA3_4B["text_config"] | {"rope_scaling": None}
        config = GEMMA3_4B | {"text_config": text | {"rope_parameters": {"full_attention": section}}}
    else:
        del config["rope_theta"], config["rope_scaling"]
    rope = load_model_config(write(config), None, YARN).rope
    assert rope is not None
    assert (rope.rope_type, rope.theta) == ("yarn", 5e5)


def test_the_longest_context_with_yarn(write: Any) -> None:
    """Guards against Qwen's longer context being refused, and against an error that does not name the remedy."""
    yarn = load_model_config(write(QWEN3), None, YARN)
    assert SchedulerConfig().resolve(yarn)[0].max_model_len == 40960
    assert SchedulerConfig(max_model_len=131072).resolve(yarn)[0].max_model_len == 131072
    with pytest.raises(InvalidRequestError, match="at most the rotary factor times the original context = 131072"):
        SchedulerConfig(max_model_len=131073).resolve(yarn)
    remedy = (
        """= 40960; .*--rope-scaling '{"rope_type": "yarn", "factor": 4.0, "original_max_position_emb.*": 40960}'"""
    )
    with pytest.raises(InvalidRequestError, match=remedy):
        SchedulerConfig(max_model_len=131072).resolve(parse_model_config(QWEN3))


def test_the_options_are_options_of_the_engine() -> None:
    """Guards against options that only a Python call has."""
    config = EngineConfig.from_options(hf_overrides={"rope_theta": 1e6}, rope_scaling=YARN)
    assert (config.numerics.hf_overrides, config.numerics.rope_scaling) == ({"rope_theta": 1e6}, YARN)
    with pytest.raises(InvalidRequestError, match="hf_overrides"):
        EngineConfig.from_options(hf_overrides="{}")
