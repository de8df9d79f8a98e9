"""RopeConfig: how rotary embedding scales its frequencies, read from either spelling of Transformers.

Knows the numbers only; the tables are made in layers/rotary.py.
"""

from dataclasses import dataclass

from penstock.config_reader import MAX_SIZE, ConfigReader
from penstock.errors import NotSupportedError
from penstock.validation import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/D), scaled as `rope_type` says.

    Attributes:
        rope_type: "default"; "linear" divides all by factor; "llama3" divides the long wavelengths only.
        original_max_position_embeddings: context before scaling ("llama3").
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def read_rope(read: ConfigReader, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta`, as older files spell it."""
    theta = read.number("rope_theta", 1.0, MAX_SIZE, 10000.0)
    if read.has("rope_parameters") and read.has("rope_scaling"):
        raise read.fail("rope_scaling", "absent beside rope_parameters")
    scaling = read.section("rope_parameters") or read.section("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=theta)
    if read.has("rope_theta") and scaling.has("rope_theta") and scaling.raw("rope_theta") != read.raw("rope_theta"):
        raise scaling.fail("rope_theta", f"the same as rope_theta beside it, {read.raw('rope_theta')}")
    rope = _read_scaling(scaling, scaling.number("rope_theta", 1.0, MAX_SIZE, theta), max_position_embeddings)
    scaling.finish(())
    return rope


def _read_scaling(read: ConfigReader, theta: float, max_position_embeddings: int) -> RopeConfig:
    if read.has("type") and read.has("rope_type") and read.raw("type") != read.raw("rope_type"):
        raise read.fail("type", f"the same as rope_type, {shown(read.raw('rope_type'))}")
    key = "rope_type" if read.has("rope_type") else "type"
    if read.raw(key) in ("dynamic", "yarn", "longrope", "mrope", "proportional"):
        raise NotSupportedError(f"{read.where}: {key} = {read.raw(key)} is not supported yet", param="model")
    kind = read.choice(key, ("default", "linear", "llama3"), "default")
    if read.has("partial_rotary_factor") and read.raw("partial_rotary_factor") != 1:
        raise read.fail("partial_rotary_factor", "1, or absent")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = read.number("factor", 1e-6, MAX_SIZE)
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type=kind, factor=factor)
    rope = RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=factor,
        low_freq_factor=read.number("low_freq_factor", 1e-6, MAX_SIZE),
        high_freq_factor=read.number("high_freq_factor", 1e-6, MAX_SIZE),
        original_max_position_embeddings=read.integer(
            "original_max_position_embeddings", 1, MAX_SIZE, max_position_embeddings
        ),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise read.fail("high_freq_factor", f"above low_freq_factor = {rope.low_freq_factor:g}")
    return rope
