"""The layers that own parameters: products, norms and token embedding.

Parameters exist so that a model's state_dict has the names of its parameter table; they are on the meta device until
weights are loaded. A layer need not keep the values: a product passes them to the backend, which packs them. Every
layer writes its result to the buffer `out` (kernels/arena.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels.arena import Slot
from penstock.kernels.ops import PLAIN, Ops, PackedLinear, Packing, RowSource


class WeightLayer(nn.Module):
    """Base of all layers with parameters."""

    def __init__(self, ops: Ops, out: Slot) -> None:
        super().__init__()
        self.ops = ops
        self.out = out

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Register a parameter of this name, without memory."""
        self._set(name, torch.empty(shape, dtype=dtype, device="meta"))

    def _set(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Load the values of all declared parameters, by name, of any float type. Call it once, before any forward."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return what `load` made of the values: all tensors that computing needs, by name."""
        return {name: value.data for name, value in self.named_parameters(recurse=False)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` of the same layer returned, instead of calling `load`, and keep these tensors.

        Raises:
            ValueError: the state is another layer's.
            NotSupportedError: the backend has no packed form of weights.
        """
        declared = {name: tuple(value.shape) for name, value in self.named_parameters(recurse=False)}
        if declared != {name: tuple(value.shape) for name, value in state.items()}:
            raise ValueError(f"its parameters are {declared}")
        for name, value in state.items():
            self._set(name, value)

    def forget(self) -> None:
        """Free what `load` made."""
        for name, value in self.named_parameters(recurse=False):
            self._set(name, value.to("meta"))


def whole(value: Tensor | RowSource) -> Tensor:
    """Return a parameter's value as one tensor."""
    return value if isinstance(value, Tensor) else value.read(0, value.shape[0])


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A product's weight on this device.

    Attributes:
        shape: [N, K].
        bias: whether the product has a bias [N].
    """

    shape: tuple[int, ...]
    bias: bool = False
    packing: Packing = PLAIN


class Linear(WeightLayer):
    """x [M, K] dtype -> x @ weight.T + bias [M, N] float32. The weight is packed by the backend when it is loaded."""

    packed: PackedLinear

    def __init__(self, ops: Ops, spec: LinearSpec, out: Slot) -> None:
        super().__init__(ops, out)
        self.spec = spec
        self.declare("weight", spec.shape, ops.dtype)
        if spec.bias:
            self.declare("bias", spec.shape[:1], ops.dtype)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        bias = whole(values["bias"]) if self.spec.bias else None
        self.packed = self.ops.pack_linear(values["weight"], bias, self.spec.packing)

    def state(self) -> dict[str, Tensor]:
        return self.packed.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.restore_linear(self.spec.shape, state, self.spec.packing)

    def forget(self) -> None:
        del self.packed

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.packed, out=self.out(x.shape[0]))


class ActivatedLinear(Linear):
    """x [M, K] dtype -> activation(x @ weight.T + bias) [M, N] dtype."""

    def __init__(self, ops: Ops, spec: LinearSpec, out: Slot, activation: str) -> None:
        super().__init__(ops, spec, out)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.activated_linear(x, self.packed, self.activation, out=self.out(x.shape[0]))


class GatedLinear(ActivatedLinear):
    """x [M, K] dtype -> activation(x @ gate.T) * (x @ up.T) [M, N] dtype; the weight holds gate's rows, then up's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.gated_linear(x, self.packed, self.activation, out=self.out(x.shape[0]))


class Norm(WeightLayer):
    """Base of the norms: alone, or together with the addition that comes before them."""

    weight: nn.Parameter

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Slot) -> None:
        super().__init__(ops, out)
        self.eps = eps
        self.declare("weight", shape, torch.float32)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        """Round values to the model's type, as Transformers does, and keep them in float32."""
        for name, value in values.items():
            self._set(name, whole(value).to(self.ops.device, self.ops.dtype).float())


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight: [T, hidden] float32 -> dtype, or float32 for a branch (`out` decides)."""

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Slot, *, unit_offset: bool = False) -> None:
        """unit_offset: the stored weight is the difference from 1."""
        super().__init__(ops, shape, eps, out)
        self.unit_offset = unit_offset

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        super().load(values)
        if self.unit_offset:
            self._set("weight", self.weight + 1.0)

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

    def __init__(self, ops: Ops, shape: tuple[int, ...], eps: float, out: Slot, *, bias: bool) -> None:
        super().__init__(ops, shape, eps, out)
        if bias:
            self.declare("bias", shape, torch.float32)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))

    def add(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add h to x and norm the sum, as RMSNorm.add does."""
        if h is None:
            return x, self(x)
        return self.ops.add_layer_norm(x, h, self.weight, self.bias, self.eps, out=self.out(x.shape[0]))


class Embedding(WeightLayer):
    """ids [T] int64 -> scale * weight[ids], [T, hidden] float32. Also for learned positions.

    It reads rows from a table of its own, or from the packed weight of a tied LM head.
    """

    weight: nn.Parameter
    _shared: PackedLinear | None = None

    def __init__(self, ops: Ops, shape: tuple[int, ...], out: Slot, scale: float = 1.0) -> None:
        super().__init__(ops, out)
        self.scale = scale
        self.declare("weight", shape, ops.dtype)

    def load(self, values: Mapping[str, Tensor | RowSource]) -> None:
        self._set("weight", whole(values["weight"]).to(self.ops.device, self.ops.dtype).contiguous())

    def share(self, head: PackedLinear) -> None:
        """Read rows from the packed weight of the head, which has the same values, and keep no table."""
        self.forget()
        self._shared = head

    def state(self) -> dict[str, Tensor]:
        return {} if self._shared is not None else super().state()

    def forward(self, ids: Tensor) -> Tensor:
        if self._shared is not None:
            return self.ops.packed_embedding(ids, self._shared, scale=self.scale, out=self.out(ids.shape[0]))
        return self.ops.embedding(ids, self.weight, scale=self.scale, out=self.out(ids.shape[0]))
