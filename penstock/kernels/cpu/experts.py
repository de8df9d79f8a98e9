"""The experts of a layer as native functions read them: arrays of PenstockWeight."""

import ctypes
from collections.abc import Sequence

from penstock.kernels.cpu.library import PenstockWeight
from penstock.kernels.cpu.packed import CpuLinear, own_linear
from penstock.kernels.ops import PackedLinear


class NativeExperts:
    """Arrays of weights, which keep the weights and their memory alive.

    Attributes:
        count: number of experts.
        depth, outputs: columns of the input and of the output.
        gate_up, down: addresses of the arrays [count].
    """

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        """Check and copy the weights.

        Raises:
            ValueError: the numbers of weights differ, or not all experts have the same shapes.
            TypeError: a weight was packed by another backend.
        """
        gates = [own_linear(item, gated=True) for item in gate_up]
        downs = [own_linear(item, gated=False) for item in down]
        shapes = {(gate.shape, plain.shape) for gate, plain in zip(gates, downs, strict=True)}
        if len(shapes) != 1 or gates[0].outputs != downs[0].depth or gates[0].depth != downs[0].outputs:
            raise ValueError(f"experts: weights of these shapes do not follow each other: {sorted(shapes)}")
        self.count, self.depth, self.outputs = len(gates), gates[0].depth, downs[0].outputs
        self._weights = gates, downs
        self._arrays = _array(gates), _array(downs)
        self.gate_up, self.down = (ctypes.addressof(array) for array in self._arrays)


def _array(weights: list[CpuLinear]) -> "ctypes.Array[PenstockWeight]":
    return (PenstockWeight * len(weights))(*(item.weight for item in weights))
