"""Read the config.json of Gemma 2 and Gemma 3 (text)."""

import math

from penstock.models.gemma.config import WINDOW, gate, scaled_decoder
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    LARGEST,
    Numbers,
    read_rope,
    ropes_by_type,
    sliding_window,
    window_pattern,
    windows_by_type,
)

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
        **ropes_by_type(read, shape["max_position_embeddings"], GLOBAL_THETA, LOCAL_THETA),
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
