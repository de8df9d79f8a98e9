"""CpuOps: every operation is one call of the native library with the addresses of tensors.

Bits depend only on the instruction level, never on the batch or the threads (native/abi.h). A decode step makes about
180 calls, so the checks of each call are cheap, and a call allocates nothing if `out=` is given. Python only allocates
caches of the right size; native/attention/attention.h describes their layout.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.errors import NotSupportedError, unsupported
from penstock.kernels.attention.items import GRANULE, MAX_HEAD_DIM, AttentionShape, cache_token_bytes, padded_head_dim
from penstock.kernels.attention.plan import Planner
from penstock.kernels.coding import BlockForm, CodedRows, Coding
from penstock.kernels.cpu.calls import (
    TYPES,
    NativeCalls,
    NativeParams,
    activation_code,
    address,
    check_tensor,
    fill_sampling,
    fill_step,
    head_norm_address,
    hide_forms,
    optional_address,
    remembered,
    rows_address,
    rows_of,
    type_code,
)
from penstock.kernels.cpu.library import ABI, PenstockAttentionStep, PenstockCache, PenstockSampling, check_status
from penstock.kernels.cpu.packed import (
    FLOAT_KINDS,
    CpuLinear,
    Layout,
    NativeExperts,
    NativeLora,
    Pack,
    native_form,
    own_linear,
    pack,
)
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    RotaryParams,
    RouterParams,
    check_block_ids,
    own,
)
from penstock.kernels.ops import PLAIN, LoraTable, PackedLinear, Packing, RowSource, TensorRows, XieluCurve
from penstock.kernels.sampling import SamplingTensors, TokenScores, score_tokens
from penstock.kernels.tensors import (
    BFLOAT16,
    BOOL,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    NAMES,
    UINT8,
    Array,
    ArrayType,
    Dtype,
    Tensor,
    address_of,
    array_type,
    as_array,
    dtype_of,
    empty,
    is_torch,
)

SCORES = {name.removeprefix("SCORES_").lower(): value for name, value in ABI.enums["RouterScores"].items()}
KINDS = dict(zip((FLOAT32, BFLOAT16, INT8), ABI.enums["CacheKind"].values(), strict=False))
SLICES = (2, 3)  # supported for an int8 cache
CHANNEL_FIELDS = ("key_scales", "key_offsets", "value_scales", "value_offsets")


class CpuKVCache:
    """Keys and values of one layer.

    Attributes:
        memory: [num_blocks, block bytes] uint8.
        address: address of the PenstockCache.
    """

    def __init__(self, spec: CacheSpec) -> None:
        """Allocate memory without initialising it.

        Raises:
            NotSupportedError: the native kernels do not support this cache.
            ValueError: the scales are not [Hkv, D] float32.
        """
        _check_cache(spec)
        self.spec = spec
        heads, head_dim = spec.num_kv_heads, spec.head_dim
        token_scales, dtype = spec.scales is None, array_type(spec.dtype)
        name = str(dtype)
        token_bytes = cache_token_bytes(heads, head_dim, name, token_scales=token_scales)
        self.memory = empty((spec.num_blocks, spec.block_size * token_bytes), dtype_of("uint8", spec.dtype))
        self.num_bytes = self.memory.nbytes
        self._shape = heads, head_dim, name, spec.slices, token_scales  # fields of AttentionShape
        self._planners: dict[tuple[object, ...], Planner] = {}
        self._last: tuple[AttentionMetadata, tuple[object, ...], AttentionMetadata] | None = None  # input, key, result
        self._struct = PenstockCache(
            memory=address_of(self.memory),
            blocks=spec.num_blocks,
            block_size=spec.block_size,
            kv_heads=heads,
            head_dim=head_dim,
            padded_dim=padded_head_dim(head_dim),
            kind=KINDS[dtype],
            slices=spec.slices,
        )
        self._scales = []  # zero-padded to the padded head dim
        for field in CHANNEL_FIELDS if spec.scales is not None else ():
            padding = (0, 0), (0, padded_head_dim(head_dim) - head_dim)
            self._scales.append(np.pad(as_array(getattr(spec.scales, field)), padding))
            setattr(self._struct, field, address_of(self._scales[-1]))
        self.address = ctypes.addressof(self._struct)

    def plan(
        self, meta: AttentionMetadata, heads: Heads, dtype: ArrayType, level: str, threads: int
    ) -> AttentionMetadata:
        """Copy the metadata with a plan for these heads, queries and results of type `dtype`, and this cache.

        A caller may pass the metadata of its previous call again, after writing the next step's lengths and slots into
        the same tensors, if the blocks are the same. If the plan also fits that step, the previous result is returned.

        Raises:
            ValueError: the type or shape of a tensor is not that of kernels/metadata.py, or a block is missing.
        """
        rules = threads, meta.chunked, meta.bidirectional
        key = heads.num_heads, dtype, level, meta.sliding_window, meta.num_sink_tokens, *rules
        if self._last is not None and self._last[0] is meta and self._last[1] == key:
            planned = self._last[2]
            if planned.plan is not None and self._planners[key].renew(planned.plan, as_array(meta.seq_lens)):
                return planned
        self._check(meta, heads)
        meta.check_blocks(self.spec.num_blocks)
        planner = self._planners.get(key)
        if planner is None:
            shape = AttentionShape(heads.num_heads, *self._shape, str(dtype), level)
            planner = self._planners[key] = Planner(shape, self.spec.block_size, *key[3:])
        plan = planner.plan(as_array(meta.query_start_loc), as_array(meta.seq_lens), as_array(meta.block_table))
        planned = replace(meta, plan=plan)
        self._last = meta, key, planned
        return planned

    def _check(self, meta: AttentionMetadata, heads: Heads) -> None:
        num_seqs, num_tokens = len(meta.seq_lens), len(meta.slot_mapping)
        check_tensor(meta.query_start_loc, (num_seqs + 1,), INT32, "query_start_loc")
        check_tensor(meta.seq_lens, (num_seqs,), INT32, "seq_lens")
        check_tensor(meta.block_table, (num_seqs, meta.block_table.shape[-1]), INT32, "block_table")
        check_tensor(meta.slot_mapping, (num_tokens,), INT64, "slot_mapping")
        spec = self.spec
        if meta.block_size != spec.block_size:
            raise ValueError(f"block_size: {meta.block_size}, but the cache has {spec.block_size}")
        fits = (heads.num_kv_heads, heads.head_dim) == (spec.num_kv_heads, spec.head_dim)
        if not fits or heads.num_heads % heads.num_kv_heads:
            raise ValueError(f"heads: {heads} does not fit a cache of {spec.num_kv_heads} heads of {spec.head_dim}")

    def check_plan(self, meta: AttentionMetadata, num_heads: int, threads: int) -> None:
        """Raise ValueError unless the metadata's plan fits these heads, this cache and the number of threads."""
        plan = meta.plan
        if plan is None:
            raise ValueError("plan: the metadata has no plan")
        shape = plan.shape
        found = shape.num_kv_heads, shape.head_dim, shape.kv_cache_dtype, shape.slices, shape.token_scales
        fits = shape.num_heads == num_heads and found == self._shape
        if not fits or meta.block_size != self.spec.block_size or len(plan.starts) != threads + 1:
            raise ValueError(f"plan: made for {shape}, blocks of {meta.block_size}, {len(plan.starts) - 1} threads")


def _check_cache(spec: CacheSpec) -> None:
    block_size, head_dim, dtype, slices = spec.block_size, spec.head_dim, array_type(spec.dtype), spec.slices
    if block_size < 1 or block_size % GRANULE:
        raise unsupported("block_size", f"{block_size}; the native kernels need a multiple of {GRANULE}")
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        message = f"{head_dim}; the native kernels support even ones up to {MAX_HEAD_DIM}, 'reference' any"
        raise unsupported("head_dim", message)
    if dtype not in KINDS:
        raise unsupported("kv_cache_dtype", f"{dtype}; supported are float32, bfloat16 and int8")
    if dtype is INT8 and slices not in SLICES:
        raise unsupported("slices", f"{slices}; the native kernels support 2 and 3")
    if dtype is not INT8 and (slices or spec.scales is not None):
        raise NotSupportedError("slices, scales: only an int8 cache has them", param="slices")
    for name in CHANNEL_FIELDS if spec.scales is not None else ():
        address(getattr(spec.scales, name), (spec.num_kv_heads, head_dim), FLOAT32, name)


REMEMBERED_LORAS = 4096  # number of products whose NativeLora is kept
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
        self._loras: dict[LoraTable, NativeLora] = {}
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
        return pack(layout, source, bias, self.dtype, self._packer(layout, source))

    def pack_part(
        self, weight: RowSource, magnitudes: Array | None, packing: Packing
    ) -> tuple[PackedLinear, Array | None]:
        layout = Layout.of(weight.shape, self.element, packing)
        packed = pack(layout, weight, None, self.dtype, self._packer(layout, weight, magnitudes))
        return packed, packed.take_scales()

    def packed_bytes(self, shape: tuple[int, ...], packing: Packing = PLAIN, *, bias: bool = False) -> int:
        return Layout.of(shape, self.element, packing).num_bytes(bias=bias)

    def restore_linear(
        self, shape: tuple[int, ...], state: Mapping[str, Tensor], packing: Packing = PLAIN
    ) -> PackedLinear:
        return CpuLinear(Layout.of(shape, self.element, packing), state)

    def _packer(self, layout: Layout, source: RowSource, magnitudes: Array | None = None) -> Pack:
        """Return what packs rows of a source."""
        if layout.coding is None:
            return partial(self._pack_rows, magnitudes=magnitudes)
        form = source.form if isinstance(source, CodedRows) else None
        return self._pack_codes if form is None else partial(self._pack_blocks, form=form)

    def _pack_rows(self, weight: CpuLinear, rows: Tensor, first: int, *, magnitudes: Array | None = None) -> None:
        at = address(rows, (len(rows), weight.depth), self.element, "weight")
        known = None if magnitudes is None else address(magnitudes, (weight.shape[0],), FLOAT32, "magnitudes")
        self._call("penstock_pack_rows", (), weight.address, at, self._type, first, len(rows), known)

    def _pack_codes(self, weight: CpuLinear, parts: Mapping[str, Array], first: int) -> None:
        coding = weight.layout.coding
        assert coding is not None
        rows = len(parts["codes"])
        expected = coding.parts((rows, weight.depth))
        arrays = {name: np.ascontiguousarray(parts[name]) for name in expected}
        at = {name: address(arrays[name], shape, NAMES[dtype], name) for name, (shape, dtype) in expected.items()}
        names = "codes", "scales", "mins", "steps", "step_mins", "column_scales"
        second = [expected[name][0][-1] if name in expected else 0 for name in ("scales", "steps")]
        self._pack_call(coding, "penstock_pack_codes", weight.address, *map(at.get, names), *second, first, rows)

    def _pack_blocks(self, weight: CpuLinear, parts: Mapping[str, Array], first: int, *, form: BlockForm) -> None:
        coding, blocks = weight.layout.coding, np.ascontiguousarray(parts["blocks"])
        assert coding is not None
        assert coding.block is not None
        rows, _, size = blocks.shape
        at = address(blocks, (rows, weight.depth // coding.block, size), UINT8, "blocks")
        native, _ = native_form(form, size)
        self._pack_call(coding, "penstock_pack_blocks", weight.address, at, ctypes.addressof(native), first, rows)

    def _pack_call(self, coding: Coding, name: str, *arguments: int | None) -> None:
        try:
            self._call(name, (), *arguments)
        except ValueError:
            raise ValueError(f"{coding.name}: a scale or a level is not a number, or a code is too large") from None

    def linear(self, x: Tensor, weight: PackedLinear, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own(weight, CpuLinear), 0, FLOAT32, out)

    def activated_linear(
        self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        return self._product(x, own_linear(weight, gated=False), activation_code(activation), self.element, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, own_linear(weight, gated=True), activation_code(activation), self.element, out)

    def _product(self, x: Tensor, weight: CpuLinear, activation: int, dtype: ArrayType, out: Tensor | None) -> Tensor:
        rows, _ = rows_of(x, "x")
        shape = (rows, weight.outputs if activation else weight.shape[0])
        out = self._output(out, shape, dtype)
        x_at = address(x, (rows, weight.depth), self.element, "x")
        out_at, stride = rows_address(out, shape, dtype, "out")
        arguments = weight.address, x_at, self._type, rows, out_at, stride, TYPES[dtype], activation
        self._call("penstock_linear", (x, weight, out), *arguments)
        return out

    def activate(self, x: Tensor, activation: str, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        rows, columns = shape = rows_of(x, "x")
        out_shape = (rows, columns // 2 if gated else columns)
        out = self._output(out, out_shape, self.element)
        at, to = address(x, shape, FLOAT32, "x"), address(out, out_shape, self.element, "out")
        code = activation_code(activation)
        self._call("penstock_activate", (x, out), at, rows, columns, code, gated, to, self._type)
        return out

    def lora_shrink(self, x: Tensor, table: LoraTable, slots: Tensor, *, out: Tensor) -> Tensor:
        (rows, _), (_, pieces, rank, depth) = rows_of(x, "x"), table.a.shape
        native = self._native_lora(table)
        at, to = address(x, (rows, depth), self.element, "x"), address(out, (rows, pieces, rank), FLOAT32, "out")
        slots_at = address(slots, (rows,), INT32, "slots")
        self._call("penstock_lora_shrink", (x, native, slots, out), native.address, slots_at, rows, at, to)
        return out

    def lora_expand(self, hidden: Tensor, table: LoraTable, slots: Tensor, y: Tensor) -> Tensor:
        (rows, columns), (_, pieces, rank, _) = rows_of(y, "y"), table.a.shape
        native = self._native_lora(table)
        at = address(hidden, (rows, pieces, rank), FLOAT32, "hidden")
        to, stride = rows_address(y, (rows, columns), FLOAT32, "y")
        slots_at = address(slots, (rows,), INT32, "slots")
        self._call("penstock_lora_expand", (hidden, native, slots, y), native.address, slots_at, rows, at, to, stride)
        return y

    def _native_lora(self, table: LoraTable) -> NativeLora:
        return remembered(self._loras, table, REMEMBERED_LORAS, lambda: NativeLora(table, self.element))

    def experts(
        self,
        x: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        chosen: tuple[Tensor, Tensor],
        activation: str,
        *,
        weigh_inputs: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        ids, weights = chosen
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
            weigh_inputs,
            address(out, (rows, native.outputs), FLOAT32, "out"),
        )
        return out

    def route(
        self, logits: Tensor, params: RouterParams, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = rows_of(logits, "logits")
        params.check(experts)
        at, shape = address(logits, (rows, experts), FLOAT32, "logits"), (rows, params.top_k)
        ids, weights = (self._new(shape, INT64), self._new(shape, FLOAT32)) if out is None else out
        scores = SCORES[params.scores], optional_address(params.bias, (experts,), FLOAT32, "bias")
        groups = params.groups, params.top_groups, params.group_top
        expert_scale = optional_address(params.expert_scale, (experts,), FLOAT32, "expert_scale")
        shares = params.renormalize, params.min_sum, params.scale, expert_scale, params.threshold
        to, used = address(ids, shape, INT64, "ids"), (logits, params.bias, params.expert_scale, ids, weights)
        numbers = at, rows, experts, params.top_k, *scores, *groups, *shares, to
        self._call("penstock_route", used, *numbers, address(weights, shape, FLOAT32, "weights"))
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
        if packed.layout.kind not in FLOAT_KINDS.values() and packed.layout.coding is None:
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
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        dtype: Dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._norm("penstock_layer_norm", (x,), weight, (bias,), eps, array_type(dtype or self.dtype), out)

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

    def add_gated(self, x: Tensor, h: Tensor, gates: Tensor) -> Tensor:
        rows, hidden = shape = rows_of(x, "x")
        at = (address(item, shape, FLOAT32, name) for item, name in ((x, "x"), (h, "h")))
        self._call("penstock_add_gated", (x, h, gates), *at, address(gates, (rows, 1), FLOAT32, "gates"), rows, hidden)
        return x

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, hidden = shape = rows_of(x, "x")
        out = self._output(out, shape, self.element)
        at, to = address(x, shape, FLOAT32, "x"), address(out, shape, self.element, "out")
        self._call("penstock_round", (x, out), at, rows * hidden, to, self._type)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        rows, columns = shape = rows_of(x, "x")
        self._call("penstock_scale", (x,), address(x, shape, FLOAT32, "x"), factor, rows * columns)
        return x

    def xielu(self, x: Tensor, curve: XieluCurve, *, out: Tensor | None = None) -> Tensor:
        rows, columns = shape = rows_of(x, "x")
        out = self._output(out, shape, self.element)
        at, to = address(x, shape, FLOAT32, "x"), address(out, shape, self.element, "out")
        numbers = curve.convex, curve.concave, curve.linear, curve.bound
        self._call("penstock_xielu", (x, out), at, rows * columns, *numbers, to, self._type)
        return out

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        (rows, columns), (heads, head_dim) = rows_of(x, "x"), rows_of(weight, "weight")
        if heads * head_dim > columns:
            raise ValueError(f"weight: {heads} heads of {head_dim}, but x has {columns} columns")
        at, weight_at = address(x, (rows, columns), FLOAT32, "x"), address(weight, (heads, head_dim), FLOAT32, "weight")
        self._call("penstock_norm_heads", (x, weight), at, weight_at, eps, rows, columns, heads, head_dim)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if not cap > 0:
            raise ValueError(f"softcap: {cap} is not above 0")
        rows, columns = shape = rows_of(x, "x")
        self._call("penstock_softcap", (x,), address(x, shape, FLOAT32, "x"), cap, rows * columns)
        return x

    def rotary_qkv(
        self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, rows = params.heads, qkv.shape[0]
        shapes = [(rows, count, heads.head_dim) for count in (heads.num_heads, *(heads.num_kv_heads,) * 2)]
        q, k, v = (self._new(shape, self.element) for shape in shapes) if out is None else out
        self._rotary(qkv, positions, params, (q, k, v))
        return q, k, v

    def rotary_q(self, qkv: Tensor, positions: Tensor, params: RotaryParams, *, out: Tensor | None = None) -> Tensor:
        q = self._output(out, (qkv.shape[0], params.heads.num_heads, params.heads.head_dim), self.element)
        self._rotary(qkv, positions, params, (q,))
        return q

    def _rotary(self, qkv: Tensor, positions: Tensor, params: RotaryParams, results: tuple[Tensor, ...]) -> None:
        """Write q, k and v, or only q."""
        heads, cos_sin, q_scale, rows = params.heads, params.cos_sin, params.q_scale, qkv.shape[0]
        num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        at = [
            address(item, (rows, count, head_dim), self.element, name)
            for item, count, name in zip(results, (num_heads, num_kv_heads, num_kv_heads), "qkv", strict=False)
        ]
        positions_at, cos_sin_at, q_scale_at = address(positions, (rows,), INT64, "positions"), None, None
        num_positions, rotary_dim = 0 if q_scale is None else len(q_scale), 0
        if cos_sin is not None:
            num_positions, rotary_dim = rows_of(cos_sin, "cos_sin")
            cos_sin_at = address(cos_sin, (num_positions, rotary_dim), FLOAT32, "cos_sin")
            if rotary_dim > head_dim or rotary_dim % 2:
                raise ValueError(f"cos_sin: {rotary_dim} columns; an even number up to {head_dim} is needed")
        if q_scale is not None:
            q_scale_at = address(q_scale, (num_positions,), FLOAT32, "q_scale")
        self._call(
            "penstock_rotary_qkv",
            (qkv, positions, cos_sin, q_scale, params.q_norm, params.k_norm, params.v_norm, *results),
            address(qkv, (rows, params.columns), FLOAT32, "qkv"),
            *(positions_at, cos_sin_at, q_scale_at, num_positions, rotary_dim),
            *(rows, num_heads, num_kv_heads, head_dim),
            *head_norm_address(params.q_norm, num_heads, head_dim, "q_norm"),
            *head_norm_address(params.k_norm, num_kv_heads, head_dim, "k_norm"),
            optional_address(params.v_norm, (head_dim,), FLOAT32, "v_norm"),
            *(params.values_are_keys, params.eps),
            *(at if len(at) == 3 else (*at, None, None)),
            self._type,
        )

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

    def read_block(self, cache: KVCache, block_id: int) -> bytes:
        source = own(cache, CpuKVCache)
        check_block_ids(source.spec.num_blocks, block_id)
        memory: Array = as_array(source.memory)[block_id]
        return memory.tobytes()

    def write_block(self, cache: KVCache, block_id: int, content: bytes | memoryview) -> None:
        to = own(cache, CpuKVCache)
        check_block_ids(to.spec.num_blocks, block_id)
        found = np.frombuffer(content, UINT8)
        check_tensor(found, tuple(to.memory.shape[1:]), UINT8, "content")
        as_array(to.memory)[block_id] = found

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        meta = own(cache, CpuKVCache).plan(meta, heads, self.element, self.level, self.threads)
        if is_torch(self.dtype):  # for models that look at the metadata
            meta = meta.to(self.tensor)
        if (plan := meta.plan) is not None:
            self.plan_counts[plan.key] += 1
            workspace, scratch = self._reserved
            if plan.workspace_bytes > workspace or plan.scratch_bytes > scratch:
                needed = max(workspace, plan.workspace_bytes), max(scratch, plan.scratch_bytes)
                if status := self._native["penstock_attention_reserve"](self.context, *needed):
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
        tokens, num_heads, head_dim = q.shape[-3:]
        kv_heads = paged.spec.num_kv_heads
        kv_shape, shape = (tokens, kv_heads, head_dim), (tokens, num_heads * head_dim)
        q_at = address(q, (*(2,) * (q.ndim - 3), tokens, num_heads, paged.spec.head_dim), self.element, "q")
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
            q_at,
            q_at + tokens * num_heads * head_dim * self.element.itemsize if q.ndim == 4 else None,
            address(k_new, kv_shape, self.element, "k_new"),
            address(v_new, kv_shape, self.element, "v_new"),
            self._type,
            num_heads,
            address(out, shape, self.element, "out"),
            optional_address(lse, (tokens, num_heads), FLOAT32, "lse"),
        )
        return out

    def _step(self, meta: AttentionMetadata, cache: CpuKVCache, num_heads: int) -> PenstockAttentionStep:
        """Convert planned metadata to its native form, from the program being recorded or from the last steps.

        Raises:
            ValueError: the plan was made for other heads, another cache or another number of threads.
        """
        cache.check_plan(meta, num_heads, self.threads)
        if self._recorder is not None and (recorded := self._recorder.step(meta)) is not None:
            return recorded
        return remembered(
            self._steps, id(meta), REMEMBERED_STEPS, lambda: (meta, fill_step(PenstockAttentionStep(), meta))
        )[1]

    # --- logits ----------------------------------------------------------------------------------------------------

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out = self._output(out, shape, FLOAT32)
        at, to = address(logits, shape, FLOAT32, "logits"), address(out, shape, FLOAT32, "out")
        self._call("penstock_log_softmax", (), at, rows, vocab_size, to)
        return out

    def choose(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        rows, vocab_size = shape = rows_of(logits, "logits")
        at = address(logits, shape, FLOAT32, "logits")
        if params is not self._filled[0] or shape != self._filled[1]:
            self._filled = None, shape
            fill_sampling(self._sampling, params, rows, vocab_size)
            self._filled = params, shape
        ids, healthy = np.empty(rows, INT64), np.empty(rows, BOOL)
        self._call("penstock_finite_rows", (), at, rows, vocab_size, address_of(healthy))
        hide_forms(logits, params)
        self._call("penstock_sample", (), at, rows, vocab_size, ctypes.addressof(self._sampling), address_of(ids))
        return self.tensor(ids), self.tensor(healthy)

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        found = score_tokens(as_array(self.log_softmax(logits)), as_array(ids), num_top)
        return TokenScores(self.tensor(found.ids), self.tensor(found.logprobs), self.tensor(found.ranks))

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
        return lambda: [as_array(tensor) for tensor in tensors]
