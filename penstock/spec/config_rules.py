"""Rules for reading a config.json that families share: shapes, activations, windows, rotary embedding. No torch.

A family's config.py (models/<family>/) calls the rules that apply to it, with its own spellings and defaults.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import NotSupportedError, shown
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, same
from penstock.spec.model_config import RopeConfig

ACTIVATIONS = {  # Hugging Face's name -> the mathematical one in kernels/ops.py
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
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
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
UNSUPPORTED_ROPE_TYPES = ("axial", "mrope")
OLDER_ROPE_TYPES = {"su": "longrope"}
DEFAULT_WINDOW = 4096  # Transformers' default for sliding_window

Numbers = dict[str, Any]  # fields of ModelConfig
Windows = tuple[int | None, ...]


def decoder_shape(
    read: ConfigReader,
    *,
    spelling: Mapping[str, str] | None = None,
    defaults: Mapping[str, Callable[[Numbers], int]] | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
) -> Numbers:
    """Read the sizes of a decoder: those of LARGEST, num_key_value_heads and head_dim.

    spelling: the file's key for a size, if it is not Transformers' common name; the common name is accepted too.
    defaults: for each size that the file may leave out, a function of the sizes without a default.
    head_dim, kv_heads: the defaults; None means hidden_size / num_attention_heads, and num_attention_heads.
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
    shape["num_key_value_heads"] = kv_heads = read.integer(kv_key, 1, heads, kv_heads or heads)
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
    kv_heads: int | None = None,
    act: str | None = "silu",
    theta: float = 10000.0,
    local_theta: float | None = None,
    tied: bool = False,
    **rotary: Any,
) -> Numbers:
    """Read what decoders similar to Llama share: sizes, RMS norms, an activation, rotary embedding.

    act: the default of hidden_act; None leaves this key to the caller. The other keywords are defaults for keys that
    the file leaves out. rotary: passed on to read_rope. local_theta: the base of the layers with a window, for an
    architecture whose section is by layer type.
    """
    shape = decoder_shape(read, head_dim=head_dim, kv_heads=kv_heads)
    require_even_heads(read, shape["head_dim"])
    context = shape["max_position_embeddings"]
    if local_theta is not None:
        ropes = ropes_by_type(read, context, theta, local_theta)
    else:
        ropes = {"rope": read_rope(read, context, theta, **rotary)}
    act_field = {} if act is None else {"hidden_act": activation(read, default=act)}
    return (
        shape
        | act_field
        | {
            "norm_eps": read.number("rms_norm_eps", 0.0, 1.0),
            **ropes,
            "tie_word_embeddings": read.boolean("tie_word_embeddings", tied),
        }
    )


def spelled(read: ConfigReader, name: str, spelling: Mapping[str, str] | None) -> str:
    """Find the key that the file uses for the number `name`."""
    own = (spelling or {}).get(name, name)
    return name if own != name and not read.has(own) and read.has(name) else own


def require_even_heads(read: ConfigReader, head_dim: int) -> None:
    """Raise ModelLoadError if head_dim is odd, because rotary embedding rotates pairs of elements."""
    if head_dim % 2:
        raise read.fail("head_dim", f"even, because rotary embedding rotates pairs; here it is {head_dim}")


def activation(read: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    """Read the mathematical name of the file's activation."""
    return ACTIVATIONS[read.choice(key, ACTIVATIONS, default)]


def fixed(read: ConfigReader, key: str, value: bool) -> bool:
    """Read a switch whose value the architecture fixes. Raise ModelLoadError if the file contradicts it."""
    if read.boolean(key, value) != value:
        raise read.fail(key, f"{str(value).lower()} for this architecture, or absent")
    return value


def no_windows(read: ConfigReader, num_layers: int) -> Windows:
    """Give no layer a window. Raise ModelLoadError if the file asks for one."""
    _full_attention(read, num_layers)
    fixed(read, "use_sliding_window", False)
    if read.has("sliding_window"):
        raise read.fail("sliding_window", "null for this architecture, or absent")
    return (None,) * num_layers


def same_windows(read: ConfigReader, num_layers: int, default: int | None) -> Windows:
    """Give every layer the `sliding_window`. Null means no window; `default` applies if the key is absent."""
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
    """Read `sliding_window`. Null means no window; `default` applies if the key is absent."""
    if default is None and not read.has("sliding_window"):
        return None
    return None if read.is_null("sliding_window") else read.integer("sliding_window", 1, MAX_SIZE, default or 0)


def windows_by_type(
    read: ConfigReader, num_layers: int, window: int | None, default: list[str], *, kind: str = "sliding_attention"
) -> Windows:
    """Read the windows of the layers, as `layer_types` says; `default` applies if that key is absent. kind: the type of
    the layers that have the window."""
    types = read.raw("layer_types") if read.has("layer_types") else default
    allowed: dict[str, int | None] = {"full_attention": None, "attention": None, kind: window}
    if not isinstance(types, list) or len(types) != num_layers or not all(item in list(allowed) for item in types):
        raise read.fail("layer_types", f"a list of {num_layers} of full_attention, {kind}")
    if window is None and kind in types:
        raise read.fail("layer_types", "full_attention only, because no layer has a window")
    return tuple(allowed[item] for item in types)


def window_pattern(num_layers: int, period: int) -> list[str]:
    """List layer types: the last of every `period` layers has no window."""
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]


def harmless(read: ConfigReader, *keys: str) -> Numbers:
    """Mark keys that do not affect a forward pass for inference as read. Return {}."""
    for key in keys:
        read.raw(key)
    return {}


MAX_LABELS = 2**16
LABEL_ACTIVATIONS = {"regression": "identity", "single_label_classification": "softmax"}
LABEL_ACTIVATIONS |= {"multi_label_classification": "sigmoid"}
CROSS_ENCODERS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # torch's classes


def read_labels(read: ConfigReader) -> Numbers:
    """Read the classes of a classifier, and what makes scores of its logits.

    A cross-encoder of sentence-transformers names a class of torch; otherwise `problem_type` decides. Without both, one
    label gets a sigmoid, and several a softmax.
    """
    named = read.raw("id2label")
    count = len(named) if isinstance(named, dict) and named else read.integer("num_labels", 1, MAX_LABELS, 2)
    names = named if isinstance(named, dict) and named else {str(index): f"LABEL_{index}" for index in range(count)}
    if count > MAX_LABELS or {*names} != {*map(str, range(count))} or not all(type(x) is str for x in names.values()):
        raise read.fail("id2label", "an object that maps 0, 1, 2 ... to the names of the classes")
    own = read.section("sentence_transformers")
    function = own.raw("activation_fn") if own is not None else read.raw("sbert_ce_default_activation_function")
    if function is not None:
        name = str(function).rpartition(".")[2]
        if name not in CROSS_ENCODERS:
            raise read.fail("sbert_ce_default_activation_function", f"torch's {', '.join(CROSS_ENCODERS)}, or absent")
        activation = CROSS_ENCODERS[name]
    else:
        usual = "sigmoid" if count == 1 else "softmax"
        kind = read.choice("problem_type", LABEL_ACTIVATIONS, "") if read.has("problem_type") else ""
        activation = LABEL_ACTIVATIONS.get(kind, usual)
        activation = usual if activation == "softmax" else activation
    labels = tuple(names[str(index)] for index in range(count))
    return {"labels": labels, "label_activation": activation}


def read_rope(
    read: ConfigReader,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
    *,
    partial_rotary: float | None = None,
    original_context: int | None = None,
    own: Collection[str] = (),
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_scaling` and `rope_theta` from older files.

    partial_rotary: the default fraction of a head that is rotated; None: the architecture rotates the whole head, and
        the file must not say otherwise.
    original_context: the default of `original_max_position_embeddings`, for an architecture that has this key outside
        the section; inside, it may only be repeated. None: it is read from the section, and the default is the context.
    own: keys of the section that the family reads itself.
    """
    theta = read.number("rope_theta", 1.001, MAX_SIZE, default_theta)
    context = read.integer("original_max_position_embeddings", 2, MAX_SIZE, original_context or max_position_embeddings)
    plain = RopeConfig(
        theta=theta, partial_rotary_factor=_read_partial(read, partial_rotary), original_max_position_embeddings=context
    )
    if read.has("rope_parameters") and read.has("rope_scaling"):
        raise read.fail("rope_scaling", "absent beside rope_parameters")
    scaling = read.section("rope_parameters") or read.section("rope_scaling")
    if scaling is None:
        return plain
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if read.has(key) and scaling.has(key) and scaling.raw(key) != read.raw(key):
            raise scaling.fail(key, f"the same as {key} beside it, {shown(read.raw(key))}")
    inside = scaling.raw("original_max_position_embeddings")
    if original_context is not None and inside not in (None, context):
        raise scaling.fail("original_max_position_embeddings", f"{context}, as this architecture has it")
    return read_scaling(scaling, plain, max_position_embeddings, partial_rotary=partial_rotary is not None, own=own)


def read_scaling(
    read: ConfigReader,
    plain: RopeConfig,
    max_position_embeddings: int,
    *,
    partial_rotary: bool = False,
    own: Collection[str] = (),
) -> RopeConfig:
    """Read one section; `plain` has the defaults. Keys that do not belong to its rope_type are refused, unless the
    family reads them itself (`own`)."""
    kind = _read_kind(read)
    partial_rotary = partial_rotary or kind == "proportional"
    rope = replace(
        plain,
        theta=read.number("rope_theta", 1.001, MAX_SIZE, plain.theta),
        rope_type=kind,
        partial_rotary_factor=_read_partial(read, plain.partial_rotary_factor if partial_rotary else None),
        **_read_numbers(read, kind, plain.original_max_position_embeddings, max_position_embeddings),
    )
    read.finish(own)
    return rope


def ropes_by_type(read: ConfigReader, max_position_embeddings: int, theta: float, local_theta: float) -> Numbers:
    """Read the rotary embeddings of the layers without and with a window. In older files, only the former is scaled."""
    ropes = {"rope": ("full_attention", theta), "local_rope": ("sliding_attention", local_theta)}
    plain = {
        name: RopeConfig(theta=base, original_max_position_embeddings=max_position_embeddings)
        for name, (_, base) in ropes.items()
    }
    by_type = read.section("rope_parameters")
    if by_type is None:
        local_theta = read.number("rope_local_base_freq", 1.001, MAX_SIZE, local_theta)
        rope = read_rope(read, max_position_embeddings, theta)
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


def _read_kind(read: ConfigReader) -> str:
    if read.has("type") and read.has("rope_type") and read.raw("type") != read.raw("rope_type"):
        raise read.fail("type", f"the same as rope_type, {shown(read.raw('rope_type'))}")
    key = "rope_type" if read.has("rope_type") else "type"
    if read.raw(key) in UNSUPPORTED_ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise NotSupportedError(
            f"{read.where}: {key} = {read.raw(key)} is not supported; supported are {supported}", param="model"
        )
    kind = read.choice(key, (*ROPE_TYPES, *OLDER_ROPE_TYPES), "default")
    return OLDER_ROPE_TYPES.get(kind, kind)


def _read_partial(read: ConfigReader, default: float | None) -> float:
    if default is not None:
        return read.number("partial_rotary_factor", 1e-6, 1.0, default)
    if read.has("partial_rotary_factor") and not same(read.raw("partial_rotary_factor"), 1):
        raise read.fail("partial_rotary_factor", "1 for this architecture, or absent")
    return 1.0


def _read_numbers(read: ConfigReader, kind: str, context: int, max_position_embeddings: int) -> dict[str, Any]:
    """Read the RopeConfig fields specific to a rope_type. context: the default of the context before scaling."""
    if kind == "default":
        return {}
    if kind == "dynamic":  # max_position_embeddings is the context before scaling; frequencies change beyond it
        factor = read.number("factor", 1.0, MAX_SIZE)
        return {"factor": factor, "original_max_position_embeddings": max_position_embeddings}
    if kind == "linear":
        return {"factor": read.number("factor", 1e-6, MAX_SIZE)}
    if kind == "proportional":
        return {"factor": read.number("factor", 1e-6, MAX_SIZE, 1.0)}
    context = read.integer("original_max_position_embeddings", 2, MAX_SIZE, context)
    if kind == "longrope":
        numbers = _read_longrope(read, context, max_position_embeddings)
    else:
        numbers = {"factor": read.number("factor", 1e-6, MAX_SIZE)}
        numbers |= _read_llama3(read) if kind == "llama3" else _read_yarn(read, numbers["factor"])
    return numbers | {"original_max_position_embeddings": context}


def _read_llama3(read: ConfigReader) -> dict[str, Any]:
    low, high = (read.number(key, 1e-6, MAX_SIZE) for key in ("low_freq_factor", "high_freq_factor"))
    if high < low:
        raise read.fail("high_freq_factor", f"at least low_freq_factor = {low:g}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _read_longrope(read: ConfigReader, context: int, max_position_embeddings: int) -> dict[str, Any]:
    """Read the fields of "longrope". By default attention_factor depends on the growth of the context."""
    factor = read.number("factor", 1e-6, MAX_SIZE, max_position_embeddings / context)
    by_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(context))
    return {
        "factor": factor,
        "short_factor": read.numbers("short_factor", 1e-6, MAX_SIZE),
        "long_factor": read.numbers("long_factor", 1e-6, MAX_SIZE),
        "attention_factor": read.number("attention_factor", 0.0, MAX_SIZE, by_factor),
    }


def _read_yarn(read: ConfigReader, factor: float) -> dict[str, Any]:
    """Read the fields of "yarn". By default attention_factor depends on the factor, by YaRN's or DeepSeek's formula."""
    slow, fast = read.number("beta_slow", 1e-6, MAX_SIZE, 1.0), read.number("beta_fast", 1e-6, MAX_SIZE, 32.0)
    if fast <= slow:
        raise read.fail("beta_fast", f"above beta_slow = {slow:g}")
    scales = [read.number(key, 0.0, MAX_SIZE, 0.0) for key in ("mscale", "mscale_all_dim")]
    growth = 0.1 * math.log(max(factor, 1.0))
    by_factor = (growth * scales[0] + 1) / (growth * scales[1] + 1) if all(scales) else growth + 1
    return {
        "beta_slow": slow,
        "beta_fast": fast,
        "truncate": read.boolean("truncate", True),
        "attention_factor": read.number("attention_factor", 0.0, MAX_SIZE, by_factor),
    }
