"""LayerFactory: makes the layers of a model, by name.

A model file asks for `make.linear("o_proj")` and gets whatever that parameter is on this device: its shape, bias,
reduction and quantisation, as the family's parameter table has them, and the buffer for its results. The factory is
the only thing that knows quantisation, and will be for the mesh; it is an argument, so two models never share one by
accident.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from penstock.errors import ModelLoadError
from penstock.kernels.arena import Arena, Slot
from penstock.kernels.ops import Ops
from penstock.layers.embedding import Embedding
from penstock.layers.linear import ActivatedLinear, GatedLinear, Linear, LinearSpec
from penstock.layers.lm_head import PLAIN_HEAD, HeadLayout, LMHead
from penstock.layers.norm import LayerNorm, RMSNorm
from penstock.layers.rotary import Rotary
from penstock.quant.scheme import Scheme, scheme_of
from penstock.spec.model_config import ModelConfig
from penstock.spec.param_table import Parameter
from penstock.spec.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """Makes layers whose names begin with `prefix`.

    Attributes:
        parameters: every parameter of the model by full name, from ParamTable.parameters.
        arena: where layers write their results. Layers that differ in their number only share a slot.
        scheme: how weights are quantised that may be; None keeps the model's type.
        head: how the columns of the LM head are arranged.
        max_positions: rotary tables end here; None takes the model's context.
    """

    ops: Ops
    parameters: Mapping[str, Parameter]
    arena: Arena
    scheme: Scheme | None = None
    head: HeadLayout = PLAIN_HEAD
    prefix: str = ""
    max_positions: int | None = None

    @classmethod
    def single_device(
        cls,
        ops: Ops,
        parameters: Mapping[str, Parameter],
        *,
        scheme: Scheme | None = None,
        max_positions: int | None = None,
        head: HeadLayout = PLAIN_HEAD,
    ) -> "LayerFactory":
        """Everything on the backend's one device."""
        return cls(ops, parameters, Arena(ops.device), scheme, head, max_positions=max_positions)

    def at(self, name: str) -> "LayerFactory":
        """The factory for the submodule of that name."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(self, name: str) -> Linear:
        spec = self._linear_spec(name)
        return Linear(self.ops, spec, self.slot(name, spec.shape[:1], torch.float32))

    def activated_linear(self, name: str, activation: str) -> ActivatedLinear:
        spec = self._linear_spec(name)
        return ActivatedLinear(self.ops, spec, self.slot(name, spec.shape[:1]), activation)

    def gated_linear(self, name: str, activation: str) -> GatedLinear:
        spec = self._linear_spec(name)
        return GatedLinear(self.ops, spec, self.slot(name, (spec.shape[0] // 2,)), activation)

    def lm_head(self, name: str, *, softcap: float | None = None) -> LMHead:
        """Padding counts as columns of its result."""
        spec = self._linear_spec(name)
        out = self.slot(name, (self.head.width(spec.shape[0]),), torch.float32)
        return LMHead(self.ops, spec, out, softcap=softcap, layout=self.head)

    def rms_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """For what a product reads."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape), unit_offset=unit_offset)

    def branch_norm(self, name: str, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """For what is added to the residual stream: it delivers float32."""
        shape = self._find(name).shape
        return RMSNorm(self.ops, shape, eps, self.slot(name, shape, torch.float32), unit_offset=unit_offset)

    def layer_norm(self, name: str, eps: float) -> LayerNorm:
        """With a bias where the table has one."""
        shape, bias = self._find(name).shape, f"{self.prefix}{name}.bias" in self.parameters
        return LayerNorm(self.ops, shape, eps, self.slot(name, shape), bias=bias)

    def embedding(self, name: str, *, scale: float = 1.0) -> Embedding:
        shape = self._find(name).shape
        return Embedding(self.ops, shape, self.slot(name, shape[1:], torch.float32), scale)

    def rotary(self, rope: RopeConfig, cfg: ModelConfig) -> Rotary:
        """The table of cosines and sines; made once, for all layers that share it."""
        return Rotary(rope, cfg.head_dim, self.max_positions or cfg.context, self.ops.device)

    def slot(self, name: str, columns: tuple[int, ...], dtype: torch.dtype | None = None) -> Slot:
        """The buffer for results of that name, in the model's type unless another is said."""
        shared = re.sub(r"\.\d+\.", ".*.", self.prefix + name)
        return self.arena.slot(shared, columns, dtype or self.ops.dtype)

    def _linear_spec(self, name: str) -> LinearSpec:
        weight = self._find(name)
        bias = f"{self.prefix}{name}.bias" in self.parameters
        return LinearSpec(weight.shape, bias, weight.leaf_ends, scheme_of(weight.quant, self.scheme))

    def _find(self, name: str) -> Parameter:
        full = f"{self.prefix}{name}.weight"
        if full not in self.parameters:
            raise ModelLoadError(f"the model asks for {full}, which its parameter table does not have")
        return self.parameters[full]
