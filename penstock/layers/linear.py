"""Products with a weight: the plain one, and the gated one whose activation is part of the same call."""

from collections.abc import Mapping

from torch import Tensor

from penstock.kernels.ops import Ops, PackedLinear
from penstock.layers.weights import WeightLayer


class Linear(WeightLayer):
    """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. The weight is packed by the backend when it is loaded."""

    packed: PackedLinear

    def __init__(self, ops: Ops, shape: tuple[int, ...], *, bias: bool, leaves: int) -> None:
        super().__init__()
        self.ops = ops
        self.leaves = leaves
        self.declare("weight", shape, ops.dtype)
        if bias:
            self.declare("bias", shape[:1], ops.dtype)

    def load(self, values: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.pack_linear(values["weight"], values.get("bias"), leaves=self.leaves)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.packed)


class GatedLinear(Linear):
    """x [M, K] dtype -> activation(x @ gate.T) * (x @ up.T) [M, N] dtype; the weight holds gate's rows, then up's."""

    def __init__(self, ops: Ops, shape: tuple[int, ...], *, bias: bool, leaves: int, activation: str) -> None:
        super().__init__(ops, shape, bias=bias, leaves=leaves)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gated_linear(x, self.packed, self.activation)
