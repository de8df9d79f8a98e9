"""Reads the config.json of OLMo 2."""

from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import Numbers, gated_decoder, no_windows


def read_olmo2(read: ConfigReader) -> Numbers:
    """Read the numbers. `attention_bias` applies to all four products of attention."""
    numbers = gated_decoder(read)
    bias = read.boolean("attention_bias", False)
    return numbers | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }
