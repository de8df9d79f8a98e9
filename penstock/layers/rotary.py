"""Tables by position, which layers share: the cosines and sines of rotary position embedding (Su et al., "RoFormer",
2021), and factors of the queries."""

import hashlib
import math

import numpy as np

from penstock.kernels.ops import Ops
from penstock.kernels.tensors import FLOAT32, FLOAT64, Array, Tensor, empty
from penstock.spec.model_config import QueryScale, RopeConfig

SAMPLED_POSITIONS = np.arange(0, 2**17, 509, dtype=FLOAT64)
BLOCK = 4096  # positions computed at once, so that the float64 values of a long context are never all in memory


class Rotary:
    """Cosines and sines of every position, and factors of the queries.

    Attributes:
        cos_sin: [positions, D] float32: D/2 cosines, then D/2 sines, where D is the number of rotated elements of a
            head. Computed in float64. None: no rotation.
        q_scale: [positions] float32, computed in float64; None: no factors.

    An entry depends on its position alone, so that a sequence gives the same bits however long it becomes:
      - "dynamic" scaling uses, at position p, the frequencies of a context of p + 1 tokens. Transformers does the same
        token by token; for a longer prompt it uses the last token's frequencies at all positions.
      - "longrope" has two sets of frequencies. The long one is used throughout if num_positions, the longest sequence,
        exceeds the original context.
    """

    cos_sin: Tensor | None = None
    q_scale: Tensor | None = None

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, num_positions: int, ops: Ops, scale: QueryScale | None = None
    ) -> None:
        if scale is not None:
            self.q_scale = ops.tensor(query_factors(scale, num_positions))
        if rope is None:
            return
        dim = rope.rotary_dim(head_dim)
        is_long = num_positions > rope.original_max_position_embeddings
        table = empty((num_positions, dim + dim % 2), FLOAT32)
        for start in range(0, num_positions, BLOCK):
            stop = min(start + BLOCK, num_positions)
            table[start:stop] = _rows(rope, dim, np.arange(start, stop, dtype=FLOAT64), is_long=is_long)
        self.cos_sin = ops.tensor(table)


def query_factors(scale: QueryScale, num_positions: int) -> Array:
    """Compute the factor of the queries at each position, [num_positions] float32."""
    positions = np.arange(num_positions, dtype=FLOAT64)
    steps = np.floor((positions + scale.offset) / scale.length)
    return np.asarray(1 + scale.beta * np.log1p(steps), dtype=FLOAT32)


def rotary_fingerprint(rope: RopeConfig, head_dim: int, num_positions: int) -> str:
    """Hash some entries as this machine computes them, at the same positions for every num_positions.

    Cosines, sines and powers come from the C library and from numpy, whose rounding may differ between machines.
    """
    is_long = num_positions > rope.original_max_position_embeddings
    rows = _rows(rope, rope.rotary_dim(head_dim), SAMPLED_POSITIONS, is_long=is_long).astype(FLOAT32)
    return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()


def _rows(rope: RopeConfig, dim: int, positions: Array, *, is_long: bool) -> Array:
    """Compute the cosines and sines at positions [n] float64: [n, D] float64."""
    angles = positions[:, None] * inverse_frequencies(rope, dim, positions[:, None], is_long=is_long)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, dim: int, positions: Array, *, is_long: bool) -> Array:
    """Compute theta^(-2i / D) for i < D/2, scaled, at positions [n, 1]: [n, D/2] float64, or [D/2] if positions do not
    matter.

    dim: D. is_long: use the long set of "longrope".
    """
    exponents = np.arange(0, dim, 2, dtype=FLOAT64) / dim
    if rope.rope_type == "dynamic":
        return np.asarray(_dynamic_theta(rope, dim, positions) ** -exponents)
    frequencies = np.array([math.pow(rope.theta, -exponent) for exponent in exponents.tolist()])
    if rope.rope_type == "proportional":
        frequencies[int(rope.partial_rotary_factor * dim // 2) :] = 0.0
    if rope.rope_type == "longrope":
        factors = rope.long_factor if is_long else rope.short_factor
        return np.asarray(frequencies / np.array(factors, dtype=FLOAT64))
    kept = _kept(rope, frequencies, dim)  # 1: unchanged; 0: divided by the factor
    return np.asarray(kept * frequencies + (1 - kept) * frequencies / rope.factor)


def _dynamic_theta(rope: RopeConfig, dim: int, positions: Array) -> Array:
    """Compute the base at each position, [n, 1]. It divides the slowest frequency by the growth of the context."""
    context = rope.original_max_position_embeddings
    length = np.maximum(positions + 1, context)
    growth = rope.factor * length / context - (rope.factor - 1)
    return np.asarray(rope.theta * growth ** (dim / max(dim - 2, 1)))  # a single frequency is 1 for any base


def _kept(rope: RopeConfig, frequencies: Array, dim: int) -> Array:
    """Compute how much of each frequency is kept: 1 if it makes many turns within the original context, 0 if it makes
    few. In between, Llama 3 interpolates over the number of turns, YaRN over the index."""
    if rope.rope_type == "default":
        return np.ones_like(frequencies)
    if rope.rope_type in ("linear", "proportional"):
        return np.zeros_like(frequencies)
    context = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        turns = context * frequencies / (2 * math.pi)
        between = rope.high_freq_factor - rope.low_freq_factor
        if between == 0:  # Llama 4
            return np.asarray(turns >= rope.low_freq_factor, dtype=FLOAT64)
        return np.clip((turns - rope.low_freq_factor) / between, 0.0, 1.0)
    low, high = (  # the indices at which a frequency makes beta_fast and beta_slow turns
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = np.arange(len(frequencies), dtype=FLOAT64)
    return 1 - np.clip((index - low) / (high - low or 0.001), 0.0, 1.0)
