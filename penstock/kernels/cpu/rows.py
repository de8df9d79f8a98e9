"""RowOps: operations on rows between the products: norms, rotary and token embedding, element-wise operations."""

from penstock.kernels.cpu.calls import NativeCalls, address, optional_address, rows_of, type_code
from penstock.kernels.cpu.packed import FLOAT_KINDS, own_linear
from penstock.kernels.metadata import RotaryParams
from penstock.kernels.ops import PackedLinear
from penstock.kernels.tensors import FLOAT32, INT64, ArrayType, Dtype, Tensor, array_type


class RowOps(NativeCalls):
    """The operations of kernels/ops.py in which every row is computed by itself."""

    def embedding(self, ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        rows, (vocab_size, hidden) = len(ids), rows_of(weight, "weight")
        table, at = address(weight, (vocab_size, hidden), self.element, "weight"), address(ids, (rows,), INT64, "ids")
        out = self._output(out, (rows, hidden), FLOAT32)
        to = address(out, (rows, hidden), FLOAT32, "out")
        self._call("penstock_embedding", (ids, weight, out), at, table, self._type, vocab_size, rows, hidden, scale, to)
        return out

    def packed_embedding(
        self, ids: Tensor, weight: PackedLinear, *, scale: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        packed, rows = own_linear(weight, gated=False), len(ids)
        if packed.layout.kind not in FLOAT_KINDS.values():
            raise ValueError("a quantised weight has no rows to look up")
        out = self._output(out, (rows, packed.depth), FLOAT32)
        at, to = address(ids, (rows,), INT64, "ids"), address(out, (rows, packed.depth), FLOAT32, "out")
        self._call("penstock_packed_embedding", (ids, packed, out), at, packed.address, rows, scale, to)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, dtype: Dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._norm("penstock_rms_norm", (x,), weight, (), eps, array_type(dtype or self.dtype), out)

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x, self._norm("penstock_add_rms_norm", (x, h), weight, (), eps, self.element, out)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> Tensor:
        return self._norm("penstock_layer_norm", (x,), weight, (bias,), eps, self.element, out)

    def add_layer_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x, self._norm("penstock_add_layer_norm", (x, h), weight, (bias,), eps, self.element, out)

    def _norm(
        self,
        function: str,
        inputs: tuple[Tensor, ...],
        weight: Tensor,
        bias: tuple[Tensor | None, ...],
        eps: float,
        dtype: ArrayType,
        out: Tensor | None,
    ) -> Tensor:
        """Call a norm. inputs: x, or x and h, [rows, hidden]; weight and bias [hidden]; only layer norms have bias."""
        rows, hidden = shape = rows_of(inputs[0], "x")
        out_type = type_code(dtype)
        out = self._output(out, shape, dtype)
        self._call(
            function,
            (*inputs, weight, *bias, out),
            *[address(tensor, shape, FLOAT32, name) for tensor, name in zip(inputs, "xh", strict=False)],
            address(weight, (hidden,), FLOAT32, "weight"),
            *[optional_address(tensor, (hidden,), FLOAT32, "bias") for tensor in bias],
            eps,
            rows,
            hidden,
            address(out, shape, dtype, "out"),
            out_type,
        )
        return out

    def add(self, x: Tensor, h: Tensor) -> Tensor:
        rows, hidden = shape = rows_of(x, "x")
        at, branch_at = address(x, shape, FLOAT32, "x"), address(h, shape, FLOAT32, "h")
        self._call("penstock_add", (x, h), at, branch_at, rows * hidden)
        return x

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, hidden = shape = rows_of(x, "x")
        out = self._output(out, shape, self.element)
        at, to = address(x, shape, FLOAT32, "x"), address(out, shape, self.element, "out")
        self._call("penstock_round", (x, out), at, rows * hidden, to, self._type)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if not cap > 0:
            raise ValueError(f"softcap: {cap} is not above 0")
        rows, columns = shape = rows_of(x, "x")
        self._call("penstock_softcap", (x,), address(x, shape, FLOAT32, "x"), cap, rows * columns)
        return x

    def rotary_qkv(
        self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, cos_sin, q_norm, k_norm = params.heads, params.cos_sin, params.q_norm, params.k_norm
        num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        rows, dtype = qkv.shape[0], self.element
        q_shape, kv_shape = (rows, num_heads, head_dim), (rows, num_kv_heads, head_dim)
        shapes = q_shape, kv_shape, kv_shape
        q, k, v = (self._new(shape, dtype) for shape in shapes) if out is None else out
        positions_at, cos_sin_at = address(positions, (rows,), INT64, "positions"), None
        num_positions = rotary_dim = 0
        if cos_sin is not None:
            num_positions, rotary_dim = rows_of(cos_sin, "cos_sin")
            cos_sin_at = address(cos_sin, (num_positions, rotary_dim), FLOAT32, "cos_sin")
            if rotary_dim > head_dim or rotary_dim % 2:
                raise ValueError(f"cos_sin: {rotary_dim} columns; an even number up to {head_dim} is needed")
        self._call(
            "penstock_rotary_qkv",
            (qkv, positions, cos_sin, q_norm, k_norm, q, k, v),
            address(qkv, (rows, (num_heads + 2 * num_kv_heads) * head_dim), FLOAT32, "qkv"),
            positions_at,
            cos_sin_at,
            num_positions,
            rotary_dim,
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            *_head_norm(q_norm, num_heads, head_dim, "q_norm"),
            *_head_norm(k_norm, num_kv_heads, head_dim, "k_norm"),
            params.eps,
            address(q, q_shape, dtype, "q"),
            address(k, kv_shape, dtype, "k"),
            address(v, kv_shape, dtype, "v"),
            self._type,
        )
        return q, k, v


def _head_norm(weight: Tensor | None, heads: int, head_dim: int, name: str) -> tuple[int | None, int]:
    """Return the address and size of a weight: [D] norms each head by itself, [heads * D] all heads together."""
    if weight is None:
        return None, head_dim
    size = len(weight) if weight.shape == (heads * head_dim,) else head_dim
    return address(weight, (size,), FLOAT32, name), size
