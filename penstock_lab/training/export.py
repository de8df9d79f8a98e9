"""Write the demo model as a Hugging Face directory: configuration, generation settings, tokenizer and weights.

The JSON is spelled out here, so it does not change with a library's version. SHAPE alone states the architecture.
DRAFT_SHAPE states that of the small draft model, which has only a config.json and weights, because it uses the demo
model's tokenizer.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from penstock_lab.training import chats

CONTEXT = 1024
SHAPE: dict[str, int] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DRAFT_SHAPE: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SAMPLING: dict[str, object] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
TOKENIZER_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": chats.BOS,
    "eos_token": chats.EOS,
    "pad_token": "<|pad|>",
    "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", chats.END],
    "add_bos_token": True,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
    "chat_template": chats.CHAT_TEMPLATE,
}


def special_ids(tokenizer: Tokenizer) -> dict[str, object]:
    """Find the special ids for config.json and generation_config.json. Text ends with <|eos|>, turns with <|end|>."""
    ids = {token: tokenizer.token_to_id(token) for token in chats.SPECIAL_TOKENS}
    return {
        "bos_token_id": ids[chats.BOS],
        "eos_token_id": [ids[chats.EOS], ids[chats.END]],
        "pad_token_id": ids["<|pad|>"],
    }


def model_config(tokenizer: Tokenizer, shape: Mapping[str, int] = SHAPE) -> dict[str, object]:
    """Describe the model as config.json does."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        **shape,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **special_ids(tokenizer),
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write indented JSON, in the order given, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(out: Path, tokenizer: Tokenizer, state: Mapping[str, torch.Tensor]) -> None:
    """Write all files of the directory except the model card."""
    write_weights(out, tokenizer, state, SHAPE)
    write_json(out / "generation_config.json", special_ids(tokenizer) | SAMPLING)
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    tokenizer.save(str(out / "tokenizer.json"))


def write_weights(out: Path, tokenizer: Tokenizer, state: Mapping[str, torch.Tensor], shape: Mapping[str, int]) -> None:
    """Write config.json and the weights in bfloat16, without the tied head."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", model_config(tokenizer, shape))
    names = [name for name in state if name != "lm_head.weight"]
    weights = {name: state[name].detach().to(torch.bfloat16).contiguous() for name in names}
    path = out / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes files that only the owner can read
