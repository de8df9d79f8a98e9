"""Shares: which part of each parameter a rank holds, where several processes (ranks) share a model. No torch.

The parameter table says along which axis a parameter is split (`shard`). A weight that is split along K always has 8
leaves and is cut only between them. So a rank computes whole leaves, and the sums over the ranks are the upper levels
of the tree in which one process adds the leaves. That gives every degree the same bits.

    degree 2      rank 0: (l0 + l1) + (l2 + l3)      rank 1: (l4 + l5) + (l6 + l7)      then their sum

Attention, feed-forward, vocabulary and experts may be split into different numbers of parts (degrees). Ranks whose
numbers are equal modulo a degree hold the same part, so each block of `degree` neighbouring ranks holds all parts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, leaf_bounds

# How ranks hold a weight: each the whole of it, or a part of its rows, of its depth (the last axis, cut between leaves)
# or, for a table that is looked up, of its columns.
Form = Literal["whole", "rows", "depth", "columns"]
LEAVES = 8
DEGREES = (1, 2, 4, 8)  # the divisors of the number of leaves
EXPERT = re.compile(r"\.experts\.(\d+)\.")
IN_A_LAYER = re.compile(r"\.\d+\.")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Part:
    """One of `degree` parts."""

    index: int
    degree: int

    def bounds(self, units: int) -> tuple[int, int]:
        """Return this part's first and past-the-last of `units` units that are cut at the ends of leaves."""
        each = LEAVES // self.degree
        leaves = leaf_bounds(units, LEAVES)[self.index * each : (self.index + 1) * each]
        return leaves[0][0], leaves[-1][1]

    def even_bounds(self, units: int) -> tuple[int, int]:
        """Return this part's first and past-the-last of `units` units that are not summed."""
        return self.index * units // self.degree, (self.index + 1) * units // self.degree


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Degrees:
    """The numbers of parts into which ranks split a model. Each is one of DEGREES and divides the number of ranks.

    Attributes:
        size: number of ranks.
        inner: parts of each expert; `experts` times `inner` is at most `size`.
        forms: the form of each weight, by its name with * for numbers, if a sharding map gives it (placement.py); None:
            as the table says.
    """

    size: int = 1
    attention: int = 1
    mlp: int = 1
    vocab: int = 1
    experts: int = 1
    inner: int = 1
    forms: Mapping[str, Form] | None = None

    @property
    def mixture(self) -> int:
        """The number of ranks over which the experts of a layer, and their parts, are distributed."""
        return self.experts * self.inner


@dataclass(frozen=True, slots=True)
class Share:
    """What the rank with a given number holds."""

    rank: int
    degrees: Degrees

    @property
    def attention(self) -> Part:
        return Part(self.rank % self.degrees.attention, self.degrees.attention)

    @property
    def mlp(self) -> Part:
        return Part(self.rank % self.degrees.mlp, self.degrees.mlp)

    @property
    def vocab(self) -> Part:
        return Part(self.rank % self.degrees.vocab, self.degrees.vocab)

    @property
    def experts(self) -> Part:
        return Part(self.rank % self.degrees.mixture // self.degrees.inner, self.degrees.experts)

    @property
    def inner(self) -> Part:
        return Part(self.rank % self.degrees.inner, self.degrees.inner)

    def part_of(self, parameter: Parameter) -> Part:
        """Return which part of a parameter the rank holds if it is split as the table says."""
        if parameter.shard is None:
            return WHOLE
        if parameter.unit is not None:
            return self.attention
        if not IN_A_LAYER.search(parameter.name):
            return self.vocab
        return self.inner if EXPERT.search(parameter.name) else self.mlp

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the config of a model with only the heads that the rank has."""
        first, last = self.attention.bounds(whole.num_key_value_heads)
        group = whole.num_attention_heads // whole.num_key_value_heads
        return replace(whole, num_attention_heads=(last - first) * group, num_key_value_heads=last - first)


def general(name: str) -> str:
    """Return a parameter's name with * for every number."""
    return NUMBER.sub("*", name)


def divisible_heads(model: ModelConfig, *, together: bool = False) -> list[int]:
    """Return the degrees of attention that leave at least one key/value head to every part.

    together: whether queries or keys are normalised over all heads of a token, which no single rank would have.
    """
    if together:
        return [1]
    parts = {degree: [Part(index, degree) for index in range(degree)] for degree in DEGREES}
    bounds = {degree: [part.bounds(model.num_key_value_heads) for part in some] for degree, some in parts.items()}
    return [degree for degree, some in bounds.items() if all(first < last for first, last in some)]


def heads_are_together(parameters: Mapping[str, Parameter], model: ModelConfig) -> bool:
    """Return whether a norm of queries or keys covers all heads."""
    norms = [item for item in parameters.values() if item.name.endswith((".q_norm.weight", ".k_norm.weight"))]
    return any(norm.shape != (model.head_dim,) for norm in norms)
