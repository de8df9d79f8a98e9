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
        self.cos_sin = torch.cat([angles.cos().float(), angles.sin().float()], dim=1).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(-2i / D) for i < D/2, scaled: [D/2] float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: a frequency that turns often within the old context stays, one that hardly turns is divided by the
    factor, and those between are blended in proportion to their turns."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
