"""Read the config.json of the first Gemma, and the keys that Gemma 2 and 3 share with it."""

import math

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import ConfigReader
from penstock.spec.config_rules import (
    ACTIVATIONS,
    Numbers,
    activation,
    decoder_shape,
    no_windows,
    read_rope,
    require_even_heads,
)

HEAD_DIM = 256  # this and the following: Transformers' defaults
GATE = "gelu_pytorch_tanh"
WINDOW = 4096


def read_gemma(read: ConfigReader) -> Numbers:
    """Read the numbers of the first Gemma."""
    shape = scaled_decoder(read)
    return shape | {
        "hidden_act": gate(read, "hidden_act", "hidden_activation"),
        "rope": read_rope(read, shape["max_position_embeddings"]),
        "layer_windows": no_windows(read, shape["num_hidden_layers"]),
    }


def scaled_decoder(read: ConfigReader) -> Numbers:
    """Read the numbers that all Gemmas share: sizes, RMS norms, scaled and tied embeddings, causal attention."""
    shape = decoder_shape(read, head_dim=HEAD_DIM)
    require_even_heads(read, shape["head_dim"])
    if not read.has("num_key_value_heads"):
        raise read.fail("num_key_value_heads", "a divisor of num_attention_heads")
    if read.boolean("use_bidirectional_attention", False):
        allowed = "false or absent: a key/value cache serves causal attention only"
        raise read.fail("use_bidirectional_attention", allowed)
    shape |= attention_biases(read)
    return shape | {
        "norm_eps": read.number("rms_norm_eps", 0.0, 1.0),
        "embedding_scale": math.sqrt(shape["hidden_size"]),
        "norm_unit_offset": True,
        "tie_word_embeddings": read.boolean("tie_word_embeddings", True),
    }


def gate(read: ConfigReader, key: str, other: str) -> str:
    """Read the gate's activation. A file may repeat it under the other key, but not contradict it.

    `hidden_act: gelu`, which the first files have, always meant the tanh form.
    """
    named = {name: activation(read, name, GATE) for name in (key, other)}
    if read.raw("hidden_act") == "gelu":
        named["hidden_act"] = ACTIVATIONS[GATE]
    if read.has(other) and named[other] != named[key]:
        raise read.fail(other, f"the same as {key}, which means {named[key]} here, or absent")
    return named[key]
