"""Read the config.json of Llama, Mistral, Ministral, Qwen2, Qwen3 and ERNIE 4.5."""

from dataclasses import replace

from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    DEFAULT_WINDOW,
    Numbers,
    Windows,
    fixed,
    gated_decoder,
    harmless,
    no_windows,
    same_windows,
    sliding_window,
    windows_by_type,
)


def read_llama(read: ConfigReader) -> Numbers:
    """Read the numbers of Llama."""
    numbers = gated_decoder(read) | attention_biases(read)
    harmless(read, "activation")  # Falcon 3 repeats hidden_act, as "swiglu"
    return numbers | {
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
        "mlp_bias": read.boolean("mlp_bias", False),
    }


def read_mistral(read: ConfigReader) -> Numbers:
    """Read the numbers of Mistral: a window on all layers, or none."""
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", False)
    fixed(read, "mlp_bias", False)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], DEFAULT_WINDOW)}


def read_ministral(read: ConfigReader) -> Numbers:
    """Read the numbers of Ministral: a window on the layers that `layer_types` names, or on all without that key."""
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", False)
    fixed(read, "mlp_bias", False)
    window, layers = sliding_window(read, DEFAULT_WINDOW), numbers["num_hidden_layers"]
    everywhere = ["full_attention" if window is None else "sliding_attention"] * layers
    return numbers | {"layer_windows": windows_by_type(read, layers, window, everywhere)}


def read_qwen2(read: ConfigReader) -> Numbers:
    """Read the numbers of Qwen2: q, k and v have a bias, the product after attention does not."""
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", True)
    fixed(read, "mlp_bias", False)
    return numbers | {"attention_bias": True, "layer_windows": upper_windows(read, numbers["num_hidden_layers"])}


def read_qwen3(read: ConfigReader) -> Numbers:
    """Read the numbers of Qwen3: norms of q and k."""
    numbers = gated_decoder(read, head_dim=128) | attention_biases(read)
    fixed(read, "mlp_bias", False)
    return numbers | {"qk_norm": True, "layer_windows": upper_windows(read, numbers["num_hidden_layers"])}


def read_ernie4_5(read: ConfigReader) -> Numbers:
    """Read the numbers of ERNIE 4.5: interleaved rotary embedding; `use_bias` applies to all products."""
    numbers = gated_decoder(read, head_dim=128, theta=500000.0, tied=True)
    bias = read.boolean("use_bias", False)
    return numbers | {
        "rope": replace(numbers["rope"], interleaved=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def attention_biases(read: ConfigReader) -> Numbers:
    """Read `attention_bias`, which applies to all four products of attention."""
    bias = read.boolean("attention_bias", False)
    return {"attention_bias": bias, "attention_out_bias": bias}


def upper_windows(read: ConfigReader, num_layers: int) -> Windows:
    """Read Qwen's windows. With use_sliding_window, the layers that layer_types names have one, or those from
    max_window_layers on; without it, no layer has one."""
    window = sliding_window(read, DEFAULT_WINDOW)
    first_sliding = read.integer("max_window_layers", 0, MAX_SIZE, 28)
    if not read.boolean("use_sliding_window", False):
        window = None
    sliding = "full_attention" if window is None else "sliding_attention"
    default = [sliding if index >= first_sliding else "full_attention" for index in range(num_layers)]
    return windows_by_type(read, num_layers, window, default)
