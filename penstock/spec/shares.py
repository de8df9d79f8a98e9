"""Shares: which part of each parameter a rank holds, where several processes (ranks) share a model. No torch.

The parameter table says along which axis a parameter is split (`shard`). A weight that is split along K is cut between
its leaves only, of which there are always 8: so a rank computes whole leaves, and the sums over the ranks are the upper
levels of the tree in which one process adds them. That gives every degree the same bits.

    degree 2      rank 0: (l0 + l1) + (l2 + l3)      rank 1: (l4 + l5) + (l6 + l7)      then their sum

Attention, feed-forward, vocabulary and experts may be split into different numbers of parts. Ranks whose number is the
same modulo a degree hold the same part, so each block of `degree` neighbouring ranks holds all of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter, leaf_bounds

LEAVES = 8
DEGREES = (1, 2, 4, 8)  # the divisors of the number of leaves
EXPERT = re.compile(r"\.experts\.(\d+)\.")
IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class Part:
    """One of `degree` parts."""

    index: int
    degree: int

    def bounds(self, units: int) -> tuple[int, int]:
        """Return the first and past-the-last of some units that are cut where the leaves are."""
        each = LEAVES // self.degree
        leaves = leaf_bounds(units, LEAVES)[self.index * each : (self.index + 1) * each]
        return leaves[0][0], leaves[-1][1]

    def even_bounds(self, units: int) -> tuple[int, int]:
        """Return the first and past-the-last of some units, of which no sum is made."""
        return self.index * units // self.degree, (self.index + 1) * units // self.degree


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Degrees:
    """Into how many parts the ranks of a model split it, each one of DEGREES and a divisor of their number.

    Attributes:
        size: number of ranks.
        inner: parts of each expert; `experts` times `inner` is at most `size`.
    """

    size: int = 1
    attention: int = 1
    mlp: int = 1
    vocab: int = 1
    experts: int = 1
    inner: int = 1

    @property
    def mixture(self) -> int:
        """The ranks among which the experts of a layer and their parts are distributed."""
        return self.experts * self.inner


@dataclass(frozen=True, slots=True)
class Share:
    """What the rank of a number holds."""

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
        """Return which part of a parameter the rank holds, as far as the table splits it."""
        if parameter.shard is None:
            return WHOLE
        if parameter.unit is not None:
            return self.attention
        if not IN_A_LAYER.search(parameter.name):
            return self.vocab
        return self.inner if EXPERT.search(parameter.name) else self.mlp

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the numbers of a model with the heads that the rank has."""
        first, last = self.attention.bounds(whole.num_key_value_heads)
        group = whole.num_attention_heads // whole.num_key_value_heads
        return replace(whole, num_attention_heads=(last - first) * group, num_key_value_heads=last - first)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter.

    Attributes:
        own: the part, as a parameter of the rank's model: its name counts the rank's experts only.
        ranges: [first, past-the-last) along the axis that is split, joined in this order; () is everything.
    """

    own: Parameter
    whole: Parameter
    part: Part
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def axis(self) -> int:
        return self.whole.shard or 0

    @property
    def is_summed(self) -> bool:
        """Whether a product with it gives a part of a sum over ranks."""
        return bool(self.ranges) and self.axis == len(self.own.shape) - 1 == 1

    def borders(self) -> list[int]:
        """Return where the parts of all ranks begin on an axis that has one piece, and where the last one ends."""
        size = self.whole.shape[self.axis]
        return [Part(index, self.part.degree).bounds(size)[0] for index in range(self.part.degree)] + [size]


def divisible_heads(model: ModelConfig, *, together: bool = False) -> list[int]:
    """Return the degrees of attention that leave a key/value head, or more, to every part.

    together: whether queries or keys are normed over all heads of a token, which no rank has alone.
    """
    if together:
        return [1]
    parts = {degree: [Part(index, degree) for index in range(degree)] for degree in DEGREES}
    bounds = {degree: [part.bounds(model.num_key_value_heads) for part in some] for degree, some in parts.items()}
    return [degree for degree, some in bounds.items() if all(first < last for first, last in some)]


def heads_are_together(parameters: Mapping[str, Parameter], model: ModelConfig) -> bool:
    """Return whether a norm of queries or keys is over all heads."""
    norms = [item for item in parameters.values() if item.name.endswith((".q_norm.weight", ".k_norm.weight"))]
    return any(norm.shape != (model.head_dim,) for norm in norms)


def cut_all(parameters: Mapping[str, Parameter], share: Share, config: ModelConfig) -> dict[str, Cut]:
    """Return the rank's part of each parameter that it has any of, by the name in the rank's model."""
    first, last = share.experts.even_bounds(config.num_experts)
    cuts: dict[str, Cut] = {}
    for whole in parameters.values():
        found = EXPERT.search(whole.name)
        if found is not None and not first <= int(found[1]) < last:
            continue
        cut = _cut(whole, share.part_of(whole))
        if found is not None:
            name = EXPERT.sub(f".experts.{int(found[1]) - first}.", whole.name)
            cut = replace(cut, own=replace(cut.own, name=name))
        cuts[cut.own.name] = cut
    return cuts


def _cut(whole: Parameter, part: Part) -> Cut:
    if part.degree == 1 or whole.shard is None:
        return Cut(whole, whole, WHOLE)
    axis = whole.shard
    pieces = whole.layouts[-1].pieces if whole.layouts[-1].join_axis == axis else ()
    sizes = pieces or (whole.shape[axis],)
    units = _units(whole, sizes)
    first, last = part.bounds(units)
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start + first * (size // units), start + last * (size // units)))
        start += size
    length = sum(end - begin for begin, end in ranges)
    shape = (*whole.shape[:axis], length, *whole.shape[axis + 1 :])
    own = replace(whole, shape=shape, ends=_leaf_ends(whole, part) if axis else None)
    return Cut(own, whole, part, tuple(ranges))


def _units(whole: Parameter, sizes: tuple[int, ...]) -> int:
    """Return how many units the split axis has: kv groups of attention, else single elements of the smallest piece."""
    return whole.num_units if whole.unit is not None else min(sizes)


def _leaf_ends(whole: Parameter, part: Part) -> tuple[int, ...]:
    each = LEAVES // part.degree
    bounds = leaf_bounds(whole.shape[-1], LEAVES, whole.unit_size)[part.index * each : (part.index + 1) * each]
    return tuple(end - bounds[0][0] for _, end in bounds)
