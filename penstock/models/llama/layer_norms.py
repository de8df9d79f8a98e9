"""Read the config.json of families that are Llama with layer norms: Cohere, StableLM, StarCoder2 and Nemotron."""

from dataclasses import replace

from penstock.models.llama.config import attention_biases
from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.config_rules import (
    DEFAULT_WINDOW,
    LARGEST,
    Numbers,
    activation,
    decoder_shape,
    harmless,
    no_windows,
    read_rope,
    require_even_heads,
    same_windows,
    sliding_window,
    window_pattern,
    windows_by_type,
)

EPS = 1e-5  # Transformers' default for all of them
COHERE2 = {  # keys of published files that Transformers does not read -> what it computes
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def read_cohere(read: ConfigReader) -> Numbers:
    """Read the numbers of Cohere (Command R): parallel branches, interleaved rotary embedding, a factor of the logits,
    optional norms of each head."""
    numbers = _cohere(read, theta=500000.0)
    layers = numbers["num_hidden_layers"]
    return numbers | {"qk_norm": read.boolean("use_qk_norm", False), "layer_windows": no_windows(read, layers)}


def read_cohere2(read: ConfigReader) -> Numbers:
    """Read the numbers of Cohere 2 (Command R7B, Command A). Only layers with a window rotate. Without layer_types,
    every fourth layer (or sliding_window_pattern) has no window."""
    numbers = _cohere(read, theta=10000.0)
    _check_head_dim(read, numbers)
    layers, window = numbers["num_hidden_layers"], sliding_window(read, DEFAULT_WINDOW)
    period = read.integer("sliding_window_pattern", 1, LARGEST["num_hidden_layers"], 4)
    read.neutral(COHERE2 | {"layer_switch": period})
    harmless(read, "use_parallel_embedding")
    windows = windows_by_type(read, layers, window, window_pattern(layers, period))
    return numbers | {"layer_windows": windows, "rotary_layers": tuple(item is not None for item in windows)}


def _cohere(read: ConfigReader, theta: float) -> Numbers:
    """Read what both generations share. theta: the default base."""
    numbers = _decoder(read, "layer_norm_eps", tied=True, theta=theta)
    return (
        numbers
        | attention_biases(read)
        | {
            "norm_bias": False,
            "num_parallel_norms": 1,
            "rope": replace(numbers["rope"], interleaved=True),
            "logit_scale": read.number("logit_scale", 1e-6, MAX_SIZE, 0.0625),
        }
    )


def read_stablelm(read: ConfigReader) -> Numbers:
    """Read the numbers of StableLM: parts of heads rotated, optional norms of each head, optional parallel branches."""
    numbers = _decoder(read, "layer_norm_eps", partial_rotary=0.25)
    _check_head_dim(read, numbers)
    return numbers | {
        "attention_bias": read.boolean("use_qkv_bias", False),
        "qk_norm": read.boolean("qk_layernorm", False),
        "num_parallel_norms": int(read.boolean("use_parallel_residual", False)),
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_starcoder2(read: ConfigReader) -> Numbers:
    """Read the numbers of StarCoder2: no gate, biases in all products, a window on all layers or none."""
    numbers = _decoder(read, "norm_epsilon", act="gelu_pytorch_tanh", kv_heads=2, tied=True)
    bias = read.boolean("use_bias", True)
    read.neutral({"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True})
    harmless(read, "residual_dropout", "embedding_dropout", "attention_softmax_in_fp32")
    harmless(read, "scale_attention_softmax_in_fp32", "activation_function", "layer_norm_epsilon")  # hidden_act rules
    return numbers | {
        "gated_mlp": False,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "layer_windows": same_windows(read, numbers["num_hidden_layers"], None),
    }


def read_nemotron(read: ConfigReader) -> Numbers:
    """Read the numbers of Nemotron: norms that multiply by 1 + weight, no gate, half of each head rotated."""
    numbers = _decoder(read, "norm_eps", act="relu2", partial_rotary=0.5)
    read.neutral({"rope_percent": numbers["rope"].partial_rotary_factor})
    return (
        numbers
        | attention_biases(read)
        | {
            "gated_mlp": False,
            "norm_unit_offset": True,
            "mlp_bias": read.boolean("mlp_bias", False),
            "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
        }
    )


def _check_head_dim(read: ConfigReader, numbers: Numbers) -> None:
    """Raise ModelLoadError unless the heads divide the hidden size evenly, which Transformers takes for granted."""
    hidden, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    if numbers["head_dim"] * heads != hidden:
        raise read.fail("head_dim", f"hidden_size / num_attention_heads = {hidden // heads}, or absent")


def _decoder(
    read: ConfigReader,
    eps_key: str,
    *,
    act: str = "silu",
    kv_heads: int | None = None,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    tied: bool = False,
) -> Numbers:
    """Read what they share. The keywords are defaults, as in config_rules.gated_decoder."""
    shape = decoder_shape(read, kv_heads=kv_heads)
    require_even_heads(read, shape["head_dim"])
    return shape | {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": read.number(eps_key, 0.0, 1.0, EPS),
        "hidden_act": activation(read, default=act),
        "rope": read_rope(read, shape["max_position_embeddings"], theta, partial_rotary=partial_rotary),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", tied),
    }
