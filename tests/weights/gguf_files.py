"""GGUF files of tiny models, written by the package `gguf` as llama.cpp converts models of Transformers.

Names of tensors come from that package's own table, quantised values from its quantisers.
"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.hf_models import all_values

ARCHITECTURES = {
    "apertus": "apertus",
    "arcee": "arcee",
    "bloom": "bloom",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
IN_PAIRS = ("arcee", "granite", "llama", "ministral3", "mistral", "mixtral", "smollm3")
ON_THEIR_SIDE = {  # which matrices are [in, out]
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    "gpt_oss": ("experts.gate_up_proj", "experts.down_proj"),
    "llama4_text": ("experts.gate_up_proj", "experts.down_proj"),
}
# Where a block has numbers in float16, if it is not at its beginning only.
SCALES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
}  # fmt: skip
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # of the codes, which the second number takes back
EPSILON = {  # of layer norms, in config.json
    "cohere": "layer_norm_eps", "cohere2": "layer_norm_eps", "nemotron": "norm_eps", "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}  # fmt: skip
PARTLY_ROTARY = ("cohere2", "glm4", "glm4_moe", "minimax_m2", "nemotron", "stablelm")
SCALINGS = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}


def write_gguf(model: PreTrainedModel, path: Path, kinds: str | Mapping[str, str] = "F32", **options: Any) -> Path:
    """Write a model, its matrices in a type; the model gets the values that the file then holds.

    kinds: the type, or one for each part of a name.
    options: tokenizer (a backend), template, split_max_tensors, and further metadata with __ for a dot.
    """
    config = model.config
    at_most = options.pop("split_max_tensors", 0)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type], split_max_tensors=at_most)
    _add_config(writer, config)
    _add_tokenizer(writer, config, options.pop("tokenizer", None), options.pop("template", None))
    for key, value in options.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    names = _names(writer, config)
    norms: dict[str, list[np.ndarray]] = {}  # of StableLM, one for each head
    for name, parameter in all_values(model):  # each once: a head that is the embedding is left out
        if ".norms." in name:
            norms.setdefault(f"{name.split('.norms.')[0]}.weight", []).append(parameter.detach().numpy())
            continue
        if ".act_fn." in name:  # xIELU's numbers are in the metadata
            continue
        values = parameter.detach().float().numpy()
        on_its_side = name.endswith(ON_THEIR_SIDE.get(config.model_type, ()))
        values, kind = np.swapaxes(values, -1, -2) if on_its_side else values, _kind(name, values, kinds)
        blocks = values if kind == "F32" else quantise(values, kind)  # rows, which may be put in another order
        if kind != "F32":
            values = quants.dequantize(blocks, GGMLQuantizationType[kind])
            parameter.data.copy_(
                torch.from_numpy(np.ascontiguousarray(np.swapaxes(values, -1, -2) if on_its_side else values))
            )
        for target, array in _converted(name, blocks, config):
            found = names.get_name(target, try_suffixes=(".weight", ".bias"))
            assert found is not None, target
            raw = None if kind == "F32" else GGMLQuantizationType[kind]
            writer.add_tensor(found, np.ascontiguousarray(array), raw_dtype=raw)
    for name, rows in norms.items():
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        writer.add_tensor(found, np.stack(rows))
    if config.model_type == "apertus":
        curves = [layer.mlp.act_fn for layer in model.model.layers]
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            getattr(writer, f"add_xielu_{part}")([getattr(curve, part).item() for curve in curves])
    if predicting := getattr(config, "num_nextn_predict_layers", 0):  # of which something has to be skipped
        for layer in range(config.num_hidden_layers, config.num_hidden_layers + predicting):
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(config.hidden_size, np.float32))
            writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
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
    names = _names(writer, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        found, shape = names.get_name(name, try_suffixes=(".weight", ".bias")), tuple(parameter.shape)
        assert found is not None, name
        if len(shape) == 1:
            writer.add_tensor(found, np.zeros(shape, np.float32))
        else:
            stored = gguf.quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind])
            writer.add_tensor(found, np.zeros(stored, np.uint8), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _names(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> Any:
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    return gguf.get_tensor_name_map(architecture, config.num_hidden_layers)


def _kind(name: str, values: np.ndarray, kinds: str | Mapping[str, str]) -> str:
    """The type that a tensor gets: F32 for vectors, routers, and GPT-2's positions."""
    if (
        values.ndim == 1
        or "position" in name
        or ".wpe." in name
        or "gate.weight" in name
        or "router" in name
        or "_bias" in name
    ):
        return "F32"
    return kinds if isinstance(kinds, str) else next(kind for part, kind in kinds.items() if part in name)


def quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """Return blocks, [.., bytes] uint8, of these values, or random ones as large if the package only reads a type."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    try:
        return quants.quantize(values, GGMLQuantizationType[kind])
    except NotImplementedError:
        *rows, k = values.shape
        blocks = random_blocks(kind, math.prod(rows), k, zlib.crc32(values))
        if kind == "MXFP4":
            blocks[..., 0] += round(math.log2(values.std()))
        else:
            _scale(blocks, kind, values.std() / dequantised(blocks, kind).std())
        return blocks.reshape(*rows, -1)


def random_blocks(kind: str, rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Return random bytes as blocks, [rows, blocks, bytes] uint8, with finite numbers where the format has float16."""
    elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng([*kind.encode(), seed])
    blocks = random.integers(0, 256, (rows, k // elements, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(124, 128, blocks.shape[:2])
    else:
        numbers = random.normal(0, 0.01, blocks.shape[:2])
        for at in SCALES.get(kind, (0,)):
            blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
            numbers *= MIDDLE.get(kind, 1) * random.uniform(0.8, 1.2, numbers.shape)
    return blocks


def _scale(blocks: np.ndarray, kind: str, factor: float) -> None:
    """Multiply the scales in blocks."""
    for at in SCALES.get(kind, (0,)):
        numbers = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16) * np.float16(factor)
        blocks[..., at : at + 2] = numbers.view(np.uint8)


def dequantised(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of blocks, [rows, k] float32, as the package reads them."""
    return quants.dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[kind])


def _converted(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Convert one tensor as llama.cpp's converter does, and return its parts as (name in Transformers, values).

    values: or blocks, because only rows change places.
    """
    kind, heads = config.model_type, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    part = name.split(".")[-2]
    if kind == "bloom":
        name = name.removeprefix("transformer.")
    if name.endswith("e_score_correction_bias"):
        stem = name.removesuffix("_bias").replace("mlp.gate.moe_statics", "mlp.moe_statics")
        stem = stem.replace("mlp.e_score", "block_sparse_moe.e_score") if kind == "minimax_m2" else stem
        return [(f"{stem}.bias", values.reshape(-1))]
    if kind == "gpt_oss" and "gate_up_proj" in name:
        stem, suffix = name.split("gate_up_proj")
        suffix = suffix.replace("_", ".") or ".weight"
        return [(f"{stem}gate_proj{suffix}", values[:, ::2]), (f"{stem}up_proj{suffix}", values[:, 1::2])]
    if name.endswith(("experts.down_proj_bias", "self_attn.sinks")):
        return [(name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight", values)]
    if name.endswith(".experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", values)]
    if kind in IN_PAIRS and part in ("q_proj", "k_proj"):
        count = heads if part == "q_proj" else kv_heads
        turned = values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2)
        return [(name, turned.reshape(values.shape))]
    if (kind.startswith("gemma") or kind == "nemotron") and name.endswith("norm.weight"):
        return [(name, values + 1)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, values[0])]
    if "query_key_value" in name:
        kv_heads = heads if kind == "bloom" else config.num_kv_heads if config.new_decoder_architecture else 1
        grouped = values.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, -1)
        pieces = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
        return [
            (name, np.concatenate([piece.reshape(-1, *values.shape[1:]) for piece in pieces]).reshape(values.shape))
        ]
    return [(name, values)]


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind, rope = config.model_type, getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(getattr(config, "max_position_embeddings", 512))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + getattr(config, "num_nextn_predict_layers", 0))
    default = 4 * config.hidden_size
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size_mlp", None)
        or getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_hidden_size", None)
        or default
    )
    writer.add_head_count(config.num_attention_heads)
    if kind in ("bloom", "falcon", "gpt2"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        if kind == "bloom":
            writer.add_head_count_kv(config.num_attention_heads)
        if kind == "falcon":
            writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
            writer.add_tensor_data_layout("jploski")
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if kind in EPSILON:
        writer.add_layer_norm_eps(getattr(config, EPSILON[kind]))
    if kind not in EPSILON or kind == "nemotron":
        writer.add_layer_norm_rms_eps(getattr(config, EPSILON.get(kind, "rms_norm_eps")))
    if kind in PARTLY_ROTARY:
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if kind in ("phi3", "phimoe"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        factor = rope.get("attention_factor") or rope.get("short_mscale")
        if factor is not None:
            writer.add_rope_scaling_attn_factors(factor)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if kind in IN_PAIRS:
            writer.add_rope_dimension_count(head_dim)
        if kind in IN_PAIRS or kind in ("apertus", "cohere2", "nemotron"):
            writer.add_vocab_size(config.vocab_size)
    if kind in ("cohere2", "gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if kind in ("exaone4", "olmo3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([item == "sliding_attention" for item in config.layer_types])
    if kind == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "ministral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            getattr(writer, f"add_{key}")(getattr(config, key))
    if kind in ("gpt_oss", "llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"):
        is_local = kind in ("gpt_oss", "llama4_text", "minimax_m2", "mixtral", "phimoe")
        writer.add_expert_count(config.num_local_experts if is_local else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    _add_routers(writer, kind, config)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind in ("ernie4_5_moe", "glm4_moe", "gpt_oss", "llama4_text", "minimax_m2", "qwen2_moe", "qwen3_moe"):
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(inner)
    _add_rope(writer, rope.get("full_attention", rope))


def _add_routers(writer: gguf.GGUFWriter, kind: str, config: Any) -> None:
    """Add what the routers of GLM-4.5, ERNIE 4.5 and MiniMax-M2 have beside the number of experts."""
    if kind in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(getattr(config, "num_nextn_predict_layers", 0))
    if kind == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


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


def add_wordpiece(writer: gguf.GGUFWriter, words: list[str]) -> None:
    """Add the words of a vocab.txt as llama.cpp's converter writes them. Those in brackets are special; the first ones
    are [PAD], [UNK], [CLS], [SEP], [MASK]."""
    marked = (word[2:] if word[:2] == "##" else word if word[0] == "[" else f"\u2581{word}" for word in words)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(list(marked))
    writer.add_token_types([3 if word[0] == "[" else 1 for word in words])
    writer.add_token_type_count(2)
    for index, key in enumerate(("pad", "unk", "bos", "sep", "mask")):
        getattr(writer, f"add_{key}_token_id")(index)


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
