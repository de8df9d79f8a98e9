"""Token embedding: rows of a table, the first values of the residual stream."""

from collections.abc import Mapping

from torch import Tensor, nn

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops, RowSource
from penstock.layers.weights import WeightLayer, whole


class Embedding(WeightLayer):
    """ids [T] int64 -> scale * weight[ids], [T, hidden] float32. Also for learned positions."""

    weight: nn.Parameter

    def __init__(self, ops: Ops, shape: tuple[int, ...], out: Buffer, scale: float = 1.0) -> None:
        super().__init__()
        self.ops = ops
        self.scale = scale
        self.out = out
        self.declare("weight", shape, ops.dtype)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        weight = whole(values["weight"]).to(self.ops.device, self.ops.dtype).contiguous()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight, scale=self.scale, out=self.out(ids.shape[0]))
