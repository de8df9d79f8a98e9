"""RMS norm and layer norm, alone or together with the addition that comes before them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops, RowSource
from penstock.layers.weights import WeightLayer, whole


class Norm(WeightLayer):
    """Base of the norms. `out` is the buffer of the result, which the subclass describes."""

    weight: nn.Parameter

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.out = out
        self.declare("weight", shape, torch.float32)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Round values to the model's type, as Transformers does, and keep them in float32."""
        for name, value in values.items():
            rounded = whole(value).to(self.ops.device, self.ops.dtype).float()
            self.register_parameter(name, nn.Parameter(rounded, requires_grad=False))


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight: [T, hidden] float32 -> dtype, or float32 for a branch (`out` decides)."""

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer, *, unit_offset: bool = False) -> None:
        """unit_offset: the stored weight is the difference from 1."""
        super().__init__(ops, shape, eps, out)
        self.unit_offset = unit_offset

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        super().load(values)
        if self.unit_offset:
            self.weight = nn.Parameter(self.weight + 1.0, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(x.shape[0])
        return self.ops.rms_norm(x, self.weight, self.eps, dtype=self.out.dtype, out=out)

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the branch h to the residual stream x **in place** (None: no branch yet), and return x and its norm."""
        if h is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, h, self.weight, self.eps, out=self.out(x.shape[0]))


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias: [T, hidden] float32 -> dtype."""

    bias: nn.Parameter | None

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer, *, bias: bool) -> None:
        super().__init__(ops, shape, eps, out)
        if bias:
            self.declare("bias", shape, torch.float32)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """As RMSNorm.add."""
        if h is None:
            return x, self(x)
        return self.ops.add_layer_norm(x, h, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))
