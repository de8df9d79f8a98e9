"""The experts of a layer as the native functions read them: arrays of weights, one after the other."""

import ctypes
from collections.abc import Sequence

from penstock.kernels.cpu.library import PenstockWeight
from penstock.kernels.cpu.packed import CpuLinear, own_linear
from penstock.kernels.ops import PackedLinear


class NativeExperts:
    """Copies of the weights' structures, and the weights, whose memory they point to.

    Attributes:
        count: of experts.
        depth, outputs: columns of a row before and after.
        gate_up, down: addresses of the arrays [count].
    """

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        """Check and take them.

        Raises:
            ValueError: not as many of one kind as of the other, or not all of one shape.
            TypeError: a weight of another backend.
        """
        gates, downs = (
            [own_linear(item, gated=True) for item in gate_up],
            [own_linear(item, gated=False) for item in down],
        )
        _check_shapes(gates, downs)
        self.count, self.depth, self.outputs = len(gates), gates[0].depth, downs[0].outputs
        self._weights = gates, downs
        self._arrays = _array(gates), _array(downs)
        self.gate_up, self.down = (ctypes.addressof(array) for array in self._arrays)


def _check_shapes(gate_up: list[CpuLinear], down: list[CpuLinear]) -> None:
    shapes = {(gate.shape, plain.shape) for gate, plain in zip(gate_up, down, strict=True)}
    if len(shapes) != 1 or gate_up[0].outputs != down[0].depth or gate_up[0].depth != down[0].outputs:
        raise ValueError(f"experts: weights of these shapes do not follow each other: {sorted(shapes)}")


def _array(weights: list[CpuLinear]) -> "ctypes.Array[PenstockWeight]":
    return (PenstockWeight * len(weights))(*(item.weight for item in weights))
