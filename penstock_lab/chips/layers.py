"""Layers whose weights lie on chips: each chip runs an ordinary layer on its part, and the parts are joined.

Model files do not know of this: PlacedFactory makes these layers, and the parameter table says how a weight is split.
Every chip of an operation would compute the same element-wise results (norms, rotation, sums), so they are computed
once; if a placement gives them chips of their own, these take an even share of the columns each. The embedding, the
final norm, and a head that the placement leaves out are computed by the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np

from penstock.kernels.ops import Ops, Packing, RowSource, TensorRows
from penstock.kernels.tensors import FLOAT32, Array, Slot, Tensor, as_array, tree_sum
from penstock.layers.factory import LayerFactory
from penstock.layers.weights import ActivatedLinear, GatedLinear, LayerNorm, Linear, LinearSpec, LMHead, RMSNorm, whole
from penstock.weights.loader import Place
from penstock_lab.chips.machine import Machine, Site, Work
from penstock_lab.chips.ops import NORMS, ElementsOnChips, PlacedOps
from penstock_lab.chips.parts import Part, parts_of
from penstock_lab.planner.placement import ATTEND, LAYER, WEIGHT_BYTES, operation_of

MakePart = Callable[[LinearSpec, Slot], Linear]
BEFORE = {"o_proj": f"attention.{ATTEND}", "down_proj": "mlp.activation"}  # what computes the operand of a sum


class PlacedLinear(Linear):
    """x [M, K] -> the result of `like`, of which each chip computes some columns.

    Attributes:
        after: where the activation is computed, if it has chips of its own.
    """

    after: ElementsOnChips | None = None

    def __init__(
        self, like: Linear, site: Site, parts: Sequence[tuple[Part, Linear]], name: str, before: Site | None = None
    ) -> None:
        """before: the site that computes the operand."""
        super().__init__(like.ops, like.spec, like.out)
        self.name = name
        self._site, self._before = site, before
        self._parts = parts
        self._works: dict[int, list[Work]] = {}  # by the number of tokens
        site.reserve(self._works_of(site.machine.placement.rows))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        own = {name: whole(value) for name, value in values.items()}
        for part, layer in self._parts:
            layer.load({name: TensorRows(part.of(own[name])) for name in layer.shapes})

    def forward(self, x: Tensor) -> Tensor:
        self._run(x)
        if self.after is not None:
            self.after.report(x.shape[0], self.spec.shape[0])
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
        if self._before is None or self._before.chips != self._site.chips:
            return operand
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
        if name.rpartition(".")[2].isdecimal() and (own := made._own("attention.add")) is not None:
            added = ElementsOnChips(self.ops, own, "add", own.machine.model.hidden_size, ("add",))
            return replace(made, ops=cast(Ops, added))
        site = made._site_of(f"attention.{ATTEND}")
        if site is None or self.machine is None or f"{made.prefix}qkv_proj.weight" not in self.parameters:
            return made
        before = made._site_of("attention.rotary"), made._site("qkv_proj")
        has_operands = all(other is not None and other.chips == site.chips for other in before)
        placed: Any = cast(PlacedOps, self.ops).on(site, self.machine.heads_of(site), has_operands)
        if (own := made._own("attention.rotary")) is not None:
            columns = self.parameters[f"{made.prefix}qkv_proj.weight"].shape[0]
            placed = ElementsOnChips(placed, own, "rotary", columns, ("rotary_qkv",))
        return replace(made, ops=placed)

    def rms_norm(self, name: str, eps: float, *, unit_offset: bool = False, factor: float = 1.0) -> RMSNorm:
        made = self._norming(name)
        return LayerFactory.rms_norm(made, name, eps, unit_offset=unit_offset, factor=factor)

    def branch_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        return LayerFactory.branch_norm(self._norming(name), name, eps, unit_offset=unit_offset)

    def layer_norm(self, name: str, eps: float, *, unit_offset: bool = False, dtype: str | None = None) -> LayerNorm:
        return LayerFactory.layer_norm(self._norming(name), name, eps, unit_offset=unit_offset, dtype=dtype)

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

    def _site_of(self, operation: str) -> Site | None:
        """Find the site of an operation without weights, as "mlp.activation", of the layer that is being made."""
        layer = LAYER.search(self.prefix)
        if self.machine is None or layer is None:
            return None
        return self.machine.site_of(f"layers.{layer[1]}.{operation}")

    def _own(self, operation: str) -> Site | None:
        """Find the site of an operation of this layer, if it has chips of its own."""
        site = self._site_of(operation)
        return None if site is None or site.operation.name == site.branch else site

    def _norming(self, name: str) -> Self:
        """If a norm has chips of its own, make a factory whose operations report it to them."""
        full = f"{self.prefix}{name}.weight"
        own = self._own((operation_of(full) or "").removeprefix("layers.").partition(".")[2])
        if own is None:
            return self
        return replace(self, ops=cast(Ops, ElementsOnChips(self.ops, own, name, self.parameters[full].shape[0], NORMS)))

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
        if parts[0][0].ends:
            return PlacedSum(like, site, parts, name, self._site_of(BEFORE.get(name, "")))
        made, own = PlacedLinear(like, site, parts, name), self._own("mlp.activation")
        if own is not None and isinstance(like, ActivatedLinear | GatedLinear):
            made.after = ElementsOnChips(self.ops, own, "activation", like.spec.shape[0], ())
        return made


@dataclass(frozen=True, slots=True)
class ChipsPlace(Place):
    """A place on the chips of a machine."""

    machine: Machine | None = None

    def factory(self, whole: LayerFactory) -> LayerFactory:
        made = PlacedFactory(whole.ops, whole.parameters, whole.arena, whole.scheme, whole.head)
        return replace(made, max_positions=whole.max_positions, machine=self.machine)
