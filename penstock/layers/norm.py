"""RMS norm and layer norm, alone or together with the addition that comes before them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops, RowSource
from penstock.layers.weights import WeightLayer, whole


class RMSNorm(WeightLayer):
    """x / sqrt(mean(x^2) + eps) * weight: [T, hidden] float32 -> dtype, or float32 for a branch (`out` decides)."""

    weight: nn.Parameter

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer, *, unit_offset: bool = False) -> None:
        """unit_offset: the weight that is stored is the distance from 1."""
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.out = out
        self.unit_offset = unit_offset
        self.declare("weight", shape, torch.float32)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """The weight is rounded to the model's type, as Transformers does, and kept in float32."""
        weight = whole(values["weight"]).to(self.ops.device, self.ops.dtype).float()
        self.weight = nn.Parameter(weight + 1.0 if self.unit_offset else weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x.shape[0])
        return self.ops.rms_norm(x, self.weight, self.eps, dtype=self.out.dtype, out=out)

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream x plus the branch h (None: no branch yet), and the norm of the sum. Writes into x."""
        if h is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, h, self.weight, self.eps, out=self.out(x.shape[0]))


class LayerNorm(WeightLayer):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias: [T, hidden] float32 -> dtype."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer, *, bias: bool) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.out = out
        self.declare("weight", shape, torch.float32)
        if bias:
            self.declare("bias", shape, torch.float32)
        else:
            self.register_parameter("bias", None)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Weight and bias are rounded to the model's type and kept in float32."""
        for name, value in values.items():
            rounded = whole(value).to(self.ops.device, self.ops.dtype).float()
            self.register_parameter(name, nn.Parameter(rounded, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """As RMSNorm.add."""
        if h is None:
            return x, self(x)
        return self.ops.add_layer_norm(x, h, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))
