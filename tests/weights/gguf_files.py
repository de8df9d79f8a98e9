"""GGUF files of tiny models, written by the package `gguf` as llama.cpp converts models of Transformers.

Names of tensors come from that package's own table, quantised values from its quantisers.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "falcon": "falcon", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt2": "gpt2", "llama": "llama",
    "mistral": "llama", "mixtral": "llama", "olmo2": "olmo2", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
ON_THEIR_SIDE = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's
SCALINGS = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}


def write_gguf(model: PreTrainedModel, path: Path, kind: str = "F32", **options: Any) -> Path:
    """Write a model, its matrices in the type `kind`; the model gets the values that the file then holds.

    options: tokenizer (a backend), template, split_max_tensors, and further metadata with __ for a dot.
    """
    config = model.config
    at_most = options.pop("split_max_tensors", 0)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type], split_max_tensors=at_most)
    _add_config(writer, config)
    _add_tokenizer(writer, config, options.pop("tokenizer", None), options.pop("template", None))
    for key, value in options.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # each once: a head that is the embedding is left out
        values = parameter.detach().float().numpy()
        is_matrix = values.ndim > 1 and "position" not in name and ".wpe." not in name
        if is_matrix and kind != "F32" and "gate.weight" not in name:
            on_its_side = config.model_type == "gpt2" and name.endswith(ON_THEIR_SIDE)
            values = quants.dequantize(quantized := _quantize(values.T if on_its_side else values, kind), _type(kind))
            assert np.array_equal(_quantize(values, kind), quantized)  # so that the file holds what the model has
            values = values.T if on_its_side else values
            parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        for target, array in _converted(name, values, config):
            found = names.get_name(target, try_suffixes=(".weight", ".bias"))
            assert found is not None, target
            array = np.ascontiguousarray(array, dtype=np.float32)
            if is_matrix and kind != "F32" and "gate.weight" not in name:
                writer.add_tensor(found, _quantize(array, kind), raw_dtype=_type(kind))
            else:
                writer.add_tensor(found, array)
    if getattr(config, "rope_parameters", {}).get("rope_type") == "llama3":
        inverse = model.model.rotary_emb.inv_freq.numpy()
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(len(inverse)) / len(inverse))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    for length in ("short", "long"):
        if factors := getattr(config, "rope_parameters", {}).get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_zeros(config: PreTrainedConfig, path: Path, kind: str) -> Path:
    """Write a model of any size quickly: all its matrices are blocks of zeros."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    _add_config(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        shape = tuple(parameter.shape)
        if len(shape) == 1:
            writer.add_tensor(found, np.zeros(shape, np.float32))
        else:
            stored = gguf.quant_shape_to_byte_shape(shape, _type(kind))
            writer.add_tensor(found, np.zeros(stored, np.uint8), raw_dtype=_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind]


def _quantize(values: np.ndarray, kind: str) -> np.ndarray:
    return quants.quantize(np.ascontiguousarray(values), _type(kind))


def _converted(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Convert one tensor as llama.cpp's converter does, and return its parts as (name in Transformers, values)."""
    kind, heads = config.model_type, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    part = name.split(".")[-2]
    if name.endswith("mlp.experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith("mlp.experts.down_proj"):
        return [(f"{name}.weight", values)]
    if kind in ("llama", "mistral", "mixtral") and part in ("q_proj", "k_proj"):
        count = heads if part == "q_proj" else kv_heads
        turned = values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2)
        return [(name, turned.reshape(values.shape))]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return [(name, values + 1)]
    if kind == "gpt2" and name.endswith(ON_THEIR_SIDE):
        return [(name, values.T)]
    if kind == "falcon" and "query_key_value" in name:
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        grouped = values.reshape(kv_heads, heads // kv_heads + 2, config.head_dim, -1)
        pieces = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
        return [(name, np.concatenate([piece.reshape(-1, values.shape[-1]) for piece in pieces]).reshape(values.shape))]
    return [(name, values)]


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    default = 4 * config.hidden_size
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or default
    )
    writer.add_head_count(config.num_attention_heads)
    if kind in ("falcon", "gpt2"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        if kind == "falcon":
            writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
            writer.add_tensor_data_layout("jploski")
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind == "phi3":
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        if "attention_factor" in rope:
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if kind in ("llama", "mistral", "mixtral"):
            writer.add_rope_dimension_count(head_dim)
            writer.add_vocab_size(config.vocab_size)
    if kind in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            getattr(writer, f"add_{key}")(getattr(config, key))
    if kind in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts if kind == "mixtral" else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_rope(writer, rope.get("full_attention", rope))


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in SCALINGS:
        writer.add_rope_scaling_type(SCALINGS[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tokenizer(writer: gguf.GGUFWriter, config: Any, backend: Backend | None, template: str | None) -> None:
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if template is not None:
        writer.add_chat_template(template)
    if backend is not None:
        add_vocabulary(writer, backend)


def add_vocabulary(writer: gguf.GGUFWriter, backend: Backend, pre: str = "gpt-2") -> None:
    """Add a byte-level tokenizer, or one of pieces with a score for each: the rank of its merge."""
    described = json.loads(backend.to_str())["model"]
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [tuple(pair) for pair in described["merges"]]
    types = [
        (gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)
        if index in added
        else gguf.TokenType.BYTE
        if described["byte_fallback"] and token.startswith("<0x")
        else gguf.TokenType.NORMAL
        for index, token in enumerate(tokens)
    ]
    if described["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
        writer.add_token_scores([-float(ranks.get(token, 10**6 + index)) for index, token in enumerate(tokens)])
        writer.add_unk_token_id(vocabulary[described["unk_token"]])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
