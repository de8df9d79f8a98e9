"""RopeConfig: how rotary embedding scales its frequencies, read from either spelling of Transformers.

Knows the numbers only; the tables are made in layers/rotary.py.
"""

import math
from dataclasses import dataclass, replace

from penstock.errors import ModelLoadError, NotSupportedError
from penstock.spec.config_reader import MAX_SIZE, ConfigReader, same
from penstock.validation import shown

OLDER_NAMES = {"su": "longrope"}
NOT_BUILT = ("axial", "mrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/D), scaled as `rope_type` says.

    Attributes:
        rope_type: "default"; "linear" divides all frequencies by factor; "llama3" and "yarn" divide the slow ones only;
            "dynamic" raises theta with the position; "longrope" divides each frequency by a number of its own.
        partial_rotary_factor: how much of each head is rotated, from its first element on.
        original_max_position_embeddings: context before scaling.
        low_freq_factor, high_freq_factor: "llama3": turns within that context below which a frequency is divided, and
            above which it stays.
        beta_slow, beta_fast: "yarn": the same two bounds; `truncate` widens them to whole dimensions.
        short_factor, long_factor: "longrope": what each frequency is divided by, where that context is long enough for
            everything that may be asked for, and where it is not.
        attention_factor: "yarn", "longrope": what cosines and sines are multiplied by.
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
        """D: how many elements of a head are rotated. Where that is odd, its last frequency turns one more."""
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Refuse what does not fit heads of that size.

        Raises:
            ModelLoadError: nothing is rotated, or more than there is, or there is not one factor for each frequency.
        """
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
                    f"config.json: {name} has {len(factors)} numbers; it must have {frequencies}, one for each pair of "
                    f"the {rotary_dim} elements that are rotated"
                )


def read_rope(
    read: ConfigReader,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
    *,
    partial_rotary: float | None = None,
    original_context: int | None = None,
) -> RopeConfig:
    """From `rope_parameters`, or from `rope_scaling` and `rope_theta`, as older files spell it.

    partial_rotary: how much of a head is rotated where the file is silent; None: the architecture rotates all of it, so
        the file may not say anything else.
    original_context: what `original_max_position_embeddings` is where the file is silent, of an architecture that has
        it beside the section; one inside may only repeat it. None: the section has it, or it is the context.
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
        raise scaling.fail("original_max_position_embeddings", f"{context}, which holds for this architecture")
    return read_scaling(scaling, plain, max_position_embeddings, partial_rotary=partial_rotary is not None)


def read_scaling(
    read: ConfigReader, plain: RopeConfig, max_position_embeddings: int, *, partial_rotary: bool = False
) -> RopeConfig:
    """From one section; what it leaves out is as in `plain`. Keys that its kind of scaling lacks are refused."""
    kind = _read_kind(read)
    rope = replace(
        plain,
        theta=read.number("rope_theta", 1.001, MAX_SIZE, plain.theta),
        rope_type=kind,
        partial_rotary_factor=_read_partial(read, plain.partial_rotary_factor if partial_rotary else None),
    )
    rope = READERS[kind](read, rope, max_position_embeddings)
    read.finish(())
    return rope


def _read_kind(read: ConfigReader) -> str:
    if read.has("type") and read.has("rope_type") and read.raw("type") != read.raw("rope_type"):
        raise read.fail("type", f"the same as rope_type, {shown(read.raw('rope_type'))}")
    key = "rope_type" if read.has("rope_type") else "type"
    if read.raw(key) in NOT_BUILT:
        raise NotSupportedError(
            f"{read.where}: {key} = {read.raw(key)} is not supported; supported are {', '.join(READERS)}", param="model"
        )
    kind = read.choice(key, (*READERS, *OLDER_NAMES), "default")
    return OLDER_NAMES.get(kind, kind)


def _read_partial(read: ConfigReader, default: float | None) -> float:
    if default is not None:
        return read.number("partial_rotary_factor", 1e-6, 1.0, default)
    if read.has("partial_rotary_factor") and not same(read.raw("partial_rotary_factor"), 1):
        raise read.fail("partial_rotary_factor", "1 for this architecture, or absent")
    return 1.0


def _with_context(read: ConfigReader, rope: RopeConfig) -> RopeConfig:
    default = rope.original_max_position_embeddings
    context = read.integer("original_max_position_embeddings", 2, MAX_SIZE, default)
    return replace(rope, original_max_position_embeddings=context)


def _read_default(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    return rope


def _read_linear(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    return replace(rope, factor=read.number("factor", 1e-6, MAX_SIZE))


def _read_dynamic(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    """The context before scaling is max_position_embeddings itself: what comes later is scaled."""
    factor = read.number("factor", 1.0, MAX_SIZE)
    return replace(rope, factor=factor, original_max_position_embeddings=max_position_embeddings)


def _read_llama3(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    rope = _with_context(read, _read_linear(read, rope, max_position_embeddings))
    low, high = (read.number(key, 1e-6, MAX_SIZE) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise read.fail("high_freq_factor", f"above low_freq_factor = {low:g}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _read_longrope(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    """Where attention_factor is absent it follows from how much longer the context has become."""
    rope = _with_context(read, rope)
    context = rope.original_max_position_embeddings
    factor = read.number("factor", 1e-6, MAX_SIZE, max_position_embeddings / context)
    by_factor = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(context))
    return replace(
        rope,
        factor=factor,
        short_factor=read.numbers("short_factor", 1e-6, MAX_SIZE),
        long_factor=read.numbers("long_factor", 1e-6, MAX_SIZE),
        attention_factor=read.number("attention_factor", 0.0, MAX_SIZE, by_factor),
    )


def _read_yarn(read: ConfigReader, rope: RopeConfig, max_position_embeddings: int) -> RopeConfig:
    """Where attention_factor is absent it follows from the factor, in one of two ways (YaRN, and DeepSeek's)."""
    rope = _with_context(read, _read_linear(read, rope, max_position_embeddings))
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


READERS = {
    "default": _read_default,
    "dynamic": _read_dynamic,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "longrope": _read_longrope,
    "yarn": _read_yarn,
}
