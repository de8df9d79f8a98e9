"""Rotary position embedding (Su et al., "RoFormer", 2021): the table of cosines and sines, shared by all layers."""

import math

import torch
from torch import Tensor

from penstock.spec.rope_config import RopeConfig

BLOCK = 4096  # positions at once, so that the float64 values of a long context are never all in memory


class Rotary:
    """Cosines and sines of every position.

    Attributes:
        cos_sin: [positions, D] float32: D/2 cosines, then D/2 sines, where D elements of a head are rotated. Computed
            in float64, position by position.

    An entry depends on its position alone, so that a sequence gives the same bits however long it becomes:
      - "dynamic" scaling uses, at position p, the frequencies of a context of p + 1 tokens. Transformers does the same
        token by token; for a longer prompt it uses the last token's frequencies at all positions.
      - "longrope" has two sets of frequencies. The long one is used throughout if num_positions, the longest sequence,
        exceeds the original context.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        dim = rope.rotary_dim(head_dim)
        is_long = num_positions > rope.original_max_position_embeddings
        table = torch.empty(num_positions, dim + dim % 2, dtype=torch.float32)
        for start in range(0, num_positions, BLOCK):
            stop = min(start + BLOCK, num_positions)
            positions = torch.arange(start, stop, dtype=torch.float64)[:, None]
            angles = positions * inverse_frequencies(rope, dim, positions, is_long=is_long)
            table[start:stop] = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
        self.cos_sin = table.to(device)


def inverse_frequencies(rope: RopeConfig, dim: int, positions: Tensor, *, is_long: bool) -> Tensor:
    """Return theta^(-2i / D) for i < D/2, scaled, at positions [n, 1]: [n, D/2] float64, or [D/2] if all are equal.

    dim: D. is_long: use the long set of "longrope".
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    if rope.rope_type == "dynamic":
        return _dynamic_theta(rope, dim, positions) ** -exponents
    frequencies = rope.theta**-exponents
    if rope.rope_type == "longrope":
        factors = rope.long_factor if is_long else rope.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float64)
    kept = _kept(rope, frequencies, dim)  # 1: as it was; 0: divided by the factor
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _dynamic_theta(rope: RopeConfig, dim: int, positions: Tensor) -> Tensor:
    """Return the base at each position, [n, 1], which divides the slowest frequency by the growth of the context."""
    context = rope.original_max_position_embeddings
    length = (positions + 1).clamp(min=context)
    growth = rope.factor * length / context - (rope.factor - 1)
    return rope.theta * growth ** (dim / max(dim - 2, 1))  # a single frequency is 1, whatever the base


def _kept(rope: RopeConfig, frequencies: Tensor, dim: int) -> Tensor:
    """Return how much of each frequency is kept: all of one that turns often within the original context, nothing of
    one that hardly turns. Llama 3 interpolates in the number of turns, YaRN in the index."""
    if rope.rope_type == "default":
        return torch.ones_like(frequencies)
    if rope.rope_type == "linear":
        return torch.zeros_like(frequencies)
    context = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        turns = context * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return kept.clamp(0.0, 1.0)
    low, high = (  # the indices at which a frequency makes that many turns
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    index = torch.arange(len(frequencies), dtype=torch.float64)
    return 1 - ((index - low) / (high - low or 0.001)).clamp(0.0, 1.0)
