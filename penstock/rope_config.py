"""RopeConfig: how rotary embedding scales its frequencies, read from either spelling of Transformers.

Knows the numbers only; the tables are made in layers/rotary.py.
"""

import math
from dataclasses import dataclass, replace

from penstock.config_reader import MAX_SIZE, ConfigReader, same
from penstock.errors import NotSupportedError
from penstock.validation import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/D), scaled as `rope_type` says.

    Attributes:
        rope_type: "default"; "linear" divides all frequencies by factor; "llama3" and "yarn" divide the slow ones only.
        original_max_position_embeddings: context before scaling.
        low_freq_factor, high_freq_factor: "llama3": turns within that context below which a frequency is divided, and
            above which it stays.
        beta_slow, beta_fast: "yarn": the same two bounds; `truncate` widens them to whole dimensions.
        attention_factor: "yarn": what cosines and sines are multiplied by.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(read: ConfigReader, max_position_embeddings: int, default_theta: float = 10000.0) -> RopeConfig:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta`, as older files spell it."""
    theta = read.number("rope_theta", 1.001, MAX_SIZE, default_theta)
    if read.has("rope_parameters") and read.has("rope_scaling"):
        raise read.fail("rope_scaling", "absent beside rope_parameters")
    scaling = read.section("rope_parameters") or read.section("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=theta)
    if read.has("rope_theta") and scaling.has("rope_theta") and scaling.raw("rope_theta") != read.raw("rope_theta"):
        raise scaling.fail("rope_theta", f"the same as rope_theta beside it, {read.raw('rope_theta')}")
    rope = _read_scaling(scaling, scaling.number("rope_theta", 1.001, MAX_SIZE, theta), max_position_embeddings)
    scaling.finish(())
    return rope


def _read_scaling(read: ConfigReader, theta: float, max_position_embeddings: int) -> RopeConfig:
    if read.has("type") and read.has("rope_type") and read.raw("type") != read.raw("rope_type"):
        raise read.fail("type", f"the same as rope_type, {shown(read.raw('rope_type'))}")
    key = "rope_type" if read.has("rope_type") else "type"
    if read.raw(key) in ("dynamic", "longrope", "mrope", "proportional"):
        raise NotSupportedError(f"{read.where}: {key} = {read.raw(key)} is not supported yet", param="model")
    kind = read.choice(key, ("default", "linear", "llama3", "yarn"), "default")
    if read.has("partial_rotary_factor") and not same(read.raw("partial_rotary_factor"), 1):
        raise read.fail("partial_rotary_factor", "1, or absent")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = read.number("factor", 1e-6, MAX_SIZE)
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type=kind, factor=factor)
    context = read.integer("original_max_position_embeddings", 1, MAX_SIZE, max_position_embeddings)
    make = _read_llama3 if kind == "llama3" else _read_yarn
    return make(read, RopeConfig(theta=theta, rope_type=kind, factor=factor, original_max_position_embeddings=context))


def _read_llama3(read: ConfigReader, rope: RopeConfig) -> RopeConfig:
    low, high = (read.number(key, 1e-6, MAX_SIZE) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise read.fail("high_freq_factor", f"above low_freq_factor = {low:g}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(read: ConfigReader, rope: RopeConfig) -> RopeConfig:
    """Where attention_factor is absent it follows from the factor, in one of two ways (YaRN, and DeepSeek's)."""
    slow, fast = read.number("beta_slow", 1e-6, MAX_SIZE, 1.0), read.number("beta_fast", 1e-6, MAX_SIZE, 32.0)
    if fast <= slow:
        raise read.fail("beta_fast", f"above beta_slow = {slow:g}")
    scales = [read.number(key, 0.0, MAX_SIZE, 0.0) for key in ("mscale", "mscale_all_dim")]
    growth = 0.1 * math.log(max(rope.factor, 1.0))
    by_factor = (growth * scales[0] + 1) / (growth * scales[1] + 1) if all(scales) else growth + 1
    return replace(
        rope,
        beta_slow=slow,
        beta_fast=fast,
        truncate=read.boolean("truncate", True),
        attention_factor=read.number("attention_factor", 0.0, MAX_SIZE, by_factor),
    )
