"""Rules for reading a config.json that families share: shapes, activations, biases, windows. No torch.

A family's config.py (models/<family>/) calls the rules that apply to it, with its own spellings and defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.spec.config_reader import MAX_SIZE, ConfigReader
from penstock.spec.rope_config import read_rope

ACTIVATIONS = {  # Hugging Face's name -> the mathematical one in kernels/ops.py
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Sizes that a file must give, and the largest allowed: far larger than in any model, but safe for arithmetic.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**16,
    "max_position_embeddings": 2**24,
}
MAX_HEAD_DIM = 2**16
DEFAULT_WINDOW = 4096  # Transformers' default for sliding_window

Numbers = dict[str, Any]  # fields of ModelConfig
Windows = tuple[int | None, ...]


def decoder_shape(
    read: ConfigReader,
    *,
    spelling: Mapping[str, str] | None = None,
    defaults: Mapping[str, Callable[[Numbers], int]] | None = None,
    head_dim: int | None = None,
) -> Numbers:
    """Read the sizes of a decoder: those of LARGEST, num_key_value_heads and head_dim.

    spelling: the file's key for a size, if it is not Transformers' common name; the common name is accepted too.
    defaults: for each size that the file may leave out, a function of the sizes without a default.
    head_dim: the default; None means hidden_size / num_attention_heads.
    """
    shape: Numbers = {}
    defaults = defaults or {}
    for name in sorted(LARGEST, key=lambda name: name in defaults):  # sizes with a default last
        key = spelled(read, name, spelling)
        if name in defaults and not read.has(key):
            shape[name] = defaults[name](shape)
        else:
            shape[name] = read.integer(key, 1, LARGEST[name])
    heads = shape["num_attention_heads"]
    kv_key = spelled(read, "num_key_value_heads", spelling)
    shape["num_key_value_heads"] = kv_heads = read.integer(kv_key, 1, heads, heads)
    if heads % kv_heads:
        raise read.fail(kv_key, f"a divisor of num_attention_heads = {heads}")
    hidden = shape["hidden_size"]
    if not read.has("head_dim") and head_dim is None and hidden % heads:
        hidden_key = spelled(read, "hidden_size", spelling)
        raise read.fail(hidden_key, f"a multiple of num_attention_heads = {heads} where head_dim is absent")
    shape["head_dim"] = read.integer("head_dim", 1, MAX_HEAD_DIM, head_dim or hidden // heads)
    return shape


def gated_decoder(
    read: ConfigReader,
    *,
    head_dim: int | None = None,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    original_context: int | None = None,
    tied: bool = False,
) -> Numbers:
    """Read what decoders similar to Llama share: sizes, RMS norms, a gated activation, rotary embedding.

    The keywords are defaults for keys that the file leaves out; read_rope explains those for rotary embedding.
    """
    shape = decoder_shape(read, head_dim=head_dim)
    require_even_heads(read, shape["head_dim"])
    context = shape["max_position_embeddings"]
    return shape | {
        "hidden_act": activation(read),
        "norm_eps": read.number("rms_norm_eps", 0.0, 1.0),
        "rope": read_rope(read, context, theta, partial_rotary=partial_rotary, original_context=original_context),
        "tie_word_embeddings": read.boolean("tie_word_embeddings", tied),
    }


def spelled(read: ConfigReader, name: str, spelling: Mapping[str, str] | None) -> str:
    """Return the key that the file uses for the number `name`."""
    own = (spelling or {}).get(name, name)
    return name if own != name and not read.has(own) and read.has(name) else own


def require_even_heads(read: ConfigReader, head_dim: int) -> None:
    """Raise ModelLoadError if head_dim is odd, because rotary embedding rotates pairs of elements."""
    if head_dim % 2:
        raise read.fail("head_dim", f"even, because rotary embedding rotates pairs; here it is {head_dim}")


def activation(read: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    """Return the mathematical name of the file's activation."""
    return ACTIVATIONS[read.choice(key, ACTIVATIONS, default)]


def fixed(read: ConfigReader, key: str, value: bool) -> bool:
    """Return a switch whose value the architecture fixes. Raise ModelLoadError if the file contradicts it."""
    if read.boolean(key, value) != value:
        raise read.fail(key, f"{str(value).lower()} for this architecture, or absent")
    return value


def no_windows(read: ConfigReader, num_layers: int) -> Windows:
    """Return None for every layer. Raise ModelLoadError if the file asks for a window."""
    _full_attention(read, num_layers)
    fixed(read, "use_sliding_window", False)
    if read.has("sliding_window"):
        raise read.fail("sliding_window", "null for this architecture, or absent")
    return (None,) * num_layers


def same_windows(read: ConfigReader, num_layers: int, default: int | None) -> Windows:
    """Return `sliding_window` for every layer. Null means no window; `default` applies if the key is absent."""
    _full_attention(read, num_layers)
    window = sliding_window(read, default)
    if window is not None and not read.boolean("use_sliding_window", True):
        raise read.fail("use_sliding_window", f"true or absent beside sliding_window = {window}")
    read.boolean("use_sliding_window", False)
    return (window,) * num_layers


def _full_attention(read: ConfigReader, num_layers: int) -> None:
    if read.has("layer_types") and read.raw("layer_types") != ["full_attention"] * num_layers:
        raise read.fail("layer_types", "absent for this architecture")


def sliding_window(read: ConfigReader, default: int | None) -> int | None:
    """Return `sliding_window`. Null means no window; `default` applies if the key is absent."""
    if default is None and not read.has("sliding_window"):
        return None
    return None if read.is_null("sliding_window") else read.integer("sliding_window", 1, MAX_SIZE, default or 0)


def windows_by_type(read: ConfigReader, num_layers: int, window: int | None, default: list[str]) -> Windows:
    """Return the windows of the layers, as `layer_types` says; `default` applies if that key is absent."""
    types = read.raw("layer_types") if read.has("layer_types") else default
    allowed: dict[str, int | None] = {"full_attention": None, "attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not all(item in list(allowed) for item in types):
        raise read.fail("layer_types", f"a list of {num_layers} of full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise read.fail(
            "layer_types", "full_attention only, because use_sliding_window is false or sliding_window null"
        )
    return tuple(allowed[item] for item in types)


def harmless(read: ConfigReader, *keys: str) -> Numbers:
    """Mark keys that do not affect a forward pass for inference as read. Return {}."""
    for key in keys:
        read.raw(key)
    return {}
