"""Read the config.json of Llama and of families that differ from it by numbers only."""

from collections.abc import Collection
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
from penstock.spec.model_config import QueryScale, RopeConfig

APERTUS_THETA = 12000000.0
LLAMA4_BETA = "llama_4_scaling_beta"


def read_llama(read: ConfigReader) -> Numbers:
    """Read the numbers of Llama."""
    numbers = gated_decoder(read) | attention_biases(read)
    harmless(read, "activation")  # Falcon 3 repeats hidden_act, as "swiglu"
    return numbers | {
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
        "mlp_bias": read.boolean("mlp_bias", False),
    }


def read_mistral(
    read: ConfigReader,
    *,
    window: int | None = DEFAULT_WINDOW,
    head_dim: int | None = None,
    own: Collection[str] = (),
) -> Numbers:
    """Read the numbers of Mistral: a window on all layers, or none. The keywords are as in gated_decoder."""
    numbers = gated_decoder(read, head_dim=head_dim, own=own)
    fixed(read, "attention_bias", False)
    fixed(read, "mlp_bias", False)
    return numbers | {"layer_windows": same_windows(read, numbers["num_hidden_layers"], window)}


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


def read_mimo(read: ConfigReader) -> Numbers:
    """Read the numbers of MiMo: Qwen2, with layers that predict further tokens beside the model, which are not read."""
    harmless(read, "num_nextn_predict_layers")
    return read_qwen2(read)


def read_qwen3(read: ConfigReader) -> Numbers:
    """Read the numbers of Qwen3: norms of q and k."""
    numbers = gated_decoder(read, head_dim=128) | attention_biases(read)
    fixed(read, "mlp_bias", False)
    return numbers | {"qk_norm": True, "layer_windows": upper_windows(read, numbers["num_hidden_layers"])}


def read_ernie4_5(read: ConfigReader) -> Numbers:
    """Read the numbers of ERNIE 4.5: interleaved rotary embedding; `use_bias` applies to all products."""
    numbers = gated_decoder(read, head_dim=128, kv_heads=2, theta=500000.0, tied=True)
    bias = read.boolean("use_bias", False)
    return numbers | {
        "rope": replace(numbers["rope"], interleaved=True),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_smollm3(read: ConfigReader) -> Numbers:
    """Read the numbers of SmolLM3: every fourth layer (or those that no_rope_layers marks with 0) does not rotate.

    With use_sliding_window, layer_types says which layers have a window; without it, those that do not rotate.
    """
    numbers = gated_decoder(read, theta=2e6, tied=True) | attention_biases(read)
    layers, window = numbers["num_hidden_layers"], sliding_window(read, None)
    rotates = rotary_pattern(read, layers)
    if not read.boolean("use_sliding_window", False):
        window = None
    harmless(read, "max_window_layers")
    types = ["full_attention" if item or window is None else "sliding_attention" for item in rotates]
    return numbers | {
        "mlp_bias": read.boolean("mlp_bias", False),
        "rotary_layers": rotates,
        "layer_windows": windows_by_type(read, layers, window, types),
    }


def read_seed_oss(read: ConfigReader) -> Numbers:
    """Read the numbers of Seed-OSS: Llama with biases of q, k and v."""
    numbers = gated_decoder(read, head_dim=128)
    harmless(read, "residual_dropout")
    return numbers | {
        "attention_bias": read.boolean("attention_bias", True),
        "attention_out_bias": read.boolean("attention_out_bias", False),
        "mlp_bias": read.boolean("mlp_bias", False),
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_internlm3(read: ConfigReader) -> Numbers:
    """Read the numbers of InternLM3: Llama with two switches for biases. Its class is not part of Transformers."""
    numbers, bias = gated_decoder(read), read.boolean("bias", False)
    return numbers | {
        "attention_bias": read.boolean("qkv_bias", False),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_ministral3(read: ConfigReader) -> Numbers:
    """Read the numbers of Ministral 3 and Devstral 2: a factor of the queries, which grows with every stretch of the
    original context."""
    numbers = read_mistral(read, window=None, head_dim=128, own=(LLAMA4_BETA, "max_position_embeddings"))
    scaling = read.section("rope_parameters")
    if scaling is None:  # a rope_scaling lacks the key; without both, Transformers scales as the first model does
        raise read.fail("rope_parameters", "an object")
    length, beta = numbers["rope"].original_max_position_embeddings, scaling.number(LLAMA4_BETA, 0.0, MAX_SIZE, 0.0)
    return numbers | {"query_scale": QueryScale(beta=beta, length=length) if beta else None}


def read_glm(read: ConfigReader) -> Numbers:
    """Read the numbers of GLM: half of each head rotated, in interleaved pairs; a bias on q, k and v."""
    numbers = gated_decoder(read, head_dim=128, kv_heads=2, partial_rotary=0.5)
    fixed(read, "mlp_bias", False)
    return numbers | {
        "rope": replace(numbers["rope"], interleaved=True),
        "attention_bias": read.boolean("attention_bias", True),
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_glm4(read: ConfigReader) -> Numbers:
    """Read the numbers of GLM-4 0414: those of GLM, and norms behind the branches."""
    return read_glm(read) | {"branch_norms": True}


def read_arcee(read: ConfigReader) -> Numbers:
    """Read the numbers of Arcee: a feed-forward branch without a gate."""
    numbers = gated_decoder(read, act="relu2") | attention_biases(read)
    return numbers | {
        "gated_mlp": False,
        "mlp_bias": read.boolean("mlp_bias", False),
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def read_apertus(read: ConfigReader) -> Numbers:
    """Read the numbers of Apertus: norms of q and k, and a feed-forward branch with xIELU in place of a gate."""
    numbers = gated_decoder(read, act=None, theta=APERTUS_THETA) | attention_biases(read)
    read.neutral({"mlp_bias": False, "post_norm": False, "qk_norm": True})
    if not read.has("rope_parameters") and not read.has("rope_scaling"):
        if read.has("rope_theta"):
            raise read.fail("rope_theta", "absent where the file has no rope_scaling, whose default has a base")
        numbers["rope"] = RopeConfig(
            theta=APERTUS_THETA, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
        )
    return numbers | {
        "hidden_act": read.choice("hidden_act", ["xielu"], "xielu"),
        "qk_norm": True,
        "gated_mlp": False,
        "layer_windows": no_windows(read, numbers["num_hidden_layers"]),
    }


def rotary_pattern(read: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Read which layers rotate: all but those that `no_rope_layers` marks with 0, or every fourth without that list."""
    period = read.integer("no_rope_layer_interval", 1, MAX_SIZE, 4)
    rotates = read.raw("no_rope_layers") or [int((index + 1) % period != 0) for index in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or not all(item in (0, 1) for item in rotates):
        raise read.fail("no_rope_layers", f"a list of {layers} of 0 and 1")
    return tuple(map(bool, rotates))


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
