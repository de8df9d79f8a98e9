"""RopeConfig: rotary embedding and the scaling of its frequencies, read from either spelling of Transformers.

The tables of cosines and sines are made in layers/rotary.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ModelLoadError, NotSupportedError, shown
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, same

SUPPORTED_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
UNSUPPORTED_TYPES = ("axial", "mrope", "proportional")
OLDER_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding with the frequencies theta^(-2i/D), scaled as `rope_type` says.

    Attributes:
        rope_type: "default"; "linear" divides all frequencies by factor; "llama3" and "yarn" divide only the slow ones;
            "dynamic" raises theta with the position; "longrope" divides each frequency by a number of its own.
        partial_rotary_factor: the fraction of each head that is rotated, starting with its first element.
        original_max_position_embeddings: the context before scaling.
        low_freq_factor, high_freq_factor: for "llama3". A frequency is divided if it makes fewer turns than the first
            within the original context, and kept if it makes more turns than the second.
        beta_slow, beta_fast: for "yarn", the same two bounds; `truncate` widens them to whole dimensions.
        short_factor, long_factor: for "longrope", divisors of each frequency: the short ones if the served context is
            within the original context, otherwise the long ones.
        attention_factor: for "yarn" and "longrope", a factor of cosines and sines.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return D, the number of rotated elements of a head. If D is odd, one more element is rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raise ModelLoadError unless 2 .. head_dim elements are rotated, with one factor per frequency."""
        rotary_dim = self.rotary_dim(head_dim)
        frequencies = (rotary_dim + 1) // 2
        if not 2 <= 2 * frequencies <= head_dim:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor = {self.partial_rotary_factor:g} makes {2 * frequencies} elements "
                f"of a head rotate; it must be from 2 to head_dim = {head_dim}"
            )
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if self.rope_type == "longrope" and len(factors) != frequencies:
                raise ModelLoadError(
                    f"config.json: {name} has {len(factors)} numbers; it must have {frequencies}, one per pair of the "
                    f"{rotary_dim} elements that are rotated"
                )


def read_rope(
    read: ConfigReader,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
    *,
    partial_rotary: float | None = None,
    original_context: int | None = None,
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_scaling` and `rope_theta` from older files.

    partial_rotary: the default fraction of a head that is rotated; None: the architecture rotates the whole head, and
        the file must not say otherwise.
    original_context: the default of `original_max_position_embeddings`, for an architecture that has this key outside
        the section; inside, it may only be repeated. None: it is read from the section, and the default is the context.
    """
    theta = read.number("rope_theta", 1.001, MAX_SIZE, default_theta)
    context = read.integer("original_max_position_embeddings", 2, MAX_SIZE, original_context or max_position_embeddings)
    plain = RopeConfig(
        theta=theta,
        partial_rotary_factor=_read_partial(read, partial_rotary),
        original_max_position_embeddings=context,
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
    return read_scaling(scaling, plain, max_position_embeddings, partial_rotary=partial_rotary is not None)


def read_scaling(
    read: ConfigReader, plain: RopeConfig, max_position_embeddings: int, *, partial_rotary: bool = False
) -> RopeConfig:
    """Read one section; `plain` has the defaults. Keys that do not belong to its rope_type are refused."""
    kind = _read_kind(read)
    rope = replace(
        plain,
        theta=read.number("rope_theta", 1.001, MAX_SIZE, plain.theta),
        rope_type=kind,
        partial_rotary_factor=_read_partial(read, plain.partial_rotary_factor if partial_rotary else None),
        **_read_numbers(read, kind, plain.original_max_position_embeddings, max_position_embeddings),
    )
    read.finish(())
    return rope


def _read_kind(read: ConfigReader) -> str:
    if read.has("type") and read.has("rope_type") and read.raw("type") != read.raw("rope_type"):
        raise read.fail("type", f"the same as rope_type, {shown(read.raw('rope_type'))}")
    key = "rope_type" if read.has("rope_type") else "type"
    if read.raw(key) in UNSUPPORTED_TYPES:
        supported = ", ".join(SUPPORTED_TYPES)
        raise NotSupportedError(
            f"{read.where}: {key} = {read.raw(key)} is not supported; supported are {supported}", param="model"
        )
    kind = read.choice(key, (*SUPPORTED_TYPES, *OLDER_NAMES), "default")
    return OLDER_NAMES.get(kind, kind)


def _read_partial(read: ConfigReader, default: float | None) -> float:
    if default is not None:
        return read.number("partial_rotary_factor", 1e-6, 1.0, default)
    if read.has("partial_rotary_factor") and not same(read.raw("partial_rotary_factor"), 1):
        raise read.fail("partial_rotary_factor", "1 for this architecture, or absent")
    return 1.0


def _read_numbers(read: ConfigReader, kind: str, context: int, max_position_embeddings: int) -> dict[str, Any]:
    """Return the RopeConfig fields specific to a rope_type. context: the default of the context before scaling."""
    if kind == "default":
        return {}
    if kind == "dynamic":  # max_position_embeddings is the context before scaling; frequencies change beyond it
        factor = read.number("factor", 1.0, MAX_SIZE)
        return {"factor": factor, "original_max_position_embeddings": max_position_embeddings}
    if kind == "linear":
        return {"factor": read.number("factor", 1e-6, MAX_SIZE)}
    context = read.integer("original_max_position_embeddings", 2, MAX_SIZE, context)
    if kind == "longrope":
        numbers = _read_longrope(read, context, max_position_embeddings)
    else:
        numbers = {"factor": read.number("factor", 1e-6, MAX_SIZE)}
        numbers |= _read_llama3(read) if kind == "llama3" else _read_yarn(read, numbers["factor"])
    return numbers | {"original_max_position_embeddings": context}


def _read_llama3(read: ConfigReader) -> dict[str, Any]:
    low, high = (read.number(key, 1e-6, MAX_SIZE) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise read.fail("high_freq_factor", f"above low_freq_factor = {low:g}")
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
