"""Read the config.json of Gemma 4 (text)."""

import math
from typing import Any

from penstock.models.gemma.config import GATE, HEAD_DIM
from penstock.models.gemma2.config import GLOBAL_THETA, LOCAL_THETA, softcap
from penstock.models.llama.config import attention_biases
from penstock.models.mixtral.config import read_experts
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    LARGEST,
    MAX_HEAD_DIM,
    Numbers,
    activation,
    decoder_shape,
    harmless,
    require_even_heads,
    ropes_by_type,
    sliding_window,
    window_pattern,
    windows_by_type,
)
from penstock.spec.model_config import LayerHeads, RopeConfig

GLOBAL_HEAD_DIM = 512  # this and the following: Transformers' defaults
WINDOW, PERIOD = 512, 6
GLOBAL_KEYS = ("global_head_dim", "num_global_key_value_heads")


def read_gemma4(read: ConfigReader) -> Numbers:
    """Read the numbers of Gemma 4: heads and rotary embedding of the layers without a window differ, and with
    attention_k_eq_v their values are the keys before the norm; values are normed; experts may stand beside the dense
    feed-forward branch.

    The smallest models (E2B, E4B) also have embeddings of their own in each layer, and layers that read the keys and
    values of an earlier one. They are refused.
    """
    shape = decoder_shape(read, head_dim=HEAD_DIM)
    require_even_heads(read, shape["head_dim"])
    layers = shape["num_hidden_layers"]
    if read.integer("hidden_size_per_layer_input", 0, MAX_SIZE, 256):
        raise read.fail("hidden_size_per_layer_input", "0: embeddings for each layer are not supported")
    if read.integer("num_kv_shared_layers", 0, MAX_SIZE, 0):
        raise read.fail("num_kv_shared_layers", "0: layers that share keys and values are not supported")
    harmless(read, "vocab_size_per_layer_input", "use_double_wide_mlp")  # of what was refused
    if read.has("use_bidirectional_attention"):
        read.choice("use_bidirectional_attention", ["vision"])  # among the tokens of an image
    windows = windows_by_type(read, layers, sliding_window(read, WINDOW), window_pattern(layers, PERIOD))
    windows = (*windows[:-1], None)  # the last layer has no window, whatever the file says
    shared = read.boolean("attention_k_eq_v", False)
    return {
        **shape,
        **attention_biases(read),
        **_experts(read, layers),
        **_ropes(read, shape["max_position_embeddings"]),
        "hidden_act": activation(read, "hidden_activation", GATE),
        "layer_windows": windows,
        "layer_heads": _layer_heads(read, shape, [window is None for window in windows], shared=shared),
        "values_are_keys": tuple(shared and window is None for window in windows),
        "qk_norm": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "norm_eps": read.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        "embedding_scale": math.sqrt(shape["hidden_size"]),
        "final_logit_softcapping": softcap(read, "final_logit_softcapping", None),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", True),
    }


def _experts(read: ConfigReader, layers: int) -> Numbers:
    sparse = read.boolean("enable_moe_block", False)
    if not sparse:
        harmless(read, "num_experts", "top_k_experts", "moe_intermediate_size")
        return {"sparse_layers": (False,) * layers}
    return {
        **read_experts(read, "num_experts", "top_k_experts"),
        "moe_intermediate_size": read.integer("moe_intermediate_size", 1, LARGEST["intermediate_size"]),
        "router_expert_scale": True,
        "sparse_layers": (True,) * layers,
    }


def _ropes(read: ConfigReader, context: int) -> Numbers:
    if read.has("rope_parameters"):
        return ropes_by_type(read, context, GLOBAL_THETA, LOCAL_THETA)
    plain: dict[str, Any] = {"original_max_position_embeddings": context}
    return {
        "rope": RopeConfig(theta=GLOBAL_THETA, rope_type="proportional", partial_rotary_factor=0.25, **plain),
        "local_rope": RopeConfig(theta=LOCAL_THETA, **plain),
    }


def _layer_heads(read: ConfigReader, shape: Numbers, is_global: list[bool], *, shared: bool) -> tuple[LayerHeads, ...]:
    """Read the heads of each layer from `per_layer_config`, as Transformers writes it, or from GLOBAL_KEYS, as
    published files have it. () if all layers are alike."""
    common = LayerHeads(shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"])
    found = [common] * len(is_global)
    section = read.section("per_layer_config")
    if section is not None:
        for key in GLOBAL_KEYS:
            if read.has(key):
                raise read.fail(key, "absent beside per_layer_config")
        width = max(map(len, read.raw("per_layer_config")), default=0)  # Transformers writes "05" beside "11"
        for layer in range(len(is_global)):
            if (own := section.section(str(layer)) or section.section(str(layer).zfill(width))) is not None:
                found[layer] = _heads(own, "num_key_value_heads", "head_dim", common)
                own.finish(())
        section.finish(())
    else:
        head_dim_key, kv_key = GLOBAL_KEYS
        others = _heads(read, kv_key, head_dim_key, common._replace(head_dim=GLOBAL_HEAD_DIM))
        if not shared:
            others = others._replace(num_key_value_heads=common.num_key_value_heads)
        found = [others if item else common for item in is_global]
    return tuple(found) if set(found) != {common} else ()


def _heads(read: ConfigReader, kv_key: str, head_dim_key: str, default: LayerHeads) -> LayerHeads:
    heads = default.num_attention_heads
    kv_heads = read.integer(kv_key, 1, heads, default.num_key_value_heads)
    if heads % kv_heads:
        raise read.fail(kv_key, f"a divisor of num_attention_heads = {heads}")
    head_dim = read.integer(head_dim_key, 2, MAX_HEAD_DIM, default.head_dim)
    if head_dim % 2:
        raise read.fail(head_dim_key, "even, because rotary embedding rotates pairs")
    return LayerHeads(heads, kv_heads, head_dim)
