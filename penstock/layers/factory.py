"""LayerFactory: makes the layers of a model, by name.

A model file asks for `make.linear("o_proj")` and gets whatever that parameter is on this device: its shape, bias and
reduction stand in the family's parameter table. The factory is the only thing that will know the mesh and
quantisation, and it is an argument, so two models never share one by accident.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import ModelLoadError
from penstock.kernels.ops import Ops
from penstock.layers.embedding import Embedding
from penstock.layers.linear import GatedLinear, Linear
from penstock.layers.lm_head import LMHead
from penstock.layers.norm import RMSNorm
from penstock.layers.rotary import Rotary
from penstock.model_config import ModelConfig
from penstock.models.param_table import Parameter


@dataclass(frozen=True, slots=True)
class LayerFactory:
    """Makes layers whose names begin with `prefix`.

    Attributes:
        parameters: every parameter of the model by full name, from ParamTable.parameters.
        max_positions: rotary tables end here; None takes the model's max_position_embeddings.
    """

    ops: Ops
    parameters: Mapping[str, Parameter]
    prefix: str = ""
    max_positions: int | None = None

    @classmethod
    def single_device(
        cls, ops: Ops, parameters: Mapping[str, Parameter], *, max_positions: int | None = None
    ) -> "LayerFactory":
        """Everything whole, on the backend's one device."""
        return cls(ops, parameters, max_positions=max_positions)

    def at(self, name: str) -> "LayerFactory":
        """The factory for the submodule of that name."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def linear(self, name: str) -> Linear:
        weight = self._find(name)
        return Linear(self.ops, weight.shape, bias=self._has_bias(name), leaves=weight.leaves)

    def gated_linear(self, name: str, activation: str) -> GatedLinear:
        weight = self._find(name)
        bias = self._has_bias(name)
        return GatedLinear(self.ops, weight.shape, bias=bias, leaves=weight.leaves, activation=activation)

    def lm_head(self, name: str) -> LMHead:
        weight = self._find(name)
        return LMHead(self.ops, weight.shape, bias=self._has_bias(name), leaves=weight.leaves)

    def rms_norm(self, name: str, cfg: ModelConfig) -> RMSNorm:
        return RMSNorm(self.ops, self._find(name).shape, cfg.rms_norm_eps)

    def embedding(self, name: str) -> Embedding:
        return Embedding(self.ops, self._find(name).shape)

    def rotary(self, cfg: ModelConfig) -> Rotary:
        """The table of cosines and sines; made once, for all layers."""
        return Rotary(cfg.rope, cfg.head_dim, self.max_positions or cfg.max_position_embeddings, self.ops.device)

    def _find(self, name: str) -> Parameter:
        full = f"{self.prefix}{name}.weight"
        if full not in self.parameters:
            raise ModelLoadError(f"the model asks for {full}, which its parameter table does not have")
        return self.parameters[full]

    def _has_bias(self, name: str) -> bool:
        return f"{self.prefix}{name}.bias" in self.parameters
