"""Layers of a model that several ranks share, and RankFactory, which makes them for unchanged model files. Each rank
computes a part, and gathers the other ranks' parts if needed:

    K is split       part of a sum -> sum over ranks, in the order of one process -> scales, bias
    rows of a table  rows that this rank has -> each row from the rank that has it
    the LM head      some columns of the logits -> all columns
    experts          results of this rank's experts -> each row's experts, added in ascending id

Where a sharding map splits a branch's weights differently from the features between them, the input and the result of a
product pass through Wires. Everything else is computed by every rank in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.metadata import Heads
from penstock.kernels.ops import Ops, RowSource, SplittingOps
from penstock.kernels.tensors import (
    FLOAT32,
    Array,
    Slot,
    Tensor,
    array_type,
    as_array,
    as_kind_of,
    columns_of,
    put,
    put_where,
    tree_sum,
)
from penstock.layers.factory import LayerFactory, Mixture
from penstock.layers.lora import AdapterPart, LoraSlots, LoraSpec
from penstock.layers.weights import (
    ActivatedLinear,
    Embedding,
    GatedLinear,
    HeadLayout,
    Linear,
    LinearSpec,
    LMHead,
    whole,
)
from penstock.ranks.links import Links
from penstock.ranks.sharding import DIRECT, Cut, Share, Wiring
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter

MAGNITUDE_ROWS = 4096  # how many rows of a weight are read at once to find their largest values


@dataclass(frozen=True, slots=True)
class Split:
    """A rank's part of a model.

    Attributes:
        links: how the rank exchanges arrays with the others.
        cuts: the cut of every parameter of which the rank has a part, by its name in the rank's model.
    """

    share: Share
    links: Links
    cuts: Mapping[str, Cut]


class Wires:
    """Gathers or selects columns of a product's input and result, as its wiring says (sharding.py)."""

    def __init__(self, wiring: Wiring, links: Links) -> None:
        self.wiring = wiring
        self.links = links

    def input(self, x: Tensor) -> Tensor:
        """Gather or select the columns that the product multiplies, from x [M, K or a part of it] dtype."""
        if self.wiring.gathers_input:
            return self._gathered(x, self.wiring.gathers_input)
        return _selected(x, self.wiring.selects_input)

    def result(self, y: Tensor) -> Tensor:
        """Gather or select the columns that the next layer takes, from the product's result y."""
        if self.wiring.gathers_result:
            return self._gathered(y, self.wiring.gathers_result)
        return _selected(y, self.wiring.selects_result)

    def _gathered(self, x: Tensor, borders: Sequence[int]) -> Tensor:
        shapes = [(len(x), end - begin) for begin, end in pairwise(borders)]
        return columns_of(self.links.gather(x, len(shapes), shapes), x)


def _selected(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    return columns_of([x[:, begin:end] for begin, end in ranges], x) if ranges else x


def _exchange(ops: Ops, links: Links, work: Callable[[], None]) -> None:
    """Do what needs other ranks' results: in the pass, or between two operations of it, on the host."""
    if links.is_recorded:
        work()
    else:
        cast(SplittingOps, ops).run_host(work)


class WiredLinear(Linear):
    """A Linear whose input and result pass through Wires."""

    def __init__(self, *args: Any, wires: Wires) -> None:
        super().__init__(*args)
        self.wires = wires

    def forward(self, x: Tensor) -> Tensor:
        return self.wires.result(super().forward(self.wires.input(x)))


class WiredActivatedLinear(WiredLinear, ActivatedLinear):
    """An ActivatedLinear whose input and result pass through Wires."""


class WiredGatedLinear(WiredLinear, GatedLinear):
    """A GatedLinear whose input and result pass through Wires."""


class SummedLinear(Linear):
    """x [M, K / degree] dtype -> x @ weight.T + bias [M, N] float32, where each rank has some leaves of K.

    Attributes:
        scales: [N] float32, the column scales of the weight, which multiply the sum; None if it has none.
    """

    scales: Array | None
    bias: Array | None

    def __init__(self, like: Linear, part: Slot, split: Split, cut: Cut) -> None:
        """Split a layer. like: the layer that one process would have. part: the buffer for this rank's sum."""
        super().__init__(like.ops, like.spec, part)
        assert like.spec.shape == cut.own.shape, "a rank's part has another shape than its parameter"
        self.sum = like.out
        self.links = split.links
        self.degree = cut.part.degree
        self.wires = Wires(cut.wiring, split.links)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        source = cast(RowSource, values["weight"])
        scheme = self.spec.packing.scheme
        magnitudes = None
        if scheme is not None and scheme.weight_bits == 8:
            magnitudes = np.maximum.reduce(self.links.gather(row_magnitudes(source), self.degree))
        ops = cast(SplittingOps, self.ops)
        found = [
            ops.pack_part(rows, magnitudes, packing)
            for rows, (_, _, packing) in zip(self._sources(source), self.pieces, strict=True)
        ]
        self.packed, scales = tuple(packed for packed, _ in found), [own for _, own in found]
        self.scales = None
        if any(own is not None for own in scales):  # multiplying by 1 changes no bit
            ones = [np.ones(end - begin, FLOAT32) for begin, end, _ in self.pieces]
            self.scales = np.concatenate([one if own is None else own for own, one in zip(scales, ones, strict=True)])
        self.bias = None
        if self.spec.bias:
            self.bias = whole(values["bias"]).astype(array_type(self.ops.dtype)).astype(FLOAT32)

    def state(self) -> dict[str, Tensor]:
        own = {"sum_scales": self.scales, "sum_bias": self.bias}
        return super().state() | {name: value for name, value in own.items() if value is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        scheme = self.spec.packing.scheme
        codings = [packing.coding for _, _, packing in self.pieces if packing.coding is not None]
        has_scales = scheme is not None and scheme.weight_bits == 8
        has_scales = has_scales or any(coding.column_scales for coding in codings)
        expected = {"sum_scales": has_scales, "sum_bias": self.spec.bias}
        for name, is_expected in expected.items():
            shape = tuple(state[name].shape) if name in state else None
            if shape != (self.spec.shape[:1] if is_expected else None):
                raise ValueError(f"its {name} has the shape {shape}")
        own = {name: as_array(state[name]) if name in state else None for name in expected}
        self.scales, self.bias = own["sum_scales"], own["sum_bias"]
        super().restore({name: value for name, value in state.items() if name not in expected})

    def forward(self, x: Tensor) -> Tensor:
        x = self.wires.input(x)
        part, total = self.multiply(x, self.out(x.shape[0])), self.sum(x.shape[0])
        _exchange(self.ops, self.links, lambda: self._add(part, total))
        if self.lora is None:
            return total
        hidden = self.lora.shrink(x)
        _exchange(self.ops, self.links, lambda: self._add_hidden(hidden))
        return self.lora.expand(hidden, total)

    def _add_hidden(self, hidden: Tensor) -> None:
        """Add the parts of x A^T of all ranks, if a row has an adapter. A recorded pass adds them in any case."""
        assert self.lora is not None
        if self.lora.spec.slots.are_used or self.links.is_recorded:
            own = hidden.reshape(hidden.shape[0], -1)
            with np.errstate(all="ignore"):  # in what no adapter has written, and none reads
                cast(SplittingOps, self.ops).add_parts(self.links.gather(own, self.degree), None, None, out=own)

    def _add(self, part: Tensor, total: Tensor) -> None:
        """Add the parts of all ranks."""
        parts = self.links.gather(part, self.degree)
        cast(SplittingOps, self.ops).add_parts(parts, self.scales, self.bias, out=total)


def row_magnitudes(source: RowSource) -> Array:
    """Find the largest absolute value of each row."""
    found = np.empty(source.shape[0], FLOAT32)
    for start in range(0, len(found), MAGNITUDE_ROWS):
        stop = min(start + MAGNITUDE_ROWS, len(found))
        found[start:stop] = np.abs(as_array(source.read(start, stop)).astype(FLOAT32)).max(axis=1, initial=0)
    return found


class SplitEmbedding(Embedding):
    """ids [T] int64 -> scale * weight[ids], where each rank has some rows of the table."""

    def __init__(self, like: Embedding, split: Split, cut: Cut) -> None:
        super().__init__(like.ops, cut.own.shape, like.out, like.scale, like.packing)
        self.links = split.links
        self.bounds = tuple(pairwise(cut.borders()))
        self.index = cut.part.index

    def forward(self, ids: Tensor) -> Tensor:
        _exchange(self.ops, self.links, lambda: self._look_up(ids))
        return self.out(ids.shape[0])

    def _look_up(self, ids: Tensor) -> None:
        """Write the rows of all ids to the buffer."""
        first, last = self.bounds[self.index]
        rows = super().forward((ids - first).clip(0, last - first - 1))  # some row for an id of another rank
        parts = self.links.gather(rows, len(self.bounds))
        for index, (begin, end) in enumerate(self.bounds):
            if index != self.index:
                put_where((begin <= ids) & (ids < end), parts[index], rows)


class ColumnsEmbedding(Embedding):
    """ids [T] int64 -> scale * weight[ids], where each rank has some columns of the table."""

    def __init__(self, like: Embedding, split: Split, cut: Cut) -> None:
        super().__init__(like.ops, cut.own.shape, like.out, like.scale, like.packing)
        self.wires = Wires(Wiring(gathers_result=tuple(cut.borders())), split.links)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wires.result(super().forward(ids))


class SplitHead(LMHead):
    """hidden [M, hidden] dtype -> logits [M, V'] float32: each rank has some columns, and the last one the padding."""

    def __init__(
        self,
        ops: Ops,
        spec: LinearSpec,
        out: tuple[Slot, Slot],
        split: Split,
        columns: Sequence[int],
        *,
        scale: float,
        softcap: float | None,
        layout: HeadLayout,
    ) -> None:
        """Split a head over ranks. out: buffers for this rank's logits and for all logits. columns: where each rank's
        columns begin, and where the last rank's end, with the padding. layout: of this rank's columns."""
        super().__init__(ops, spec, out[0], scale=scale, softcap=softcap, layout=layout)
        self.all = out[1]
        self.links = split.links
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        own, logits = super().forward(x), self.all(x.shape[0])
        _exchange(self.ops, self.links, lambda: self._put_together(own, logits))
        return logits

    def _put_together(self, own: Tensor, logits: Tensor) -> None:
        bounds = list(pairwise(self.columns))
        shapes = [(len(own), end - begin) for begin, end in bounds]
        for (begin, end), part in zip(bounds, self.links.gather(own, len(bounds), shapes), strict=True):
            put(part, logits[:, begin:end])


class SplitMixture:
    """Applies experts that are distributed over ranks, whole or in parts, with the bits of Ops.experts."""

    def __init__(self, ops: Ops, split: Split, num_experts: int, down: Sequence[Any]) -> None:
        """Distribute experts over ranks. down: the last product of each expert of this rank."""
        self.ops = ops
        self.split = split
        self.first, self.last = split.share.experts.even_bounds(num_experts)
        self.num_experts = num_experts
        self.down = down
        self._terms: tuple[Array | None, Array | None] | None = None

    def __call__(
        self,
        y: Tensor,
        gate_up: Any,
        down: Any,
        chosen: tuple[Tensor, Tensor],
        activation: str,
        *,
        weigh_inputs: bool = False,
        out: Tensor,
    ) -> Tensor:
        """Compute what Ops.experts does. gate_up, down: the packed weights of this rank's experts."""
        inputs, ids, weights, total = (as_array(item) for item in (y, *chosen, out))
        assert len(gate_up) == len(down) == self.last - self.first, "a rank has other experts than its share says"
        flat, ones = ids.reshape(-1), np.ones_like(weights)
        own = np.flatnonzero((flat >= self.first) & (flat < self.last))
        results = np.zeros((len(flat), total.shape[1]), FLOAT32)
        if len(own):
            factors = (weights if weigh_inputs else ones).reshape(-1)[own, None]
            local = (flat[own] - self.first)[:, None]
            x, first, by = (
                as_kind_of(y, np.ascontiguousarray(item)) for item in (inputs[own // ids.shape[1]], local, factors)
            )
            found = self.ops.experts(x, gate_up, down, (first, by), activation, weigh_inputs=weigh_inputs)
            results[own] = as_array(found)
        degree = self.split.share.degrees.mixture
        if degree > 1:
            results = tree_sum(self.split.links.gather(results, degree), np.empty_like(results))
        scales, biases = self._scales_and_biases()
        if scales is not None:
            results *= scales[flat]
        if biases is not None:
            results += biases[flat]
        _mixed(results.reshape(*ids.shape, -1), ids, ones if weigh_inputs else weights, total)
        put(total, out)
        return out

    def _scales_and_biases(self) -> tuple[Array | None, Array | None]:
        """Gather the column scales and the biases of all experts, [experts, hidden], once; None if there are none. The
        product of a whole expert applies its own."""
        if self._terms is None:
            scales, biases = ([getattr(item, name, None) for item in self.down] for name in ("scales", "bias"))
            self._terms = self._gathered(scales), self._gathered(biases)
        return self._terms

    def _gathered(self, own: Sequence[Array | None]) -> Array | None:
        """Gather a vector of each expert from the experts' ranks."""
        found = [item for item in own if item is not None]
        if not found:
            return None
        degrees, mine = self.split.share.degrees, np.stack(found)
        bounds = [Share(rank, degrees).experts.even_bounds(self.num_experts) for rank in range(degrees.mixture)]
        shapes = [(last - first, mine.shape[1]) for first, last in bounds]
        parts = self.split.links.gather(mine, degrees.mixture, shapes)
        return np.concatenate(parts[:: degrees.inner])


def _mixed(results: Array, ids: Array, weights: Array, out: Array) -> None:
    """Add weight * result over the k experts of results [T, k, hidden], in ascending id, starting from zero."""
    order, rows = np.argsort(ids, axis=1), np.arange(len(ids))
    out[:] = 0
    for place in order.T:
        out += weights[rows, place][:, None] * results[rows, place]


def cut_adapter(cut: Cut, part: AdapterPart) -> AdapterPart:
    """Take a rank's part of what an adapter changes in a product."""

    def taken(values: Array | None, axis: int) -> Any:
        if values is None:
            return None
        return np.concatenate([values.take(range(*some), axis=axis) for some in cut.ranges], axis=axis)

    if cut.axis == 1:
        return replace(part, a=taken(part.a, 2))
    return AdapterPart(part.a, *(taken(item, 0) for item in (part.b, part.factors, part.offsets)))


@dataclass(frozen=True, slots=True)
class RankFactory(LayerFactory):
    """Makes the layers of a rank's part of a model. Its parameters are the rank's own."""

    split: Split = field(kw_only=True)

    def linear(self, name: str, *, is_exact: bool = False) -> Linear:
        made, cut, wires = LayerFactory.linear(self, name, is_exact=is_exact), self._cut(name), self._wires(name)
        if cut.is_summed:
            if is_exact:
                raise NotSupportedError(f"{self.prefix}{name}.weight is exact, and cannot be split along its input")
            part = self.slot(f"{name}.part", made.spec.shape[:1], "float32")
            return SummedLinear(made, part, self.split, cut)
        return made if wires is None else WiredLinear(self.ops, made.spec, made.out, wires=wires)

    def activated_linear(self, name: str, activation: str) -> Linear:
        made, wires = LayerFactory.activated_linear(self, name, activation), self._wires(name)
        return made if wires is None else WiredActivatedLinear(self.ops, made.spec, made.out, activation, wires=wires)

    def gated_linear(self, name: str, activation: str) -> Linear:
        made, wires = LayerFactory.gated_linear(self, name, activation), self._wires(name)
        return made if wires is None else WiredGatedLinear(self.ops, made.spec, made.out, activation, wires=wires)

    def lm_head(self, name: str, *, scale: float = 1.0, softcap: float | None = None) -> LMHead:
        cut = self._cut(name)
        if not cut.ranges:
            return LayerFactory.lm_head(self, name, scale=scale, softcap=softcap)
        width = self.head.width(cut.whole.shape[0])
        columns = [*cut.borders()[:-1], width]  # the padding, if any, is the last rank's
        own = columns[cut.part.index + 1] - columns[cut.part.index]
        layout = self.head if self.head.is_plain else HeadLayout(self.head.pieces, pad_to=own)
        made = LayerFactory.lm_head(replace(self, head=layout), name, scale=scale, softcap=softcap)
        out = made.out, self.slot(f"{name}.all", (width,), "float32")
        return SplitHead(self.ops, made.spec, out, self.split, columns, scale=scale, softcap=softcap, layout=layout)

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        made, cut = LayerFactory.embedding(self, name, scale=scale), self._cut(name)
        if not cut.ranges:
            return made
        kind = SplitEmbedding if cut.axis == 0 else ColumnsEmbedding
        return kind(made, self.split, cut)

    def heads(self, cfg: ModelConfig) -> Heads:
        return LayerFactory.heads(self, self.split.share.config(cfg))

    def own_heads(self, values: Array, cfg: ModelConfig) -> Array:
        first, last = self.split.share.queries(cfg.num_attention_heads, cfg.num_key_value_heads)
        return values[first:last]

    def num_experts(self, cfg: ModelConfig) -> int:
        first, last = self.split.share.experts.even_bounds(cfg.num_experts)
        return last - first

    def mixture(self, cfg: ModelConfig, down: Sequence[Linear]) -> Mixture:
        if self.split.share.degrees.mixture == 1:
            return LayerFactory.mixture(self, cfg, down)
        return SplitMixture(self.ops, self.split, cfg.num_experts, down)

    def torch_parameter(self, name: str) -> Parameter:
        """Find the whole parameter: torch's layers compute with all of it on every rank."""
        return self.split.cuts[name].whole

    def part_widths(self) -> set[int]:
        parts = [cut for cut in self.split.cuts.values() if cut.ranges and cut.axis == 0 and cut.wiring == DIRECT]
        return {end - begin for cut in parts for begin, end in pairwise(cut.borders())}

    def _lora_spec(self, name: str, slots: LoraSlots) -> LoraSpec | None:
        spec, cut = LayerFactory._lora_spec(self, name, slots), self._cut(name)
        if spec is None or not cut.ranges:
            return spec
        ends = spec.piece_ends
        if cut.axis == 0:
            ends = tuple(sum(max(0, min(last, end) - first) for first, last in cut.ranges) for end in ends)
        return replace(spec, piece_ends=ends, cut=partial(cut_adapter, cut))

    def _cut(self, name: str) -> Cut:
        return self.split.cuts[f"{self.prefix}{name}.weight"]

    def _wires(self, name: str) -> Wires | None:
        """Make the wires that convert a product's columns; None if they are those that come in and go out."""
        wiring = self._cut(name).wiring
        return None if wiring == DIRECT else Wires(wiring, self.split.links)
