"""ProductOps: products with packed weights, mixtures of experts, and the router."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

from penstock.kernels.cpu.calls import (
    TYPES,
    NativeCalls,
    activation_code,
    address,
    remembered,
    rows_address,
    rows_of,
)
from penstock.kernels.cpu.library import PenstockWeight
from penstock.kernels.cpu.packed import CpuLinear, Layout, own_linear, pack
from penstock.kernels.ops import PLAIN, PackedLinear, Packing, RowSource, TensorRows
from penstock.kernels.tensors import FLOAT32, INT64, Array, ArrayType, Dtype, Tensor

REMEMBERED_EXPERTS = 1024  # number of layers whose NativeExperts are kept


class ProductOps(NativeCalls):
    """The operations of kernels/ops.py that read a packed weight, and the router."""

    def __init__(self, dtype: Dtype, *, threads: int = 1, level: str | None = None) -> None:
        super().__init__(dtype, threads=threads, level=level)
        self._experts: dict[tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]], NativeExperts] = {}

    def pack_linear(
        self, weight: Tensor | RowSource, bias: Tensor | None = None, packing: Packing = PLAIN
    ) -> PackedLinear:
        source = weight if hasattr(weight, "read") else TensorRows(weight)
        layout = Layout.of(source.shape, self.element, packing)
        return pack(layout, source, bias, self.dtype, self._pack_rows)

    def pack_part(
        self, weight: RowSource, magnitudes: Array | None, packing: Packing
    ) -> tuple[PackedLinear, Array | None]:
        layout = Layout.of(weight.shape, self.element, packing)
        packed = pack(layout, weight, None, self.dtype, partial(self._pack_rows, magnitudes=magnitudes))
        return packed, packed.take_scales()

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        return Layout.of(shape, self.element, packing).num_bytes(bias=bias)

    def restore_linear(
        self, shape: tuple[int, ...], state: Mapping[str, Tensor], packing: Packing = PLAIN
    ) -> PackedLinear:
        return CpuLinear(Layout.of(shape, self.element, packing), state)

    def _pack_rows(self, weight: CpuLinear, rows: Tensor, first: int, *, magnitudes: Array | None = None) -> None:
        at = address(rows, (len(rows), weight.depth), self.element, "weight")
        known = None if magnitudes is None else address(magnitudes, (weight.shape[0],), FLOAT32, "magnitudes")
        self._call("penstock_pack_rows", (), weight.address, at, self._type, first, len(rows), known)

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own_linear(weight, gated=False), 0, FLOAT32, out)

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        return self._product(x, own_linear(weight, gated=False), activation_code(activation), self.element, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own_linear(weight, gated=True), activation_code(activation), self.element, out)

    def _product(self, x: Tensor, weight: CpuLinear, activation: int, dtype: ArrayType, out: Tensor | None) -> Tensor:
        rows, _ = rows_of(x, "x")
        shape = (rows, weight.outputs)
        out = self._output(out, shape, dtype)
        x_at = address(x, (rows, weight.depth), self.element, "x")
        out_at, stride = rows_address(out, shape, dtype, "out")
        self._call(
            "penstock_linear",
            (x, weight, out),
            weight.address,
            x_at,
            self._type,
            rows,
            out_at,
            stride,
            TYPES[dtype],
            activation,
        )
        return out

    def experts(
        self,
        x: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        ids: Tensor,
        weights: Tensor,
        activation: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        key = tuple(gate_up), tuple(down)
        native = remembered(self._experts, key, REMEMBERED_EXPERTS, lambda: NativeExperts(*key))
        (rows, _), (_, top_k) = rows_of(x, "x"), rows_of(ids, "ids")
        out = self._output(out, (rows, native.outputs), FLOAT32)
        self._call(
            "penstock_experts",
            (x, native, ids, weights, out),
            native.gate_up,
            native.down,
            native.count,
            address(x, (rows, native.depth), self.element, "x"),
            self._type,
            rows,
            top_k,
            address(ids, (rows, top_k), INT64, "ids"),
            address(weights, (rows, top_k), FLOAT32, "weights"),
            activation_code(activation),
            address(out, (rows, native.outputs), FLOAT32, "out"),
        )
        return out

    def expert_counts(self) -> tuple[int, int]:
        """Return what `experts` has read and computed: experts' weights, each counted once per call, and (row, expert)
        pairs."""
        counts = (ctypes.c_int64 * 2)()
        self._library.penstock_expert_counts(self._context, ctypes.addressof(counts))
        return counts[0], counts[1]

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = rows_of(logits, "logits")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k: {top_k} is not from 1 to {experts}, the number of experts")
        at, shape = address(logits, (rows, experts), FLOAT32, "logits"), (rows, top_k)
        ids, weights = (self._new(shape, INT64), self._new(shape, FLOAT32)) if out is None else out
        self._call(
            "penstock_route",
            (logits, ids, weights),
            at,
            rows,
            experts,
            top_k,
            renormalize,
            address(ids, shape, INT64, "ids"),
            address(weights, shape, FLOAT32, "weights"),
        )
        return ids, weights


class NativeExperts:
    """The experts of a layer as arrays of PenstockWeight, which keep the weights and their memory alive.

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
