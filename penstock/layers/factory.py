"""LayerFactory: makes the layers of a model, by name.

A model file calls `make.linear("o_proj")` and gets a layer with the shape, bias, reduction and quantisation that the
family's parameter table states, and a buffer for its results. Only the factory handles quantisation and the split of a
model over ranks. It is passed as an argument, so that two models cannot share a factory by accident.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from penstock.errors import ModelLoadError
from penstock.kernels.arena import Arena, Slot
from penstock.kernels.metadata import Heads
from penstock.kernels.ops import Ops, Packing
from penstock.kernels.scheme import Scheme, scheme_of
from penstock.kernels.tensors import Array, array_type
from penstock.layers.lm_head import PLAIN_HEAD, HeadLayout, LMHead
from penstock.layers.rotary import Rotary
from penstock.layers.split import (
    ColumnsEmbedding,
    Split,
    SplitEmbedding,
    SplitHead,
    SplitMixture,
    SummedLinear,
)
from penstock.layers.weights import ActivatedLinear, Embedding, GatedLinear, LayerNorm, Linear, LinearSpec, RMSNorm
from penstock.layers.wires import WiredActivatedLinear, WiredGatedLinear, WiredLinear, Wires
from penstock.spec.cuts import DIRECT, Cut
from penstock.spec.model_config import ModelConfig, RopeConfig
from penstock.spec.param_table import Parameter

Made = TypeVar("Made", bound=Linear)


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """Makes layers whose names begin with `prefix`.

    Attributes:
        parameters: every parameter of the model by full name, from ParamTable.parameters; with `split`, the rank's own.
        arena: buffers for the layers' results. Layers whose names differ only in a number share a slot.
        scheme: how quantisable weights are quantised; None keeps the model's type.
        head: how the columns of the LM head are arranged.
        max_positions: length of rotary tables; None: the model's context.
        split: which part of the model this rank has; None: all of it.
    """

    ops: Ops
    parameters: Mapping[str, Parameter]
    arena: Arena
    scheme: Scheme | None = None
    head: HeadLayout = PLAIN_HEAD
    prefix: str = ""
    max_positions: int | None = None
    split: Split | None = None

    @classmethod
    def single_device(
        cls,
        ops: Ops,
        parameters: Mapping[str, Parameter],
        *,
        scheme: Scheme | None = None,
        max_positions: int | None = None,
        head: HeadLayout = PLAIN_HEAD,
        split: Split | None = None,
    ) -> "LayerFactory":
        """Make a factory for the backend's one device, with a new arena."""
        return cls(ops, parameters, Arena(ops.empty), scheme, head, max_positions=max_positions, split=split)

    def at(self, name: str) -> "LayerFactory":
        """Return the factory of a submodule."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(self, name: str) -> Linear:
        """Make a plain product."""
        spec = self._linear_spec(name)
        out = self.slot(name, spec.shape[:1], "float32")
        cut = self._cut(name)
        if self.split is None or cut is None or not cut.is_summed:
            return self._wired(name, Linear, WiredLinear)(self.ops, spec, out)
        part = self.slot(f"{name}.part", spec.shape[:1], "float32")
        return SummedLinear(self.ops, spec, out, part, self.split, cut)

    def activated_linear(self, name: str, activation: str) -> Linear:
        """Make a product with an activation in the same call."""
        spec = self._linear_spec(name)
        out = self.slot(name, spec.shape[:1])
        return self._wired(name, ActivatedLinear, WiredActivatedLinear)(self.ops, spec, out, activation)

    def gated_linear(self, name: str, activation: str) -> Linear:
        """Make a gated product; its weight holds gate's rows, then up's."""
        spec = self._linear_spec(name, gated=True)
        out = self.slot(name, (spec.shape[0] // 2,))
        return self._wired(name, GatedLinear, WiredGatedLinear)(self.ops, spec, out, activation)

    def lm_head(self, name: str, *, softcap: float | None = None) -> LMHead:
        """Make the LM head. Its buffer has columns for the padding, too."""
        spec = self._linear_spec(name)
        out = self.slot(name, (self.head.width(spec.shape[0]),), "float32")
        cut = self._cut(name)
        if self.split is None or cut is None or not cut.ranges:
            return LMHead(self.ops, spec, out, softcap=softcap, layout=self.head)
        every = self.slot(f"{name}.all", cut.whole.shape[:1], "float32")
        return SplitHead(self.ops, spec, (out, every), self.split, cut.borders(), softcap=softcap)

    def rms_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """Make a norm whose result is the operand of a product."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape), unit_offset=unit_offset)

    def branch_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """Make a norm whose float32 result is added to the residual stream."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape, "float32"), unit_offset=unit_offset)

    def layer_norm(self, name: str, eps: float) -> LayerNorm:
        """Make a layer norm, with a bias if the table has one."""
        shape, bias = self._find(name).shape, f"{self.prefix}{name}.bias" in self.parameters
        return LayerNorm(self.ops, shape, eps, self.slot(name, shape), bias=bias)

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        """Make an embedding whose rows are multiplied by `scale`."""
        shape = self._find(name).shape
        out, cut = self.slot(name, shape[1:], "float32"), self._cut(name)
        if self.split is None or cut is None or not cut.ranges:
            return Embedding(self.ops, shape, out, scale)
        kind = SplitEmbedding if cut.axis == 0 else ColumnsEmbedding
        return kind(self.ops, shape, out, scale, self.split, cut)

    def heads(self, cfg: ModelConfig) -> Heads:
        """Return the heads that this rank has."""
        own = cfg if self.split is None else self.split.share.config(cfg)
        return Heads(own.num_attention_heads, own.num_key_value_heads, own.head_dim)

    def own_heads(self, values: Array, cfg: ModelConfig) -> Array:
        """Return the entries for this rank's query heads from values [H] of all heads."""
        if self.split is None:
            return values
        first, last = self.split.share.attention.bounds(cfg.num_key_value_heads)
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        return values[first * group : last * group]

    def num_experts(self, cfg: ModelConfig) -> int:
        """Return how many experts of each layer this rank has."""
        if self.split is None:
            return cfg.num_experts
        first, last = self.split.share.experts.even_bounds(cfg.num_experts)
        return last - first

    def mixture(self, cfg: ModelConfig, down: Sequence[Linear]) -> SplitMixture | None:
        """Return what applies experts that are split over ranks; None if they are not. down: the last product of each
        of this rank's experts."""
        if self.split is None or self.split.share.degrees.mixture == 1:
            return None
        return SplitMixture(self.ops, self.split, cfg.num_experts, down)

    def rotary(self, rope: RopeConfig, cfg: ModelConfig) -> Rotary:
        """Compute a table of cosines and sines, once for all layers that share it."""
        return Rotary(rope, cfg.head_dim, self.max_positions or cfg.context, self.ops)

    def slot(self, name: str, columns: tuple[int, ...], dtype: str | None = None) -> Slot:
        """Return the buffer for results of a name. dtype: the name of their type; None: the model's type."""
        shared = re.sub(r"\.\d+\.", ".*.", self.prefix + name)
        return self.arena.slot(shared, columns, dtype or str(array_type(self.ops.dtype)))

    def _linear_spec(self, name: str, *, gated: bool = False) -> LinearSpec:
        weight = self._find(name)
        packing = Packing(weight.leaf_ends, scheme_of(weight.quant, self.scheme), gated)
        return LinearSpec(weight.shape, f"{self.prefix}{name}.bias" in self.parameters, packing)

    def _wired(self, name: str, plain: Callable[..., Made], wired: Callable[..., Made]) -> Callable[..., Made]:
        """Return what makes a product: `wired` if its columns are not those that come in or go out, else `plain`."""
        cut = self._cut(name)
        if self.split is None or cut is None or cut.wiring == DIRECT:
            return plain
        return partial(wired, wires=Wires(cut.wiring, self.split.ranks))

    def _cut(self, name: str) -> Cut | None:
        return None if self.split is None else self.split.cuts[f"{self.prefix}{name}.weight"]

    def _find(self, name: str) -> Parameter:
        full = f"{self.prefix}{name}.weight"
        if full not in self.parameters:
            raise ModelLoadError(f"the model uses {full}, which is not in its parameter table")
        return self.parameters[full]
