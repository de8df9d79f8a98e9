"""How the config.json of Llama, Mistral, Ministral, Qwen2 and Qwen3 is read."""

from functools import partial

from penstock.architecture import Numbers, architecture
from penstock.config_reader import MAX_SIZE, ConfigReader
from penstock.models.config_rules import (
    Windows,
    activation,
    decoder_shape,
    fixed,
    no_windows,
    require_even_heads,
    same_windows,
    sliding_window,
    windows_by_type,
)
from penstock.rope_config import read_rope

llama_like = partial(architecture, family="llama")
DEFAULT_WINDOW = 4096  # Transformers' own, where a file leaves it out


def gated_decoder(
    read: ConfigReader,
    *,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    original_context: int | None = None,
    tied: bool = False,
) -> Numbers:
    """What all of them share: sizes, RMS norms, a gated activation, rotary embedding.

    The keywords are what holds where the file is silent; those of rotary embedding are explained in read_rope.
    """
    shape = decoder_shape(read, head_dim=head_dim)
    require_even_heads(read, shape["head_dim"])
    return shape | {
        "hidden_act": activation(read),
        "norm_eps": read.number("rms_norm_eps", 0.0, 1.0),
        "rope": read_rope(
            read,
            shape["max_position_embeddings"],
            theta,
            partial_rotary=partial_rotary,
            original_context=original_context,
        ),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", tied),
    }


@llama_like("LlamaForCausalLM", "llama")
def llama(read: ConfigReader) -> Numbers:
    """`attention_bias` stands for all four products of attention."""
    numbers = gated_decoder(read)
    bias = read.boolean("attention_bias", False)
    return numbers | {
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": read.boolean("mlp_bias", False),
    }


@llama_like("MistralForCausalLM", "mistral")
def mistral(read: ConfigReader) -> Numbers:
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", False)
    fixed(read, "mlp_bias", False)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], DEFAULT_WINDOW)}


@llama_like("MinistralForCausalLM", "ministral")
def ministral(read: ConfigReader) -> Numbers:
    """A window on the layers that `layer_types` names; on all where it names none."""
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", False)
    fixed(read, "mlp_bias", False)
    window, layers = sliding_window(read, DEFAULT_WINDOW), numbers["num_hidden_layers"]
    everywhere = ["full_attention" if window is None else "sliding_attention"] * layers
    return numbers | {"layer_windows": windows_by_type(read, layers, window, everywhere)}


@llama_like("Qwen2ForCausalLM", "qwen2")
def qwen2(read: ConfigReader) -> Numbers:
    """q, k and v have a bias, the product after attention has none."""
    numbers = gated_decoder(read)
    fixed(read, "attention_bias", True)
    fixed(read, "mlp_bias", False)
    return numbers | {"attention_bias": True, "layer_windows": upper_windows(read, numbers["num_hidden_layers"])}


@llama_like("Qwen3ForCausalLM", "qwen3")
def qwen3(read: ConfigReader) -> Numbers:
    numbers = gated_decoder(read, head_dim=128)
    bias = read.boolean("attention_bias", False)
    fixed(read, "mlp_bias", False)
    return numbers | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "layer_windows": upper_windows(read, numbers["num_hidden_layers"]),
    }


def upper_windows(read: ConfigReader, num_layers: int) -> Windows:
    """Qwen: nothing slides unless use_sliding_window; then layer_types says which layers do, else those from
    max_window_layers on."""
    window = sliding_window(read, DEFAULT_WINDOW)
    first_sliding = read.integer("max_window_layers", 0, MAX_SIZE, 28)
    if not read.boolean("use_sliding_window", False):
        window = None
    sliding = "full_attention" if window is None else "sliding_attention"
    default = [sliding if index >= first_sliding else "full_attention" for index in range(num_layers)]
    return windows_by_type(read, num_layers, window, default)
