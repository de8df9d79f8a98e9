"""CpuOps: every operation is one call of the native library with the addresses of tensors.

Bits depend only on the instruction level, never on the batch or the threads (native/abi.h). A decode step makes about
180 calls, so the checks of each call are cheap, and a call allocates nothing if `out=` is given.
"""

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from penstock.kernels.cpu.attention import CpuKVCache, NativeParams
from penstock.kernels.cpu.calls import (
    TYPES,
    NativeCalls,
    activation_code,
    address,
    fill_step,
    optional_address,
    remembered,
    rows_address,
    rows_of,
    type_code,
)
from penstock.kernels.cpu.library import PenstockAttentionStep, PenstockSampling, check_status
from penstock.kernels.cpu.packed import FLOAT_KINDS, CpuLinear, Layout, NativeExperts, own_linear, pack
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    RotaryParams,
    check_block_ids,
    own,
)
from penstock.kernels.ops import PLAIN, PackedLinear, Packing, RowSource, TensorRows
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.tensors import (
    BOOL,
    FLOAT32,
    INT64,
    Array,
    ArrayType,
    Dtype,
    Tensor,
    address_of,
    array_type,
    as_array,
    is_torch,
)

REMEMBERED_STEPS = 8  # number of steps whose native form is kept for further layers
REMEMBERED_EXPERTS = 1024  # number of layers whose NativeExperts are kept
REMEMBERED_PARAMS = 1024  # number of layers whose NativeParams are kept


class CpuOps(NativeCalls):
    """All operations of kernels/ops.py at one instruction level. One call runs at a time, so each engine has its own.

    Attributes:
        plan_counts: number of plans made for each plan key (kernels/attention/plan.py).
    """

    def __init__(self, dtype: Dtype, *, threads: int = 1, level: str | None = None) -> None:
        super().__init__(dtype, threads=threads, level=level)
        self._experts: dict[tuple[tuple[PackedLinear, ...], tuple[PackedLinear, ...]], NativeExperts] = {}
        self._sampling = PenstockSampling()
        self._filled: tuple[SamplingTensors | None, tuple[int, int]] = None, (0, 0)  # what filled _sampling
        self._params: dict[tuple[AttentionParams, int], NativeParams] = {}
        self._steps: dict[int, tuple[AttentionMetadata, PenstockAttentionStep]] = {}
        self.plan_counts: Counter[int] = Counter()
        self._reserved = (0, 0)  # bytes of workspace and scratch memory of attention

    # --- products with packed weights, mixtures of experts, and the router -------------------------------------------

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

    # --- operations in which every row is computed by itself ---------------------------------------------------------

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

    # --- attention -------------------------------------------------------------------------------------------------

    def new_kv_cache(self, spec: CacheSpec) -> KVCache:
        return CpuKVCache(spec)

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        to = own(cache, CpuKVCache)
        tokens, shape = len(slots), (len(slots), to.spec.num_kv_heads, to.spec.head_dim)
        k_at, v_at = address(k, shape, self.element, "k"), address(v, shape, self.element, "v")
        slots_at = address(slots, (tokens,), INT64, "slots")
        self._call("penstock_cache_store", (k, v, slots), to.address, k_at, v_at, self._type, slots_at, tokens)

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        source = own(cache, CpuKVCache)
        shape = (len(slots), source.spec.num_kv_heads, source.spec.head_dim)
        k, v = self._new(shape, FLOAT32), self._new(shape, FLOAT32)
        slots_at = address(slots, (len(slots),), INT64, "slots")
        self._call("penstock_cache_load", (slots,), source.address, slots_at, len(slots), address_of(k), address_of(v))
        return k, v

    def copy_block(self, cache: KVCache, source: int, target: int) -> None:
        to = own(cache, CpuKVCache)
        check_block_ids(to.spec.num_blocks, source, target)
        to.memory[target] = to.memory[source]

    def block_bytes(self, cache: KVCache, block_id: int) -> Array:
        found = own(cache, CpuKVCache)
        check_block_ids(found.spec.num_blocks, block_id)
        memory: Array = as_array(found.memory)[block_id]
        return memory

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        meta = own(cache, CpuKVCache).plan(meta, heads, self.element, self.level, self.threads)
        if is_torch(self.dtype):  # for models that look at the metadata
            meta = meta.to(self.tensor)
        if (plan := meta.plan) is not None:
            self.plan_counts[plan.key] += 1
            workspace, scratch = self._reserved
            if plan.workspace_bytes > workspace or plan.scratch_bytes > scratch:
                needed = max(workspace, plan.workspace_bytes), max(scratch, plan.scratch_bytes)
                if status := self._native["penstock_attention_reserve"](self._context, *needed):
                    check_status(status)
                self._reserved = needed
        return meta

    def attend(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        params: AttentionParams,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        paged = own(cache, CpuKVCache)
        tokens, num_heads, head_dim = q.shape
        kv_heads = paged.spec.num_kv_heads
        kv_shape, shape = (tokens, kv_heads, head_dim), (tokens, num_heads * head_dim)
        if len(meta.slot_mapping) != tokens:
            raise ValueError(f"q: {tokens} tokens, but the metadata has {len(meta.slot_mapping)}")
        if meta.plan is None:
            meta = self.plan(meta, Heads(num_heads, kv_heads, head_dim), cache)
        out = self._output(out, shape, self.element)
        step = self._step(meta, paged, num_heads)
        native_params = remembered(
            self._params, (params, num_heads), REMEMBERED_PARAMS, lambda: NativeParams(params, num_heads)
        )
        self._call(
            "penstock_attend",
            (q, k_new, v_new, paged, out, lse, native_params),
            ctypes.addressof(step),
            paged.address,
            native_params.address,
            address(q, (tokens, num_heads, paged.spec.head_dim), self.element, "q"),
            address(k_new, kv_shape, self.element, "k_new"),
            address(v_new, kv_shape, self.element, "v_new"),
            self._type,
            num_heads,
            address(out, shape, self.element, "out"),
            optional_address(lse, (tokens, num_heads), FLOAT32, "lse"),
        )
        return out

    def _step(self, meta: AttentionMetadata, cache: CpuKVCache, num_heads: int) -> PenstockAttentionStep:
        """Return the native form of planned metadata, from the program being recorded or from the last steps.

        Raises:
            ValueError: the plan was made for other heads, another cache or another number of threads.
        """
        cache.check_plan(meta, num_heads, self.threads)
        recorded = None if self._recorder is None else self._recorder.step(meta)
        if recorded is not None:
            return recorded
        return remembered(
            self._steps, id(meta), REMEMBERED_STEPS, lambda: (meta, fill_step(PenstockAttentionStep(), meta))
        )[1]

    # --- logits ----------------------------------------------------------------------------------------------------

    def finite_rows(self, logits: Tensor) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out, at = self._one_each(rows, BOOL), address(logits, shape, FLOAT32, "logits")
        self._call("penstock_finite_rows", (), at, rows, vocab_size, address_of(out))
        return out

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out = self._output(out, shape, FLOAT32)
        at, to = address(logits, shape, FLOAT32, "logits"), address(out, shape, FLOAT32, "out")
        self._call("penstock_log_softmax", (), at, rows, vocab_size, to)
        return out

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        at = address(logits, shape, FLOAT32, "logits")
        if params is not self._filled[0] or shape != self._filled[1]:
            self._filled = None, shape
            _fill_sampling(self._sampling, params, rows, vocab_size)
            self._filled = params, shape
        out = self._one_each(rows, INT64)
        self._call("penstock_sample", (), at, rows, vocab_size, ctypes.addressof(self._sampling), address_of(out))
        return out

    def _one_each(self, rows: int, dtype: ArrayType) -> Tensor:
        """Return a new tensor for one number per row. It needs no alignment."""
        return self.tensor(np.empty(rows, dtype))


def _fill_sampling(native: PenstockSampling, params: SamplingTensors, rows: int, vocab_size: int) -> None:
    """Fill every field for logits [rows, vocab_size]. The tensors must outlive the call that reads the structure.

    Raises:
        ValueError: a tensor has another shape or type, or a pair is outside the logits.
    """
    native.temperature = address(params.temperature, (rows,), FLOAT32, "temperature")
    native.top_k = optional_address(params.top_k, (rows,), INT64, "top_k")
    native.top_p = optional_address(params.top_p, (rows,), FLOAT32, "top_p")
    native.min_p = optional_address(params.min_p, (rows,), FLOAT32, "min_p")
    native.noise_key = optional_address(params.noise_key, (rows, 3), INT64, "noise_key")
    bias_pairs, bias_values = params.bias or (None, None)
    repetition, repetition_pairs = params.repetition or (None, None)
    frequency, presence, count_pairs, count_values = params.counts or (None, None, None, None)
    native.masked, native.num_masked = _pairs(params.masked, rows, vocab_size, "masked")
    native.bias_pairs, native.num_bias = _pairs(bias_pairs, rows, vocab_size, "bias")
    native.bias_values = optional_address(bias_values, (native.num_bias,), FLOAT32, "bias")
    native.repetition = optional_address(repetition, (rows,), FLOAT32, "repetition")
    native.repetition_pairs, native.num_repetition = _pairs(repetition_pairs, rows, vocab_size, "repetition")
    native.frequency = optional_address(frequency, (rows,), FLOAT32, "frequency")
    native.presence = optional_address(presence, (rows,), FLOAT32, "presence")
    native.count_pairs, native.num_counts = _pairs(count_pairs, rows, vocab_size, "counts")
    native.count_values = optional_address(count_values, (native.num_counts,), FLOAT32, "counts")


def _pairs(pairs: Tensor | None, rows: int, vocab_size: int, name: str) -> tuple[int | None, int]:
    """Return the address and number of the pairs [P, 2], after checking that all of them are inside the logits."""
    if pairs is None or not len(pairs):
        return None, 0
    count = len(pairs)
    at = address(pairs, (count, 2), INT64, name)
    found = as_array(pairs)
    (row, token), (last_row, last_token) = found.min(axis=0).tolist(), found.max(axis=0).tolist()
    if row < 0 or token < 0 or last_row >= rows or last_token >= vocab_size:
        raise ValueError(f"{name}: a pair is outside the logits [{rows}, {vocab_size}]")
    return at, count


def _head_norm(weight: Tensor | None, heads: int, head_dim: int, name: str) -> tuple[int | None, int]:
    """Return the address and size of a weight: [D] norms each head by itself, [heads * D] all heads together."""
    if weight is None:
        return None, head_dim
    size = len(weight) if weight.shape == (heads * head_dim,) else head_dim
    return address(weight, (size,), FLOAT32, name), size
