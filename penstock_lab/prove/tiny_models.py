"""Small models with random weights for the proofs: a config.json each, for the engine option load_format = "dummy"."""

import json
import shutil
from pathlib import Path
from typing import Any

from penstock.weights.hub import MODEL_DIR

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCAB_SIZE = 4096  # size of the demo model's tokenizer, which they share
# Sizes whose products take several panels and do not fill the last one, so that threads share them.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 96,
    "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
WINDOW = 24
LAYERS = ["sliding_attention", "full_attention"]


def _like_llama(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], "model_type": model_type, **fields}


GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
    "layer_types": LAYERS, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Mistral with a window": _like_llama("MistralForCausalLM", "mistral", sliding_window=WINDOW),
    "Mixtral": _like_llama("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-MoE": _like_llama(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, head_dim=16,
    ),
    "Gemma 2": _like_llama(
        "Gemma2ForCausalLM", "gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "Gemma 3": _like_llama("Gemma3ForCausalLM", "gemma3_text", **GEMMA, rope_local_base_freq=10000.0),
    "Falcon": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": VOCAB_SIZE, "hidden_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True,
        "multi_query": False, "parallel_attn": True, "bias": False, "alibi": False, "layer_norm_epsilon": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512, "dtype": "float32",
    },
}  # fmt: skip


def write(directory: Path) -> dict[str, str]:
    """Write each model's config.json and a tokenizer to a separate directory. Return the directories by model."""
    places = {}
    for name, config in MODELS.items():
        place = directory / name.replace(" ", "-")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for file in TOKENIZER:
            shutil.copy(MODEL_DIR / file, place)
        places[name] = str(place)
    return places
