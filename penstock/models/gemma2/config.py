"""Read the config.json of Gemma 2 and Gemma 3 (text)."""

import math
from dataclasses import replace

from penstock.models.gemma.config import WINDOW, gate, scaled_decoder
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import LARGEST, Numbers, read_rope, read_scaling, sliding_window, windows_by_type
from penstock.spec.model_config import RopeConfig

QUERY_SCALAR = 256
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


def read_gemma2(read: ConfigReader) -> Numbers:
    """Read the numbers of Gemma 2. Without layer_types, every second layer has the window, from the first on."""
    shape = scaled_decoder(read)
    window, layers = sliding_window(read, WINDOW), shape["num_hidden_layers"]
    read.neutral({"sliding_window_size": window})
    return shape | {
        "hidden_act": gate(read, "hidden_activation", "hidden_act"),
        "rope": read_rope(read, shape["max_position_embeddings"]),
        "layer_windows": windows_by_type(read, layers, window, window_pattern(layers, 2)),
        "attention_scale": query_scale(read),
        "attn_logit_softcapping": softcap(read, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": softcap(read, "final_logit_softcapping", 30.0),
    }


def read_gemma3(read: ConfigReader) -> Numbers:
    """Read the numbers of Gemma 3. Without layer_types, every sixth layer (or sliding_window_pattern) has no window."""
    shape = scaled_decoder(read)
    window, layers = sliding_window(read, WINDOW), shape["num_hidden_layers"]
    pattern = window_pattern(layers, read.integer("sliding_window_pattern", 1, LARGEST["num_hidden_layers"], 6))
    if read.has("attn_logit_softcapping"):  # Transformers has the key but does not use it
        raise read.fail("attn_logit_softcapping", "null for this architecture, or absent")
    return shape | {
        "hidden_act": gate(read, "hidden_activation", "hidden_act"),
        **two_bases(read, shape["max_position_embeddings"]),
        "layer_windows": windows_by_type(read, layers, window, pattern),
        "qk_norm": True,
        "attention_scale": query_scale(read),
        "final_logit_softcapping": softcap(read, "final_logit_softcapping", None),
    }


def query_scale(read: ConfigReader) -> float:
    """Compute the factor of the scores, 1 / sqrt(query_pre_attn_scalar)."""
    return 1 / math.sqrt(read.number("query_pre_attn_scalar", 1e-6, MAX_SIZE, QUERY_SCALAR))


def softcap(read: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a soft cap. Null means no cap; `default` applies if the key is absent."""
    if read.is_null(key) or (default is None and not read.has(key)):
        return None
    return read.number(key, 1e-6, MAX_SIZE, default or 0.0)


def window_pattern(num_layers: int, period: int) -> list[str]:
    """List layer types: the last of every `period` layers has no window."""
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]


def two_bases(read: ConfigReader, max_position_embeddings: int) -> Numbers:
    """Read the rotary embeddings of the layers without and with a window. In older files, only the former is scaled."""
    ropes = {"rope": ("full_attention", GLOBAL_THETA), "local_rope": ("sliding_attention", LOCAL_THETA)}
    plain = {
        name: RopeConfig(theta=theta, original_max_position_embeddings=max_position_embeddings)
        for name, (_, theta) in ropes.items()
    }
    by_type = read.section("rope_parameters")
    if by_type is None:
        local_theta = read.number("rope_local_base_freq", 1.001, MAX_SIZE, LOCAL_THETA)
        rope = read_rope(read, max_position_embeddings, GLOBAL_THETA)
        return {"rope": rope, "local_rope": replace(plain["local_rope"], theta=local_theta)}
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        if read.has(key):
            raise read.fail(key, "null beside rope_parameters, or absent")
    for name, (kind, _) in ropes.items():
        scaling = by_type.section(kind)
        if scaling is not None:
            plain[name] = read_scaling(scaling, plain[name], max_position_embeddings)
    by_type.finish(())
    return plain
