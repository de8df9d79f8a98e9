"""Rotary position embedding (Su et al., "RoFormer", 2021): the table of cosines and sines, shared by all layers."""

import math

import torch
from torch import Tensor

from penstock.rope_config import RopeConfig


class Rotary:
    """Cosines and sines of every position.

    Attributes:
        cos_sin: [positions, D] float32: D/2 cosines, then D/2 sines. Computed in float64, position by position, so an
            entry depends on nothing but its position.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float64)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        tables = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
        self.cos_sin = tables.float().to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / D) for i < D/2, scaled: [D/2] float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.rope_type == "default":
        return frequencies
    kept = _kept(rope, frequencies, head_dim)  # 1: as it was; 0: divided by the factor
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _kept(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """How much of each frequency stays: one that turns often within the old context does, one that hardly turns is
    divided. Llama 3 blends in proportion to the turns, YaRN in proportion to the index."""
    if rope.rope_type == "linear":
        return torch.zeros_like(frequencies)
    context = rope.original_max_position_embeddings
    if rope.rope_type == "llama3":
        turns = context * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return kept.clamp(0.0, 1.0)
    low, high = (  # the indices at which a frequency makes that many turns
        head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(len(frequencies), dtype=torch.float64)
    return 1 - ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
