"""ProductOps: products with packed weights, mixtures of experts, and the router."""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.kernels.cpu.arguments import TYPES, activation_code, address, output, rows_address, rows_of
from penstock.kernels.cpu.calls import NativeCalls, remembered
from penstock.kernels.cpu.experts import NativeExperts
from penstock.kernels.cpu.packed import CpuLinear, Layout, own_linear, pack
from penstock.kernels.ops import PackedLinear, RowSource, TensorRows
from penstock.quant.scheme import Scheme

F32, I64 = torch.float32, torch.int64
REMEMBERED_EXPERTS = 1024  # layers whose NativeExperts are kept


class ProductOps(NativeCalls):
    """The operations of kernels/ops.py that read a packed weight, and the router."""

    def __init__(self, dtype: torch.dtype, *, threads: int = 1, level: str | None = None) -> None:
        super().__init__(dtype, threads=threads, level=level)
        self._experts: dict[tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]], NativeExperts] = {}

    def pack_linear(
        self,
        weight: Tensor | RowSource,
        bias: Tensor | None = None,
        *,
        leaf_ends: Sequence[int] = (),
        scheme: Scheme | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        source = TensorRows(weight) if isinstance(weight, Tensor) else weight
        layout = Layout.of(source.shape, self.dtype, scheme, leaf_ends, gated)
        return pack(layout, source, bias, self.dtype, self._pack_rows)

    def restore_linear(
        self,
        shape: tuple[int, int],
        state: Mapping[str, Tensor],
        *,
        leaf_ends: Sequence[int] = (),
        scheme: Scheme | None = None,
        gated: bool = False,
    ) -> PackedLinear:
        return CpuLinear(Layout.of(shape, self.dtype, scheme, leaf_ends, gated), state)

    def _pack_rows(self, weight: CpuLinear, rows: Tensor, first: int) -> None:
        at = address(rows, (len(rows), weight.depth), self.dtype, "weight")
        self._call("penstock_pack_rows", (), weight.address, at, self._type, first, len(rows))

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own_linear(weight, gated=False), 0, F32, out)

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        return self._product(x, own_linear(weight, gated=False), activation_code(activation), self.dtype, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own_linear(weight, gated=True), activation_code(activation), self.dtype, out)

    def _product(self, x: Tensor, weight: CpuLinear, activation: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        rows, _ = rows_of(x, "x")
        shape = (rows, weight.outputs)
        out = output(out, shape, dtype)
        x_at = address(x, (rows, weight.depth), self.dtype, "x")
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
        native = self._native_experts(gate_up, down)
        (rows, _), (_, top_k) = rows_of(x, "x"), rows_of(ids, "ids")
        out = output(out, (rows, native.outputs), F32)
        self._call(
            "penstock_experts",
            (x, native, ids, weights, out),
            native.gate_up,
            native.down,
            native.count,
            address(x, (rows, native.depth), self.dtype, "x"),
            self._type,
            rows,
            top_k,
            address(ids, (rows, top_k), I64, "ids"),
            address(weights, (rows, top_k), F32, "weights"),
            activation_code(activation),
            address(out, (rows, native.outputs), F32, "out"),
        )
        return out

    def _native_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> NativeExperts:
        key = tuple(gate_up), tuple(down)
        return remembered(self._experts, key, REMEMBERED_EXPERTS, lambda: NativeExperts(*key))

    def expert_counts(self) -> tuple[int, int]:
        """Return what `experts` did so far: experts whose weights were read, once per call, and (row, expert) pairs."""
        counts = (ctypes.c_int64 * 2)()
        self._library.penstock_expert_counts(self._context, ctypes.addressof(counts))
        return counts[0], counts[1]

    def route(
        self, logits: Tensor, top_k: int, *, renormalize: bool, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = rows_of(logits, "logits")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k: {top_k} of {experts} experts")
        at, shape = address(logits, (rows, experts), F32, "logits"), (rows, top_k)
        ids, weights = (torch.empty(shape, dtype=I64), torch.empty(shape, dtype=F32)) if out is None else out
        self._call(
            "penstock_route",
            (logits, ids, weights),
            at,
            rows,
            experts,
            top_k,
            renormalize,
            address(ids, shape, I64, "ids"),
            address(weights, shape, F32, "weights"),
        )
        return ids, weights
