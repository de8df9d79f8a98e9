"""RMS norm, alone or together with the addition that comes before it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops, RowSource
from penstock.layers.weights import WeightLayer, whole


class RMSNorm(WeightLayer):
    """x / sqrt(mean(x^2) + eps) * weight: [T, hidden] float32 -> dtype."""

    weight: nn.Parameter

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Buffer) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.out = out
        self.declare("weight", shape, torch.float32)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """The weight is rounded to the model's type, as Transformers does, and kept in float32."""
        weight = whole(values["weight"]).to(self.ops.device, self.ops.dtype).float()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, out=self.out(x.shape[0]))

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream x plus the branch h (None: no branch yet), and the norm of the sum. Writes into x."""
        if h is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, h, self.weight, self.eps, out=self.out(x.shape[0]))
