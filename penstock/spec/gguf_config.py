"""Translate the metadata of a GGUF file into what config.json and generation_config.json would say. No torch.

The result is read by the same rules as a file (models/config_json.py). A key of the architecture that is not translated
is refused, because it may change what the model computes.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, shown
from penstock.spec.config_file import LATENT
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.gguf import GGUFTensor, read_floats, read_model

KINDS = {  # keys that tell why an architecture is not supported
    "attention.kv_lora_rank": LATENT,
    **dict.fromkeys(("ssm.state_size", "wkv.head_size"), "a recurrent state instead of keys and values"),
}
SOFTMAX, SIGMOID = 1, 2  # how scores of experts are made
# general.architecture -> architectures, model_type.
ARCHITECTURES = {
    "apertus": ("ApertusForCausalLM", "apertus"),
    "arcee": ("ArceeForCausalLM", "arcee"),
    "bert": ("BertModel", "bert"),  # and RoBERTa, whose positions then begin at 0
    "bloom": ("BloomForCausalLM", "bloom"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "granite": ("GraniteForCausalLM", "granite"),  # and Granite 4 without experts and mamba layers
    "jina-bert-v2": ("JinaBertModel", "bert"),
    "llama": ("LlamaForCausalLM", "llama"),  # and Mistral; with experts: MIXTRAL
    "llama4": ("Llama4ForCausalLM", "llama4_text"),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "nemotron": ("NemotronForCausalLM", "nemotron"),
    "nomic-bert": ("NomicBertModel", "nomic_bert"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),  # with windows: OLMO3
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "phimoe": ("PhimoeForCausalLM", "phimoe"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "stablelm": ("StableLmForCausalLM", "stablelm"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
}
OLMO3 = ("Olmo3ForCausalLM", "olmo3")
MIXTRAL = ("MixtralForCausalLM", "mixtral")
# Keys after "llama." -> Transformers'.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Those that only some architectures have.
OWN_KEYS = {
    "cohere2": {"logit_scale": "logit_scale"},
    "command-r": {"logit_scale": "logit_scale"},
    "ernie4_5-moe": {
        "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    "glm4moe": {
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
        "nextn_predict_layers": "num_nextn_predict_layers",
    },
    "granite": {  # whose divisor of the logits is called a scale
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    },
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}
ENCODERS = ("bert", "jina-bert-v2", "nomic-bert")
POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}  # of encoders
# What a file means that lacks these keys, where config.json would mean something else.
ABSENT: dict[str, dict[str, Any]] = {
    "ernie4_5-moe": {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    "glm4moe": {"first_k_dense_replace": 0, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
}
EPSILON = {  # Transformers' name of the epsilon of layer norms
    **dict.fromkeys(("cohere2", "command-r", "stablelm", *ENCODERS), "layer_norm_eps"),
    "nemotron": "norm_eps",
    "starcoder2": "norm_epsilon",
}
NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "expert_shared_count": 0,
    "expert_gating_func": SOFTMAX,
    "expert_weights_norm": True,
    "leading_dense_block_count": 0,
    "rope.scaling.yarn_ext_factor": 1,
}
HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
# Architecture -> the switches for biases, and for norms of q and k, that its config.json always has.
SWITCHES = {
    **{key: {} for key in ("bloom", *ENCODERS)},
    "command-r": {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    "ernie4_5": {"use_bias": "attn_q.bias"},
    "falcon": {"bias": "attn_qkv.bias"},
    "glm4": {"attention_bias": "attn_q.bias"},
    "glm4moe": {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    "gpt2": {},
    "qwen2moe": {"qkv_bias": "attn_q.bias"},
    "stablelm": {"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    "starcoder2": {"use_bias": "attn_q.bias"},
}
# Architectures whose config.json means a part of each head if it does not say which part rotates.
PARTLY_ROTARY = ("glm4", "glm4moe", "nemotron", "stablelm")
LLAMA4_BETA = "llama_4_scaling_beta"
WITH_WINDOWS = ("cohere2", "exaone4", "gemma2", "gemma3", "gpt-oss", "olmo2", "phi3", "phimoe")
LAST_POOLING = (0, 3)  # none, or the last token's, as for every model without modules.json
# Numbers of layers of the 27B models, which scale their scores by hidden_size / num_attention_heads, not by head_dim.
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"} | {
    "penalty_repeat": "repetition_penalty"
}
END_TOKENS = ("eos", "eot", "eom")
MAVERICK_EXPERTS = 128  # of Llama 4
MAX_FREQUENCIES = 2**15
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
Tensors = Mapping[str, GGUFTensor]


def config_of_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of config.json and of generation_config.json for a model in GGUF files.

    Raises:
        ModelLoadError: a file is damaged, the architecture is not supported, or a key is not.
    """
    metadata, tensors = read_model(path)
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{path}: general.type = {shown(kind)}: it does not hold a whole model")
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        kind = next((reason for key, reason in KINDS.items() if f"{name}.{key}" in metadata), None)
        because = "" if kind is None else f" ({kind})"
        raise ModelLoadError(
            f"{path}: general.architecture = {shown(name)} is not supported{because}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    for needed in ("token_embd.weight", *(("token_types.weight",) if name in ENCODERS else ())):
        if needed not in tensors:
            raise ModelLoadError(f"{path}: holds no {needed}, so it is not a whole model")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    read = ConfigReader(own, f"{path.name}: {name}")
    config = _config(read, name, tensors)
    config |= {f"{key}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")}
    read.finish(HARMLESS)
    return config, _generation(metadata)


def _config(read: ConfigReader, name: str, tensors: Tensors) -> dict[str, Any]:
    """Return config.json without token ids."""
    config = {target: read.raw(key) for key, target in KEYS.items() if read.has(key)}
    if not config.get("num_experts"):
        config = {key: value for key, value in config.items() if key not in ("num_experts", "num_experts_per_tok")}
    embedding = tensors["token_embd.weight"]
    architecture, model_type = MIXTRAL if name == "llama" and "num_experts" in config else ARCHITECTURES[name]
    if name == "olmo2" and read.raw("attention.sliding_window"):
        architecture, model_type = OLMO3
    own = OWN_KEYS.get(name, {})
    config |= ABSENT.get(name, {}) | {target: read.raw(key) for key, target in own.items() if read.has(key)}
    neutral = {key: value for key, value in NEUTRAL.items() if key not in own}
    if name in ("glm4moe", "minimax-m2"):
        neutral["expert_gating_func"] = SIGMOID
    if name in ENCODERS:
        neutral |= {"attention.causal": False, "attention.max_alibi_bias": 8 if name == "jina-bert-v2" else 0}
    read.neutral(neutral | {"vocab_size": embedding.shape[0]})
    if name == "ernie4_5-moe":  # whose shared experts have the width of the others
        config.pop("shared_expert_intermediate_size", None)
    if name in EPSILON:
        config[EPSILON[name]] = config.pop("layer_norm_epsilon", None)
        config.pop("rms_norm_eps", None)  # Nemotron's files have it twice
    if name not in ENCODERS and read.has("pooling_type") and read.raw("pooling_type") not in LAST_POOLING:
        raise read.fail("pooling_type", "3 (last), or absent")
    config |= {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors),
    }
    config |= _switches(name, tensors)
    _add_head_dim(read, name, config)
    config |= _rope_scaling(read, name, tensors, config)
    config |= _family(read, name, tensors, config)
    if name == "llama4":
        config["intermediate_size_mlp"] = config["intermediate_size"]
    if name in ("gpt-oss", "llama4", "minimax-m2"):
        config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
    return config


def _dtype(tensors: Tensors) -> str:
    """Return the type in which the model was trained, as far as its matrices tell."""
    types = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _switches(name: str, tensors: Tensors) -> dict[str, Any]:
    """Return the switches for biases and norms that the tensors imply."""
    if name in SWITCHES:
        return {key: f"blk.0.{tensor}" in tensors for key, tensor in SWITCHES[name].items()}
    stored = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {key: True for key, tensor in stored.items() if tensor in tensors}


def _add_head_dim(read: ConfigReader, name: str, config: dict[str, Any]) -> None:
    """Add head_dim, and the fraction of a head that is rotated."""
    hidden, heads = (read.integer(key, 1, MAX_SIZE) for key in ("embedding_length", "attention.head_count"))
    rotated = read.integer("rope.dimension_count", 1, MAX_SIZE) if read.has("rope.dimension_count") else None
    if name == "gpt2":  # its keys are implied
        read.neutral({"attention.head_count_kv": heads})
        config.pop("num_key_value_heads", None)
        return
    head_dim = config.get("head_dim") or (rotated if name == "llama" else None) or hidden // heads
    read.neutral({"attention.value_length": head_dim})
    config["head_dim"] = head_dim
    rotated = head_dim if rotated is None else rotated  # as in llama.cpp
    if rotated != head_dim or name in PARTLY_ROTARY:
        config["partial_rotary_factor"] = rotated / head_dim if isinstance(head_dim, int) and head_dim else rotated


def _rope_scaling(read: ConfigReader, name: str, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_scaling, from the metadata or from tensors with a factor for each frequency."""
    context = read.integer("context_length", 1, MAX_SIZE)
    kind = read.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "none")
    original = read.integer("rope.scaling.original_context_length", 1, MAX_SIZE, context)
    attention = read.number("rope.scaling.attn_factor", 0.0, MAX_SIZE, 1.0)
    if LONG in tensors and SHORT in tensors:
        factors = {"short_factor": _factors(tensors[SHORT]), "long_factor": _factors(tensors[LONG])}
        scaling = {"rope_type": "longrope", **factors, "factor": context / original, "attention_factor": attention}
        return {"original_max_position_embeddings": original, "rope_scaling": scaling}
    if FREQUENCIES in tensors:  # as Llama 3 computes them
        read.neutral({"rope.scaling.type": "none"})
        same = _factors(tensors[FREQUENCIES])
        scaling = {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        return {"rope_scaling": scaling | {"factor": 1.0, "original_max_position_embeddings": context}}
    found: dict[str, Any] = {"original_max_position_embeddings": original} if name == "phi3" else {}
    linear = "rope.scale_linear" if read.has("rope.scale_linear") else "rope.scaling.factor"
    factor = read.number(linear, 1e-6, MAX_SIZE, 1.0)
    if kind == "yarn":
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
        scaling |= {
            key: read.number(f"rope.scaling.yarn_{key}", 0.0, MAX_SIZE)
            for key in ("beta_fast", "beta_slow")
            if read.has(f"rope.scaling.yarn_{key}")
        }
        scaling |= {"truncate": False} if name == "gpt-oss" else {}
        attention *= read.number("rope.scaling.yarn_attn_factor", 0.0, MAX_SIZE, 1.0)
        growth = 0.1 * math.log(max(factor, 1.0))
        divisor = growth * read.number("rope.scaling.yarn_log_multiplier", 0.0, MAX_SIZE, 0.0) + 1
        scaling["attention_factor"] = attention * (growth + 1) / divisor
        return found | {"rope_scaling": scaling}
    if kind == "longrope":
        raise read.fail("rope.scaling.type", f"none, linear or yarn where {LONG} is absent")
    if factor != 1.0 and kind in ("linear", "none"):
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _factors(tensor: GGUFTensor) -> list[float]:
    return read_floats(tensor, MAX_FREQUENCIES)


def _family(read: ConfigReader, name: str, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that only some families have."""
    if name == "qwen3moe":
        return {"norm_topk_prob": True}
    if name in ENCODERS:  # POOLING is how its states become an embedding, if the file says so
        pooling = POOLING.get(read.integer("pooling_type", 0, len(POOLING), 0))
        gate = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"} if name == "jina-bert-v2" else {}
        return gate | {"pooling_type": pooling, "type_vocab_size": tensors["token_types.weight"].shape[0]}
    if name == "falcon":
        heads = config.get("num_key_value_heads", 1)
        parallel = {"num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1} if heads != 1 else {}
        return {"new_decoder_architecture": heads != 1, "multi_query": heads == 1, "parallel_attn": True, **parallel}
    if name == "granite":
        read.neutral({"rope.scaling.finetuned": True})  # false: no rotary embedding
        return {}
    if name == "glm4moe":  # whose blocks include the layers that predict further tokens
        blocks, predicting = (read.integer(key, 0, MAX_SIZE, 0) for key in ("block_count", "nextn_predict_layers"))
        return {"num_hidden_layers": blocks - predicting}
    if name == "apertus" and "rope_scaling" not in config:  # without it, config.json means a scaling
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}}
    if name == "mistral3":
        beta = read.number("attention.temperature_scale", 0.0, MAX_SIZE, 0.0)
        return {"rope_scaling": None, "rope_parameters": {**config.get("rope_scaling", {}), LLAMA4_BETA: beta}}
    if name == "llama4":
        return _llama4(read, config)
    window = read.raw("attention.sliding_window") or None if name in WITH_WINDOWS else None
    if name == "phimoe":
        scaling = dict(config.get("rope_scaling") or {})
        if scaling:
            scaling["short_mscale"] = scaling["long_mscale"] = scaling.pop("attention_factor", 1.0)
        return {"sliding_window": window, "lm_head_bias": "output.bias" in tensors, "rope_scaling": scaling or None}
    if name in ("gpt-oss", "phi3"):
        return {"sliding_window": window}
    if name == "cohere2":
        pattern = read.raw("attention.sliding_window_pattern")
        return {"sliding_window": window} | (_layer_types(read) or {"sliding_window_pattern": pattern or 4})
    if name in ("exaone4", "olmo2"):
        if window is None:
            return {"sliding_window": None} if name == "exaone4" else {}
        return {"sliding_window": window, **_layer_types(read)}
    if name not in LARGE_GEMMA:
        return {}
    is_large = config.get("num_hidden_layers") == LARGE_GEMMA[name]
    hidden, heads = (read.integer(key, 1, MAX_SIZE) for key in ("embedding_length", "attention.head_count"))
    found = {"query_pre_attn_scalar": hidden // heads if is_large else config["head_dim"], "sliding_window": window}
    pattern = read.raw("attention.sliding_window_pattern")
    found |= _layer_types(read)
    if name == "gemma3" and "layer_types" not in found:
        found["sliding_window_pattern"] = 1 if window is None else 6 if pattern is None else pattern
    return found


def _llama4(read: ConfigReader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp derives: without a window of 0, chunks of 8192 tokens in all layers but every fourth; norms
    of q and k unless the model has the 128 experts of Maverick."""
    read.neutral({"attention.sliding_window": 0})
    layers = {"no_rope_layers": [1] * config["num_hidden_layers"], "attention_chunk_size": None}
    return {
        "interleave_moe_layer_step": read.raw("interleave_moe_layer_step"),
        "use_qk_norm": config.get("num_experts") != MAVERICK_EXPERTS,
        **(layers if read.has("attention.sliding_window") else {}),
    }


def _layer_types(read: ConfigReader) -> dict[str, Any]:
    """Return layer_types, if there is a truth value for each layer: whether it has a window."""
    pattern = read.raw("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: the tokens that end an answer, and how its author samples."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKENS]
    prefix = "general.sampling."
    sampling = {
        SAMPLING.get(key.removeprefix(prefix), key.removeprefix(prefix)): value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    ends: dict[str, Any] = {"eos_token_id": [item for item in dict.fromkeys(ids) if item is not None]}
    return ends | ({"do_sample": True, **sampling} if sampling else {})
