"""Layers whose weights lie on chips: each chip runs an ordinary layer on its part, and the parts are joined.

Model files do not know of this: PlacedFactory makes these layers, and the parameter table says how a weight is split.
Every chip of an operation would compute the same element-wise results (norms, rotation, sums), so they are computed
once. The embedding, the final norm, and a head that the placement leaves out are computed by the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np

from penstock.kernels.ops import Ops, Packing, RowSource, TensorRows
from penstock.kernels.tensors import FLOAT32, Array, Slot, Tensor, as_array, tree_sum
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import ActivatedLinear, GatedLinear, Linear, LinearSpec, LMHead, whole
from penstock.weights.loader import Place
from penstock_lab.chips.device import Work
from penstock_lab.chips.machine import Machine, Site
from penstock_lab.chips.ops import PlacedOps
from penstock_lab.chips.parts import Part, parts_of
from penstock_lab.planner.placement import WEIGHT_BYTES

MakePart = Callable[[LinearSpec, Slot], Linear]


class PlacedLinear(Linear):
    """x [M, K] -> the result of `like`, of which each chip computes some columns."""

    def __init__(self, like: Linear, site: Site, parts: Sequence[tuple[Part, Linear]], name: str) -> None:
        super().__init__(like.ops, like.spec, like.out)
        self.name = name
        self._site = site
        self._parts = parts
        self._works: dict[int, list[Work]] = {}  # by the number of tokens
        site.reserve(self._works_of(site.machine.placement.rows))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        own = {name: whole(value) for name, value in values.items()}
        for part, layer in self._parts:
            layer.load({name: TensorRows(part.of(own[name])) for name in layer.shapes})

    def forward(self, x: Tensor) -> Tensor:
        self._run(x)
        out = self.out(x.shape[0])
        for part, layer in self._parts:
            result, start = layer(x), 0
            for begin, end in part.rows[: 1 if self.spec.packing.gated else None]:
                out[:, begin:end] = result[:, start : start + end - begin]
                start += end - begin
        return out

    def _run(self, x: Tensor) -> None:
        """Record the chips' work for x [M, K]: each receives what it lacks of x, and reads the weights of its part."""
        self._site.run(self.name, self._works_of(x.shape[0]))

    def _works_of(self, tokens: int) -> list[Work]:
        if tokens not in self._works:
            self._works[tokens] = [self._work(part, layer, tokens) for part, layer in self._parts]
        return self._works[tokens]

    def _work(self, part: Part, layer: Linear, tokens: int) -> Work:
        operand, result = WEIGHT_BYTES * tokens * part.shape[1], layer.out.row_bytes * tokens
        lacking, is_first = self._lacking(part, operand), self._site.is_first
        return Work(
            part.chip,
            streamed=0 if self._site.is_resident else part.num_bytes,
            operations=2 * tokens * part.num_elements,
            received=0 if is_first else lacking,
            from_host=lacking if is_first else 0,
            to_host=result if self._returns else 0,
            buffers=operand + result,
        )

    def _lacking(self, part: Part, operand: int) -> int:
        """Count the bytes of its operand that a chip did not compute itself."""
        return operand

    @property
    def _returns(self) -> bool:
        """True if results go to the host."""
        return False


class PlacedSum(PlacedLinear):
    """x [M, K] -> x @ weight.T + bias [M, N] float32, where each chip sums some leaves of K."""

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        super().load(values)
        self.bias: Array | None = None
        if self.spec.bias:
            self.bias = whole(values["bias"]).astype(self.ops.dtype).astype(FLOAT32)

    def forward(self, x: Tensor) -> Tensor:
        self._run(x)
        out = self.out(x.shape[0])
        sums = np.empty((1 + self._parts[-1][0].leaves, *out.shape), FLOAT32)
        for part, layer in self._parts:
            ((begin, end),) = part.rows
            operand = self.ops.tensor(np.ascontiguousarray(as_array(x)[:, slice(*part.depth)]))
            sums[part.leaves, :, begin:end] = layer(operand)
        if len(sums) == 1:
            out[:] = sums[0]
        else:
            tree_sum(list(sums), out)
        if self.bias is not None:
            out += self.bias
        return out

    def _lacking(self, part: Part, operand: int) -> int:
        """Subtract the share that the chip computed: chips with the same leaves share evenly."""
        together = sum(other.leaves == part.leaves for other, _ in self._parts)
        return operand - operand // together

    @property
    def _returns(self) -> bool:
        return self._site.is_last  # without a head on a chip, hidden states go back to the host


class PlacedHead(LMHead):
    """hidden [M, hidden] -> logits [M, V'] float32, of which each chip computes some columns; the host joins them."""

    site: Site

    @property
    def holds_rows(self) -> bool:
        """Always False: the host's embedding has a table of its own."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        self.site.run("logits", self.works(x.shape[0]))
        return super().forward(x)

    def works(self, tokens: int) -> list[Work]:
        operand, works = WEIGHT_BYTES * tokens * self.spec.shape[1], []
        for chip, (begin, end, _) in zip(self.site.chips, self.pieces, strict=True):
            part = Part(chip, ((begin, end),), (0, self.spec.shape[1]))
            result = FLOAT32.itemsize * tokens * (end - begin)
            works.append(
                Work(
                    chip,
                    streamed=0 if self.site.is_resident else part.num_bytes,
                    operations=2 * tokens * part.num_elements,
                    received=operand,
                    to_host=result,
                    buffers=operand + result,
                )
            )
        return works


@dataclass(frozen=True, slots=True)
class PlacedFactory(LayerFactory):
    """Makes a model's layers: those that the placement names on a machine's chips, the rest on the host."""

    machine: Machine | None = None

    def at(self, name: str) -> Self:
        """Make the factory of a submodule. For attention, its operations run on the chips of that layer."""
        made = LayerFactory.at(self, name)
        site = made._site("qkv_proj")
        if site is None or self.machine is None or f"{made.prefix}qkv_proj.weight" not in self.parameters:
            return made
        placed = cast(PlacedOps, self.ops).on(site, self.machine.heads_of(site))
        return replace(made, ops=cast(Ops, placed))

    def linear(self, name: str, *, is_exact: bool = False) -> Linear:
        made = LayerFactory.linear(self, name, is_exact=is_exact)
        return self._placed(name, made, lambda spec, out: Linear(self.ops, spec, out))

    def activated_linear(self, name: str, activation: str) -> Linear:
        return self._placed(
            name,
            LayerFactory.activated_linear(self, name, activation),
            lambda spec, out: ActivatedLinear(self.ops, spec, out, activation),
        )

    def gated_linear(self, name: str, activation: str) -> Linear:
        return self._placed(
            name,
            LayerFactory.gated_linear(self, name, activation),
            lambda spec, out: GatedLinear(self.ops, spec, out, activation),
        )

    def lm_head(self, name: str, *, scale: float = 1.0, softcap: float | None = None) -> LMHead:
        site = self._site(name)
        if site is None:
            return LayerFactory.lm_head(self, name, scale=scale, softcap=softcap)
        spec = self._linear_spec(name)
        out = self.slot(name, (self.head.width(spec.shape[0]),), "float32")
        made = PlacedHead(self.ops, spec, out, scale=scale, softcap=softcap, layout=self.head)
        made.site = site
        site.reserve(made.works(site.machine.placement.rows))
        return made

    def _site(self, name: str) -> Site | None:
        return None if self.machine is None else self.machine.site(f"{self.prefix}{name}.weight")

    def _placed(self, name: str, like: Linear, make: MakePart) -> Linear:
        """Place a layer that computes `like` on the chips of its operation. `make` makes the layer of each part."""
        site = self._site(name)
        if site is None:
            return like
        parts = []
        for part in parts_of(self.parameters[f"{self.prefix}{name}.weight"], site.chips):
            packing = Packing(part.ends, None, like.spec.packing.gated)
            spec = LinearSpec(part.shape, like.spec.bias and not part.ends, packing)
            width = part.shape[0] // 2 if packing.gated else part.shape[0]
            out = self.slot(f"{name} of {width}", (width,), str(like.out.dtype))
            parts.append((part, make(spec, out)))
        kind = PlacedSum if parts[0][0].ends else PlacedLinear
        return kind(like, site, parts, name)


@dataclass(frozen=True, slots=True)
class ChipsPlace(Place):
    """A place on the chips of a machine."""

    machine: Machine | None = None

    def factory(self, whole: LayerFactory) -> LayerFactory:
        made = PlacedFactory(whole.ops, whole.parameters, whole.arena, whole.scheme, whole.head)
        return replace(made, max_positions=whole.max_positions, machine=self.machine)
