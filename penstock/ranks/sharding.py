"""The part of each parameter that a rank holds, and what the ranks must exchange because of it. No torch.

A Share says which part of attention, feed-forward, vocabulary and experts a rank has; cut_all gives its Cut of every
parameter. The parameter table says along which axis a parameter is split (`shard`). A weight that is split along K
always has 8 leaves and is cut only between them. So a rank computes whole leaves, and the sums over the ranks are the
upper levels of the tree in which one process adds the leaves. That gives every degree the same bits.

    degree 2      rank 0: (l0 + l1) + (l2 + l3)      rank 1: (l4 + l5) + (l6 + l7)      then their sum

Attention, feed-forward, vocabulary and experts may be split into different numbers of parts (degrees). Ranks whose
numbers are equal modulo a degree hold the same part, so each block of `degree` neighbouring ranks holds all parts.
Attention may have 16 parts, if a model has 8 key/value heads: two ranks hold each, and half of its query heads each.

A branch of a block consists of a product that begins it (the table splits its rows), an operation in between that each
rank can do for a part of the features (heads or neurons), and a product that ends it (the table splits its depth).
Whether the features in between are split is decided separately (Degrees.attention, Degrees.mlp), so each weight may
have any form:

                    features in between split             features in between whole
    begins: rows    -                                     gather its results
            whole   select our part of its results        -
    ends:   depth   sum the parts                         select our part of its input; sum the parts
            rows    gather its input; gather its results  gather its results
            whole   gather its input                      -

Gathered parts are joined in the order of the features, and sums are trees of whole leaves, so no form changes a bit. A
weight whose depth one process sums in one piece has no leaves, and cannot be cut along its depth.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal

from penstock.config import DEGREES, HALF_GROUPS, ParallelConfig
from penstock.errors import fail
from penstock.spec.model_config import LayerHeads, ModelConfig
from penstock.spec.param_table import Parameter, leaf_bounds

# How ranks hold a weight: each the whole of it, or a part of its rows, of its depth (the last axis, cut between leaves)
# or, for a table that is looked up, of its columns.
Form = Literal["whole", "rows", "depth", "columns"]
LEAVES = 8
EXPERT = re.compile(r"\.experts\.(\d+)\.")
IN_A_LAYER = re.compile(r"\.\d+\.")
assert all(LEAVES % degree == 0 for degree in DEGREES), "every degree must leave whole leaves to each rank"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Part:
    """One of `degree` parts."""

    index: int
    degree: int

    def bounds(self, units: int) -> tuple[int, int]:
        """Find this part's first and past-the-last of `units` units that are cut at the ends of leaves."""
        assert 0 <= self.index < self.degree, f"{self} is no part"
        each = LEAVES // self.degree
        leaves = leaf_bounds(units, LEAVES)[self.index * each : (self.index + 1) * each]
        return leaves[0][0], leaves[-1][1]

    def even_bounds(self, units: int) -> tuple[int, int]:
        """Find this part's first and past-the-last of `units` units that are not summed."""
        return self.index * units // self.degree, (self.index + 1) * units // self.degree


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Degrees:
    """The numbers of parts into which ranks split a model. Each is one of DEGREES and divides the number of ranks.

    Attributes:
        size: number of ranks.
        inner: parts of each expert; `experts` times `inner` is at most `size`.
        forms: the form of each weight, by its name with * for numbers, if a sharding map says it (sharding_map.py);
            None: as the table says.
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

    @property
    def name(self) -> str:
        """A name for the split; equal splits have equal names. Empty for one process."""
        if self.size == 1:
            return ""
        sizes = {item.name: getattr(self, item.name) for item in fields(self)}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


@dataclass(frozen=True, slots=True)
class Share:
    """The parts that the rank with a given number holds."""

    rank: int
    degrees: Degrees

    @property
    def attention(self) -> Part:
        """The part of the key/value heads."""
        if self.degrees.attention == HALF_GROUPS:
            return Part(self.rank % HALF_GROUPS // 2, HALF_GROUPS // 2)
        return Part(self.rank % self.degrees.attention, self.degrees.attention)

    def queries(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Find the rank's first and past-the-last query head."""
        first, last = (bound * (heads // kv_heads) for bound in self.attention.bounds(kv_heads))
        if self.degrees.attention != HALF_GROUPS:
            return first, last
        half = (last - first) // 2
        return first + self.rank % 2 * half, first + (self.rank % 2 + 1) * half

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
        """Choose the part of a parameter that the rank holds if it is split as the table says."""
        if parameter.shard is None:
            return WHOLE
        if parameter.unit is not None:
            return self.attention
        if not IN_A_LAYER.search(parameter.name):
            return self.vocab
        return self.inner if EXPERT.search(parameter.name) else self.mlp

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Reduce the config of a model to the heads that the rank has."""

        def own(heads: LayerHeads) -> LayerHeads:
            first, last = self.attention.bounds(heads.num_key_value_heads)
            begin, end = self.queries(heads.num_attention_heads, heads.num_key_value_heads)
            return LayerHeads(end - begin, last - first, heads.head_dim)

        common = LayerHeads(whole.num_attention_heads, whole.num_key_value_heads, whole.head_dim)
        return replace(whole, layer_heads=tuple(map(own, whole.layer_heads)), **own(common)._asdict())


def general(name: str) -> str:
    """Replace every number in a parameter's name by *."""
    return NUMBER.sub("*", name)


def divisible_heads(model: ModelConfig, *, together: bool = False) -> list[int]:
    """List the degrees of attention that leave at least one key/value head to every part.

    together: whether queries or keys are normalised over all heads of a token, which no single rank would have.
    """
    if together:
        return [1]
    parts = {degree: [Part(index, degree) for index in range(degree)] for degree in DEGREES}
    counts = {model.num_key_value_heads, *(heads.num_key_value_heads for heads in model.layer_heads)}
    bounds = {degree: [part.bounds(count) for part in some for count in counts] for degree, some in parts.items()}
    return [degree for degree, some in bounds.items() if all(first < last for first, last in some)]


def heads_are_together(parameters: Mapping[str, Parameter], model: ModelConfig) -> bool:
    """Check whether every rank needs all heads: a norm of queries or keys covers them, or the table has no unit that is
    a part of them."""
    norms = [item for item in parameters.values() if item.name.endswith((".q_norm.weight", ".k_norm.weight"))]
    has_units = any(item.unit is not None for item in parameters.values())
    sizes = {(model.head_dim,), *((heads.head_dim,) for heads in model.layer_heads)}
    return not has_units or any(norm.shape not in sizes for norm in norms)


def find_degrees(parallel: ParallelConfig, model: ModelConfig, *, together: bool) -> Degrees:
    """Decide into how many parts the ranks split a model, if they split it as its parameter table says.

    together: as in divisible_heads.

    Raises:
        InvalidRequestError: the model cannot be split like this; the message says what is possible.
    """
    size, tensor = parallel.num_ranks, parallel.tensor_parallel_size
    possible, attention = divisible_heads(model, together=together), parallel.attention_parallel_size
    if attention is None:
        attention = max(item for item in possible if item <= tensor)
    elif attention == HALF_GROUPS:
        if together or not _has_half_groups(model):
            allowed = "at most 8, unless each of 8 key/value heads has an even number of query heads"
            raise fail("attention_parallel_size", attention, allowed)
    elif attention not in possible:
        why = "norms over all of its heads" if together else f"{model.num_key_value_heads} key/value heads"
        nearest = max(item for item in possible if item <= attention)
        raise fail("attention_parallel_size", attention, f"at most {nearest}: the model has {why}")
    mlp, experts = parallel.mlp_parallel_size or tensor, parallel.expert_parallel_size
    if experts > 1 and not model.num_experts:
        raise fail("expert_parallel_size", experts, "1: this model has no experts")
    if experts > max(1, model.num_experts):
        nearest = max(item for item in DEGREES if item <= model.num_experts)
        raise fail("expert_parallel_size", experts, f"at most {nearest}: the model has {model.num_experts} experts")
    for name, degree, length in (
        ("mlp_parallel_size", mlp, model.intermediate_size),
        ("tensor_parallel_size", tensor, model.vocab_size),
    ):
        if degree > 1 and length < LEAVES:
            raise fail(name, degree, f"1: the dimension that it splits has only {length} elements")
    return Degrees(size, attention, mlp, tensor, experts, min(mlp, size // experts) if model.num_experts else 1)


def _has_half_groups(model: ModelConfig) -> bool:
    """Tell whether 16 ranks can share attention."""
    counts = [(model.num_attention_heads, model.num_key_value_heads), *(heads[:2] for heads in model.layer_heads)]
    return all(2 * kv_heads == HALF_GROUPS and heads % HALF_GROUPS == 0 for heads, kv_heads in counts)


Ranges = tuple[tuple[int, int], ...]  # [first, past-the-last) of each range


@dataclass(frozen=True, slots=True)
class Wiring:
    """Operations on the columns of a product's input and result in addition to the product; (): nothing.

    Attributes:
        gathers_input: where the part of each rank begins, and where the last one ends.
        selects_input: the part of a whole input that the product needs.
        gathers_result: as gathers_input.
        selects_result: the parts of a whole result that are kept, joined in this order.
    """

    gathers_input: tuple[int, ...] = ()
    selects_input: Ranges = ()
    gathers_result: tuple[int, ...] = ()
    selects_result: Ranges = ()


DIRECT = Wiring()


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter.

    Attributes:
        own: the part, as a parameter of the rank's model; its name counts only the rank's experts.
        ranges: [first, past-the-last) along `axis`, joined in this order; (): the whole axis.
        sizes: those of the pieces of that axis, each of which is cut between its `units` units.
    """

    own: Parameter
    whole: Parameter
    part: Part
    ranges: Ranges = ()
    axis: int = 0
    sizes: tuple[int, ...] = ()
    units: int = 1
    wiring: Wiring = DIRECT

    @property
    def is_summed(self) -> bool:
        """True if a product with this part is one term of a sum over ranks."""
        return bool(self.ranges) and self.whole.leaves > 1 and self.axis == len(self.own.shape) - 1 == 1

    def borders(self) -> list[int]:
        """List where the part of each rank begins, and where the last one ends, on an axis of one piece."""
        return list(_borders(self.units, self.part.degree, self.whole.shape[self.axis] // self.units))

    def columns(self) -> list[Ranges]:
        """List the ranges of every rank's part."""
        parts = [Part(index, self.part.degree) for index in range(self.part.degree)]
        return [_ranges(part, self.sizes, self.units) for part in parts]


def cut_all(parameters: Mapping[str, Parameter], share: Share, config: ModelConfig) -> dict[str, Cut]:
    """Cut a rank's part of each parameter, by the name in the rank's model. Other ranks' experts are left out."""
    first, last = share.experts.even_bounds(config.num_experts)
    cuts: dict[str, Cut] = {}
    for whole in parameters.values():
        found = EXPERT.search(whole.name)
        if found is not None and not first <= int(found[1]) < last:
            continue
        cut, weight = _by_table(whole, share.part_of(whole)), whole
        if found is None:
            weight = parameters.get(whole.name.removesuffix(".bias") + ".weight", whole)
        if share.degrees.attention == HALF_GROUPS and weight.unit is not None:
            cut = _half_group(whole, weight, share)
        elif share.degrees.forms is None and weight.is_gathered:
            cut = _rows(whole, Part(share.rank % share.degrees.size, share.degrees.size))
        elif share.degrees.forms is not None and found is None and len(weight.shape) > 1:
            # a vector follows the heads of its layer, if it has an element for each of them
            cut = _by_form(whole, weight, share, share.degrees.forms[general(weight.name)])
        if found is not None:
            name = EXPERT.sub(f".experts.{int(found[1]) - first}.", whole.name)
            cut = replace(cut, own=replace(cut.own, name=name))
        cuts[cut.own.name] = cut
    return cuts


def is_looked_up(parameter: Parameter) -> bool:
    """Recognise a table whose rows are looked up, by token or by position."""
    return len(parameter.shape) == 2 and not parameter.quant and not IN_A_LAYER.search(parameter.name)


def is_beginning(parameter: Parameter) -> bool:
    """Recognise the weight of the product that begins a branch, other than an expert's."""
    in_a_layer = IN_A_LAYER.search(parameter.name) and not EXPERT.search(parameter.name)
    is_split = parameter.shard is not None and not parameter.is_gathered
    return bool(in_a_layer) and len(parameter.shape) == 2 and is_split and parameter.leaves == 1


def module_of(parameter: Parameter) -> str:
    """Name the module that holds a weight's layer, with * for numbers."""
    return general(parameter.name).rpartition(".")[0].rpartition(".")[0]


def depth_degree(parameter: Parameter, size: int) -> int:
    """Find the largest number of parts, at most `size`, into which the depth can be cut with no part empty."""
    units = parameter.num_units if parameter.unit is not None else parameter.shape[-1]
    return max(degree for degree in (1, 2, 4, 8) if degree <= min(size, units))


def _by_form(whole: Parameter, weight: Parameter, share: Share, form: Form) -> Cut:
    """Cut the part of a parameter that lies in a form. weight: the parameter itself, or the weight of this bias."""
    every, inside = Part(share.rank % share.degrees.size, share.degrees.size), share.part_of(weight)
    if form == "columns":
        return _cut(whole, every, 1, (whole.shape[1],), whole.shape[1])
    if weight.shard is None or weight.is_gathered or not IN_A_LAYER.search(weight.name):  # in no branch
        return _rows(whole, every) if form == "rows" else Cut(whole, whole, WHOLE)
    if weight.leaves > 1:
        return _ending(whole, weight, form, every, inside)
    if form == "rows":
        return _by_table(whole, inside) if inside.degree > 1 else _rows(whole, every)
    if inside.degree == 1:
        return Cut(whole, whole, WHOLE)
    results = _by_table(weight, inside).ranges
    return Cut(whole, whole, WHOLE, wiring=Wiring(selects_result=results if weight.unit else results[:1]))


def _ending(whole: Parameter, weight: Parameter, form: Form, every: Part, inside: Part) -> Cut:
    """Cut the part of the product that ends a branch, or of its bias."""
    depth = weight.shape[-1]
    if form == "depth" and len(whole.shape) == 1:
        return Cut(whole, whole, WHOLE)
    if form == "depth":
        if inside.degree > 1:
            return _by_table(whole, inside)
        degree = depth_degree(weight, every.degree)
        cut = _by_table(whole, Part(every.index % degree, degree))
        return replace(cut, wiring=Wiring(selects_input=cut.ranges))
    cut = _rows(whole, every) if form == "rows" else Cut(whole, whole, WHOLE)
    if inside.degree > 1:
        borders = _borders(depth // weight.unit_size, inside.degree, weight.unit_size)
        cut = replace(cut, wiring=replace(cut.wiring, gathers_input=borders))
    return cut


def _rows(whole: Parameter, every: Part) -> Cut:
    """Cut a part of the rows of a weight or bias whose results are gathered. A part of a gated one has rows of both
    pieces, and each pair of rows gives one column."""
    pieces = whole.layouts[-1].pieces if whole.layouts[-1].join_axis == 0 and whole.unit is None else ()
    sizes = pieces or (whole.shape[0],)
    return replace(
        _cut(whole, every, 0, sizes, sizes[0]), wiring=Wiring(gathers_result=_borders(sizes[0], every.degree))
    )


def _half_group(whole: Parameter, weight: Parameter, share: Share) -> Cut:
    """Cut the part of a parameter of attention that one of 16 ranks has. weight: the parameter itself, or that of this
    bias. No rank has whole leaves of the product that ends attention, so its rows are cut, and all gather its input."""
    if weight.leaves > 1:
        index, rows = share.rank % HALF_GROUPS, whole.shape[0]
        borders, inputs = (
            tuple(place * length // HALF_GROUPS for place in range(HALF_GROUPS + 1))
            for length in (rows, weight.shape[-1])
        )
        ranges = ((borders[index], borders[index + 1]),)
        wiring = Wiring(gathers_input=inputs, gathers_result=borders)
        own = replace(whole, shape=(ranges[0][1] - ranges[0][0], *whole.shape[1:]), ends=None)
        return Cut(own, whole, Part(index, HALF_GROUPS), ranges, 0, (rows,), rows, wiring)
    cut = _by_table(whole, share.attention)
    (first, last), *others = cut.ranges
    half = (last - first) // 2
    begin = first + share.rank % 2 * half
    own = replace(cut.own, shape=(cut.own.shape[0] - half, *cut.own.shape[1:]))
    return replace(cut, own=own, ranges=((begin, begin + half), *others))


def _by_table(whole: Parameter, part: Part) -> Cut:
    """Cut the part of a parameter that is split as its table says."""
    if part.degree == 1 or whole.shard is None:
        return Cut(whole, whole, WHOLE)
    pieces = whole.layouts[-1].pieces if whole.layouts[-1].join_axis == whole.shard else ()
    sizes = pieces or (whole.shape[whole.shard],)
    return _cut(whole, part, whole.shard, sizes, whole.num_units if whole.unit is not None else min(sizes))


def _cut(whole: Parameter, part: Part, axis: int, sizes: tuple[int, ...], units: int) -> Cut:
    """Cut every piece of an axis in the same way, at the borders between its units."""
    ranges = _ranges(part, sizes, units)
    length = sum(end - begin for begin, end in ranges)
    assert sum(sizes) == whole.shape[axis], f"the pieces of {whole.name} do not fill its axis {axis}"
    shape = (*whole.shape[:axis], length, *whole.shape[axis + 1 :])
    own = replace(whole, shape=shape, ends=_leaf_ends(whole, part) if axis and whole.leaves > 1 else None)
    return Cut(own, whole, part, ranges, axis, sizes, units)


def _ranges(part: Part, sizes: tuple[int, ...], units: int) -> Ranges:
    """Find what a part has of every piece of an axis."""
    (first, last), starts = part.bounds(units), [0, *accumulate(sizes)]
    each = [(start, size // units) for start, size in zip(starts, sizes, strict=False)]
    return tuple((start + first * size, start + last * size) for start, size in each)


def _leaf_ends(whole: Parameter, part: Part) -> tuple[int, ...]:
    each = LEAVES // part.degree
    bounds = leaf_bounds(whole.shape[-1], LEAVES, whole.unit_size)[part.index * each : (part.index + 1) * each]
    ends = tuple(end - bounds[0][0] for _, end in bounds)
    assert list(ends) == sorted(ends), f"the leaves of {whole.name} are out of order"
    return ends


def _borders(units: int, degree: int, unit: int = 1) -> tuple[int, ...]:
    return (*(Part(index, degree).bounds(units)[0] * unit for index in range(degree)), units * unit)
