"""Products with a weight: plain, with an activation in the same call, and gated."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.arena import Buffer
from penstock.kernels.ops import Ops, PackedLinear, RowSource
from penstock.layers.weights import WeightLayer, whole
from penstock.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A product's weight on this device.

    Attributes:
        shape: [N, K].
        bias: whether the product has a bias [N].
        leaf_ends: ends of the pieces of K that are summed apart; empty: K is one piece.
        scheme: how the weight is quantised; None keeps the model's type.
    """

    shape: tuple[int, ...]
    bias: bool = False
    leaf_ends: tuple[int, ...] = ()
    scheme: Scheme | None = None


class Linear(WeightLayer):
    """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. The weight is packed by the backend when it is loaded."""

    gated = False
    packed: PackedLinear

    def __init__(self, ops: Ops, spec: LinearSpec, out: Buffer) -> None:
        super().__init__()
        self.ops = ops
        self.spec = spec
        self.out = out
        self.declare("weight", spec.shape, ops.dtype)
        if spec.bias:
            self.declare("bias", spec.shape[:1], ops.dtype)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        spec, bias = self.spec, whole(values["bias"]) if self.spec.bias else None
        self.packed = self.ops.pack_linear(
            values["weight"], bias, leaf_ends=spec.leaf_ends, scheme=spec.scheme, gated=self.gated
        )

    def state(self) -> dict[str, Tensor]:
        return self.packed.state()

    def forget(self) -> None:
        del self.packed

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """As WeightLayer.

        Raises:
            NotSupportedError, ValueError: as Ops.restore_linear.
        """
        spec, (n, k) = self.spec, self.spec.shape
        self.packed = self.ops.restore_linear(
            (n, k), state, leaf_ends=spec.leaf_ends, scheme=spec.scheme, gated=self.gated
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.packed, out=self.out(x.shape[0]))


class ActivatedLinear(Linear):
    """x [M, K] dtype -> activation(x @ weight.T + bias) [M, N] dtype."""

    def __init__(self, ops: Ops, spec: LinearSpec, out: Buffer, activation: str) -> None:
        super().__init__(ops, spec, out)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.activated_linear(x, self.packed, self.activation, out=self.out(x.shape[0]))


class GatedLinear(ActivatedLinear):
    """x [M, K] dtype -> activation(x @ gate.T) * (x @ up.T) [M, N] dtype; the weight holds gate's rows, then up's."""

    gated = True

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gated_linear(x, self.packed, self.activation, out=self.out(x.shape[0]))
