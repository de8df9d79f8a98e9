"""LayerFactory: makes the layers of a model, by name.

A model file calls `make.linear("o_proj")` and gets a layer with the shape, bias, reduction and quantisation that the
family's parameter table states, and a buffer for its results. Only the factory handles quantisation; a subclass makes
the layers of a model that several processes share, or of one that computes elsewhere. It is passed as an argument, so
that two models cannot share a factory by accident.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from penstock.errors import ModelLoadError
from penstock.kernels.coding import Coding
from penstock.kernels.metadata import Heads
from penstock.kernels.ops import Ops, Packing
from penstock.kernels.scheme import Scheme, scheme_of
from penstock.kernels.tensors import Arena, Array, Slot, Tensor, array_type
from penstock.layers.lora import LoraSlots, LoraSpec, is_adaptable, piece_ends
from penstock.layers.rotary import Rotary
from penstock.layers.weights import (
    PLAIN_HEAD,
    ActivatedLinear,
    Embedding,
    GatedLinear,
    HeadLayout,
    HeadNorms,
    LayerNorm,
    Linear,
    LinearSpec,
    LMHead,
    RMSNorm,
    Vector,
    Xielu,
)
from penstock.spec.model_config import ModelConfig, QueryScale, RopeConfig
from penstock.spec.param_table import Parameter

# (rows, their coding; None: floats) of each piece of a weight
Runs = tuple[tuple[int, Coding | None], ...]

# as Ops.experts
Mixture = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """Makes layers whose names begin with `prefix`.

    Attributes:
        parameters: every parameter of the model by full name, from ParamTable.parameters.
        arena: buffers for the layers' results. Layers whose names differ only in a number share a slot.
        scheme: how quantisable weights are quantised; None keeps the model's type.
        head: how the columns of the LM head are arranged.
        max_positions: length of rotary tables; None: the model's context.
        slices: int8 rows that represent a row of activations for coded weights with integer levels.
        runs: how the checkpoint codes weights, by the parameter's full name; without those that it does not code.
        lora: the slots of LoRA adapters; None: the model has none.
    """

    ops: Ops
    parameters: Mapping[str, Parameter]
    arena: Arena
    scheme: Scheme | None = None
    head: HeadLayout = PLAIN_HEAD
    prefix: str = ""
    max_positions: int | None = None
    slices: int = 2
    runs: Mapping[str, Runs] = field(default_factory=dict)
    lora: LoraSlots | None = None

    @classmethod
    def single_device(
        cls,
        ops: Ops,
        parameters: Mapping[str, Parameter],
        *,
        scheme: Scheme | None = None,
        max_positions: int | None = None,
        head: HeadLayout = PLAIN_HEAD,
        slices: int = 2,
        lora: LoraSlots | None = None,
    ) -> Self:
        """Make a factory for the backend's one device, with a new arena."""
        arena = Arena(ops.empty, ops.fixed_rows)
        return cls(ops, parameters, arena, scheme, head, max_positions=max_positions, slices=slices, lora=lora)

    def at(self, name: str) -> Self:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(self, name: str, *, is_exact: bool = False) -> Linear:
        """Make a plain product. is_exact: its weight, which has no bias, is not rounded to the model's type."""
        spec = self._linear_spec(name)
        if is_exact:
            spec = replace(spec, rest=self.slot(f"{name}.rest", spec.shape[:1], "float32"))
        out = self.slot(name, spec.shape[:1], "float32")
        return Linear(self.ops, spec, out)

    def activated_linear(self, name: str, activation: str) -> Linear:
        """Make a product with an activation in the same call."""
        spec = self._with_sums(name, self._linear_spec(name))
        out = self.slot(name, spec.shape[:1])
        return ActivatedLinear(self.ops, spec, out, activation)

    def gated_linear(self, name: str, activation: str) -> Linear:
        """Make a gated product; its weight holds gate's rows, then up's."""
        spec = self._with_sums(name, self._linear_spec(name, gated=True, whole=True))
        out = self.slot(name, (spec.shape[0] // 2,))
        return GatedLinear(self.ops, spec, out, activation)

    def lm_head(self, name: str, *, scale: float = 1.0, softcap: float | None = None) -> LMHead:
        """Make the LM head. Its buffer has columns for the padding, too."""
        spec = self._linear_spec(name, whole=True)
        out = self.slot(name, (self.head.width(spec.shape[0]),), "float32")
        return LMHead(self.ops, spec, out, scale=scale, softcap=softcap, layout=self.head)

    def norm(self, name: str, cfg: ModelConfig) -> RMSNorm | LayerNorm:
        """Make a norm of the residual stream, of the config's kind, whose result is the operand of a product."""
        if cfg.norm == "layer":
            return self.layer_norm(name, cfg.norm_eps, unit_offset=cfg.norm_unit_offset)
        return self.rms_norm(name, cfg.norm_eps, unit_offset=cfg.norm_unit_offset)

    def rms_norm(self, name: str, eps: float, *, unit_offset: bool = False, factor: float = 1.0) -> RMSNorm:
        """Make a norm whose result is the operand of a product. factor: of its weight."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape), unit_offset=unit_offset, factor=factor)

    def branch_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """Make a norm whose float32 result is added to the residual stream."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape, "float32"), unit_offset=unit_offset)

    def vector(self, name: str, *, is_exact: bool = False) -> Vector:
        """Make a vector that an operation of another layer reads. is_exact: it is not rounded to the model's type."""
        return Vector(self.ops, self._find(name).shape, is_exact=is_exact)

    def layer_norm(self, name: str, eps: float, *, unit_offset: bool = False, dtype: str | None = None) -> LayerNorm:
        """Make a layer norm, with a bias if the table has one. dtype: "float32" if its result is not the operand of a
        product but the residual stream."""
        shape, bias = self._find(name).shape, f"{self.prefix}{name}.bias" in self.parameters
        return LayerNorm(self.ops, shape, eps, self.slot(name, shape, dtype), bias=bias, unit_offset=unit_offset)

    def head_norms(self, name: str, eps: float) -> HeadNorms:
        """Make a layer norm, with a weight of its own, for each head of q and k."""
        return HeadNorms(self.ops, self._find(name).shape, eps)

    def xielu(self, name: str) -> Xielu:
        """Make the activation xIELU, whose result is the operand of a product."""
        return Xielu(self.ops, self.slot(name, self.parameters[f"{self.prefix}up_proj.weight"].shape[:1]))

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        """Make an embedding whose rows are multiplied by `scale`."""
        shape, runs = self._find(name).shape, self.runs.get(f"{self.prefix}{name}.weight", ())
        packing = Packing(coding=runs[0][1], slices=self.slices) if len(runs) == 1 else None
        return Embedding(self.ops, shape, self.slot(name, shape[1:], "float32"), scale, packing)

    def heads(self, cfg: ModelConfig) -> Heads:
        """Describe the attention heads that are computed here."""
        return Heads(cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim)

    def own_heads(self, values: Array, cfg: ModelConfig) -> Array:
        """Select the entries for the query heads that are computed here, from values [H] of all heads."""
        return values

    def num_experts(self, cfg: ModelConfig) -> int:
        """Count the experts of each layer that are computed here."""
        return cfg.num_experts

    def mixture(self, cfg: ModelConfig, down: Sequence[Linear]) -> Mixture:
        """Choose what applies the chosen experts of each token, called as Ops.experts. down: the last product of each
        expert."""
        return self.ops.experts

    def torch_parameter(self, name: str) -> Parameter:
        """Find a parameter that torch's own layers hold, by its full name."""
        return self.parameters[name]

    def part_widths(self) -> set[int]:
        """Collect the widths of all parts of features that processes share; there are none on a single device."""
        return set()

    def rotary(self, rope: RopeConfig | None, cfg: ModelConfig, scale: QueryScale | None = None) -> Rotary:
        """Compute a table of cosines and sines, and of factors of the queries, once for all layers that share them."""
        return Rotary(rope, cfg.head_dim, self.max_positions or cfg.context, self.ops, scale)

    def slot(self, name: str, columns: tuple[int, ...], dtype: str | None = None) -> Slot:
        """Find the buffer for results of a name. dtype: the name of their type; None: the model's type."""
        shared = re.sub(r"\.\d+\.", ".*.", self.prefix + name)
        return self.arena.slot(shared, columns, dtype or str(array_type(self.ops.dtype)))

    def _linear_spec(self, name: str, *, gated: bool = False, whole: bool = False) -> LinearSpec:
        """Return what a product is made of. Weights that must not be quantised keep no codes.

        whole: the weight is packed in one piece, without its codes if its rows are coded differently.
        """
        spec = self._packed_spec(name, gated=gated, whole=whole)
        return spec if self.lora is None else replace(spec, lora=self._lora_spec(name, self.lora))

    def _with_sums(self, name: str, spec: LinearSpec) -> LinearSpec:
        """Give a product with an activation a buffer for its sums, if it has adapters."""
        if spec.lora is None:
            return spec
        return replace(spec, lora=replace(spec.lora, sums=self.slot(f"{name}.sums", spec.shape[:1], "float32")))

    def _lora_spec(self, name: str, slots: LoraSlots) -> LoraSpec | None:
        """Describe the adapters of a product; None if it can have none."""
        weight = self._find(name)
        if not is_adaptable(weight):
            return None
        ends = piece_ends(weight)
        hidden = self.slot(f"{name}.lora", (len(ends), slots.max_rank), "float32")
        return LoraSpec(slots, ends, self._ends(weight), hidden)

    def _packed_spec(self, name: str, *, gated: bool, whole: bool) -> LinearSpec:
        weight, bias = self._find(name), f"{self.prefix}{name}.bias" in self.parameters
        runs = self.runs.get(f"{self.prefix}{name}.weight", ()) if weight.quant else ()
        if not runs or (whole and len(runs) > 1):
            return LinearSpec(
                weight.shape, bias, Packing(self._ends(weight), scheme_of(weight.quant, self.scheme), gated)
            )
        packings = [Packing(self._ends(weight, item), gated=gated, coding=item, slices=self.slices) for _, item in runs]
        if len(runs) == 1:
            return LinearSpec(weight.shape, bias, packings[0])
        pieces = tuple((rows, packing) for (rows, _), packing in zip(runs, packings, strict=True))
        return LinearSpec(weight.shape, bias, Packing(self._ends(weight)), pieces)

    def _ends(self, weight: Parameter, coding: Coding | None = None) -> tuple[int, ...]:
        """Return where the leaves of a weight end: at the nearest ends of blocks, so that some may be empty."""
        if self.ops.leaves == 1:
            return ()
        block, k = (coding.block if coding is not None else None) or 1, weight.shape[-1]
        return tuple(k if end == k else min(k, (end + block // 2) // block * block) for end in weight.leaf_ends)

    def _find(self, name: str) -> Parameter:
        full = f"{self.prefix}{name}.weight"
        if full not in self.parameters:
            raise ModelLoadError(f"the model uses {full}, which is not in its parameter table")
        return self.parameters[full]
