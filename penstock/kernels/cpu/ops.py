"""CpuOps: every operation by one call of the native library, with addresses of tensors.

Bits depend on the instruction level only, never on the batch or on threads (native/abi.h). A decode step makes about
180 calls, so each checks its tensors cheaply and allocates nothing where `out=` is given.
"""

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.errors import EngineError, InvalidRequestError
from penstock.kernels.cpu.arguments import TYPES, activation_code, address, optional_address, rows_of
from penstock.kernels.cpu.attention import CpuKVCache, NativeParams, check_plan, fill_step, own_cache, planned
from penstock.kernels.cpu.library import (
    LEVELS,
    SIGNATURES,
    PenstockAttentionStep,
    PenstockSampling,
    PenstockWeight,
    check_status,
    chosen_level,
    load_library,
    why_missing,
)
from penstock.kernels.cpu.packed import CpuLinear, Layout, pack
from penstock.kernels.cpu.program import Program, Recorder
from penstock.kernels.cpu.sampling import fill_sampling
from penstock.kernels.ops import (
    AttentionMetadata,
    AttentionParams,
    Heads,
    KVCache,
    KVScales,
    PackedLinear,
    RowSource,
    TensorRows,
)
from penstock.kernels.sampling import SamplingTensors
from penstock.quant.scheme import Scheme
from penstock.validation import check_choice

F32, I64 = torch.float32, torch.int64
REMEMBERED_STEPS = 8  # whose native form is kept for the layers to come
REMEMBERED_PARAMS = 1024  # of layers


class CpuOps:
    """All operations at one instruction level. It carries out one call at a time, so every engine has its own.

    Attributes:
        dtype: type of weights and of what products read.
        level: name of the instruction level, which decides the bits.
        threads: that compute, the caller's included.
        plan_counts: how often each kind of attention was planned, by its key (kernels/attention/key.py).
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, *, threads: int = 1, level: str | None = None) -> None:
        """Start the threads. Without a level it is the machine's best, or the one that the environment forces.

        Raises:
            InvalidRequestError: there is no native library, or no such level.
            EngineError: the threads cannot be had.
        """
        library, level = load_library(), level or chosen_level()
        if library is None or level is None:
            raise InvalidRequestError(f"kernels: 'cpu' is not installed: {why_missing()}", param="kernels")
        check_choice("level", level, LEVELS[: library.penstock_best_level() + 1])
        context = library.penstock_context_new(LEVELS.index(level), threads)
        if not context:
            raise EngineError(f"the native kernels cannot start at level {level} with {threads} threads")
        weakref.finalize(self, library.penstock_context_free, context).atexit = False
        self.dtype = dtype
        self.level = level
        self.threads = threads
        self._type = TYPES[dtype]
        self._context: int = context
        self._library = library
        self._native: dict[str, Callable[..., int]] = {name: getattr(library, name) for name in SIGNATURES}
        self._sampling = PenstockSampling()
        self._params: dict[tuple[AttentionParams, int], NativeParams] = {}
        self._steps: dict[int, tuple[AttentionMetadata, PenstockAttentionStep]] = {}
        self.plan_counts: Counter[int] = Counter()
        self._reserved = (0, 0)  # workspace and scratch bytes of attention
        self._recorder: Recorder | None = None

    def _call(self, name: str, used: tuple[object, ...], *arguments: int | float | None) -> None:
        """Carry out one native function; `used` are the owners of the memory behind its arguments.

        Raises:
            ValueError, MemoryError: as library.check_status.
        """
        if self._recorder is not None:
            self._recorder.call(name, arguments)
            self._recorder.keep(*used)
        if status := self._native[name](self._context, *arguments):
            check_status(status)

    def record(
        self, forward: Callable[[], Tensor], attention: Sequence[AttentionMetadata]
    ) -> tuple[Tensor, Program | None]:
        """Run a forward pass and write down what it did; see `kernels.ops.RecordingOps`."""
        recorder = Recorder(attention, partial(self._native["penstock_replay"], self._context))
        recorder.keep(self)
        self._recorder = recorder
        try:
            with recorder:
                result = forward()
        finally:
            self._recorder = None
        return result, recorder.program(result)

    # --- products with a weight ------------------------------------------------------------------------------------

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
        return self._product(x, _own(weight, gated=False), 0, F32, 0, out)

    def gated_linear(self, x: Tensor, weight: PackedLinear, activation: str, *, out: Tensor | None = None) -> Tensor:
        return self._product(x, _own(weight, gated=True), activation_code(activation), self.dtype, self._type, out)

    def _product(
        self, x: Tensor, weight: CpuLinear, activation: int, dtype: torch.dtype, out_type: int, out: Tensor | None
    ) -> Tensor:
        rows, _ = rows_of(x, "x")
        shape = (rows, weight.outputs)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        x_at, out_at = address(x, (rows, weight.depth), self.dtype, "x"), address(out, shape, dtype, "out")
        self._call(
            "penstock_linear", (x, weight, out), weight.address, x_at, self._type, rows, out_at, out_type, activation
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
        gates, downs = [_own(item, gated=True) for item in gate_up], [_own(item, gated=False) for item in down]
        _check_experts(gates, downs)
        (rows, _), (_, top_k) = rows_of(x, "x"), rows_of(ids, "ids")
        ids_at = address(ids, (rows, top_k), I64, "ids")
        if out is None:
            out = torch.empty((rows, downs[0].outputs), dtype=F32)
        gate_array, down_array = _weight_array(gates), _weight_array(downs)
        self._call(
            "penstock_experts",
            (x, gates, downs, gate_array, down_array, ids, weights, out),
            ctypes.addressof(gate_array),
            ctypes.addressof(down_array),
            len(gates),
            address(x, (rows, gates[0].depth), self.dtype, "x"),
            self._type,
            rows,
            top_k,
            ids_at,
            address(weights, (rows, top_k), F32, "weights"),
            activation_code(activation),
            address(out, (rows, downs[0].outputs), F32, "out"),
        )
        return out

    def route(self, logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
        rows, experts = rows_of(logits, "logits")
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k: {top_k} of {experts} experts")
        at = address(logits, (rows, experts), F32, "logits")
        ids, weights = torch.empty((rows, top_k), dtype=I64), torch.empty((rows, top_k), dtype=F32)
        self._call(
            "penstock_route",
            (logits, ids, weights),
            at,
            rows,
            experts,
            top_k,
            renormalize,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

    # --- row operations --------------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, (vocab_size, hidden) = len(ids), rows_of(weight, "weight")
        table, at = address(weight, (vocab_size, hidden), self.dtype, "weight"), address(ids, (rows,), I64, "ids")
        if out is None:
            out = torch.empty((rows, hidden), dtype=F32)
        to = address(out, (rows, hidden), F32, "out")
        self._call("penstock_embedding", (ids, weight, out), at, table, self._type, vocab_size, rows, hidden, to)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        rows, hidden = shape = rows_of(x, "x")
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        self._call(
            "penstock_rms_norm",
            (x, weight, out),
            address(x, shape, F32, "x"),
            address(weight, (hidden,), F32, "weight"),
            eps,
            rows,
            hidden,
            address(out, shape, self.dtype, "out"),
            self._type,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, h: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, hidden = shape = rows_of(x, "x")
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        self._call(
            "penstock_add_rms_norm",
            (x, h, weight, out),
            address(x, shape, F32, "x"),
            address(h, shape, F32, "h"),
            address(weight, (hidden,), F32, "weight"),
            eps,
            rows,
            hidden,
            address(out, shape, self.dtype, "out"),
            self._type,
        )
        return x, out

    def rotary_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        heads: tuple[int, int, int],
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        out: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = heads
        rows, dtype = qkv.shape[0], self.dtype
        q_shape, kv_shape = (rows, num_heads, head_dim), (rows, num_kv_heads, head_dim)
        if out is None:
            q, k, v = (torch.empty(shape, dtype=dtype) for shape in (q_shape, kv_shape, kv_shape))
        else:
            q, k, v = out
        positions_at, cos_sin_at = address(positions, (rows,), I64, "positions"), None
        num_positions = rotary_dim = 0
        if cos_sin is not None:
            num_positions, rotary_dim = rows_of(cos_sin, "cos_sin")
            cos_sin_at = address(cos_sin, (num_positions, rotary_dim), F32, "cos_sin")
            if rotary_dim > head_dim or rotary_dim % 2:
                raise ValueError(f"cos_sin: {rotary_dim} columns; an even number up to {head_dim} is needed")
        self._call(
            "penstock_rotary_qkv",
            (qkv, positions, cos_sin, q_norm, k_norm, q, k, v),
            address(qkv, (rows, (num_heads + 2 * num_kv_heads) * head_dim), F32, "qkv"),
            positions_at,
            cos_sin_at,
            num_positions,
            rotary_dim,
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            optional_address(q_norm, (head_dim,), F32, "q_norm"),
            optional_address(k_norm, (head_dim,), F32, "k_norm"),
            eps,
            address(q, q_shape, dtype, "q"),
            address(k, kv_shape, dtype, "k"),
            address(v, kv_shape, dtype, "v"),
            self._type,
        )
        return q, k, v

    # --- attention -------------------------------------------------------------------------------------------------

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        slices: int = 0,
        scales: KVScales | None = None,
    ) -> KVCache:
        return CpuKVCache(num_blocks, block_size, num_kv_heads, head_dim, dtype, slices, scales)

    def store_kv(self, cache: KVCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        own = own_cache(cache)
        tokens, shape = len(slots), (len(slots), own.num_kv_heads, own.head_dim)
        k_at, v_at = address(k, shape, self.dtype, "k"), address(v, shape, self.dtype, "v")
        slots_at = address(slots, (tokens,), I64, "slots")
        self._call("penstock_cache_store", (k, v, slots), own.address, k_at, v_at, self._type, slots_at, tokens)

    def load_kv(self, cache: KVCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        own = own_cache(cache)
        k, v = (torch.empty((len(slots), own.num_kv_heads, own.head_dim), dtype=F32) for _ in range(2))
        slots_at = address(slots, (len(slots),), I64, "slots")
        self._call("penstock_cache_load", (slots,), own.address, slots_at, len(slots), k.data_ptr(), v.data_ptr())
        return k, v

    def plan(self, meta: AttentionMetadata, heads: Heads, cache: KVCache) -> AttentionMetadata:
        own = own_cache(cache)
        meta = planned(meta, heads, own, own.planner(heads.num_heads, self.dtype, self.level, self.threads, meta))
        if meta.plan is not None:
            self.plan_counts[meta.plan.key] += 1
            self._reserve(meta.plan.workspace_bytes, meta.plan.scratch_bytes)
        return meta

    def _reserve(self, workspace_bytes: int, scratch_bytes: int) -> None:
        workspace, scratch = self._reserved
        if workspace_bytes > workspace or scratch_bytes > scratch:
            needed = max(workspace, workspace_bytes), max(scratch, scratch_bytes)
            check_status(self._native["penstock_attention_reserve"](self._context, *needed))
            self._reserved = needed

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
        own = own_cache(cache)
        tokens, num_heads, head_dim = q.shape
        kv_shape, shape = (tokens, own.num_kv_heads, head_dim), (tokens, num_heads * head_dim)
        if len(meta.slot_mapping) != tokens:
            raise ValueError(f"q: {tokens} tokens where the metadata has {len(meta.slot_mapping)}")
        if meta.plan is None:
            meta = self.plan(meta, Heads(num_heads, own.num_kv_heads, head_dim), own)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        step, native_params = self._step(meta, own, num_heads), self._native_params(params, num_heads)
        self._call(
            "penstock_attend",
            (q, k_new, v_new, own, out, lse, native_params),
            ctypes.addressof(step),
            own.address,
            native_params.address,
            address(q, (tokens, num_heads, own.head_dim), self.dtype, "q"),
            address(k_new, kv_shape, self.dtype, "k_new"),
            address(v_new, kv_shape, self.dtype, "v_new"),
            self._type,
            num_heads,
            address(out, shape, self.dtype, "out"),
            optional_address(lse, (tokens, num_heads), F32, "lse"),
        )
        return out

    def _step(self, meta: AttentionMetadata, cache: CpuKVCache, num_heads: int) -> PenstockAttentionStep:
        """The native form of planned metadata: that of the program being recorded, or of the last few steps.

        Raises:
            ValueError: the plan was made for other heads, another cache or another number of threads.
        """
        check_plan(meta, cache, num_heads, self.threads)
        recorded = None if self._recorder is None else self._recorder.step(meta)
        if recorded is not None:
            return recorded
        known = self._steps.get(id(meta))
        if known is None:
            if len(self._steps) >= REMEMBERED_STEPS:
                self._steps.clear()
            known = self._steps[id(meta)] = meta, PenstockAttentionStep()
            fill_step(known[1], meta)
        return known[1]

    def _native_params(self, params: AttentionParams, num_heads: int) -> NativeParams:
        known = self._params.get((params, num_heads))
        if known is None:
            if len(self._params) >= REMEMBERED_PARAMS:
                self._params.clear()
            known = self._params[params, num_heads] = NativeParams(params, num_heads)
        return known

    # --- logits ----------------------------------------------------------------------------------------------------

    def finite_rows(self, logits: Tensor) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out = torch.empty(rows, dtype=torch.bool)
        self._call("penstock_finite_rows", (), address(logits, shape, F32, "logits"), rows, vocab_size, out.data_ptr())
        return out

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        if out is None:
            out = torch.empty(shape, dtype=F32)
        at, to = address(logits, shape, F32, "logits"), address(out, shape, F32, "out")
        self._call("penstock_log_softmax", (), at, rows, vocab_size, to)
        return out

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        at = address(logits, shape, F32, "logits")
        fill_sampling(self._sampling, params, rows, vocab_size)
        out = torch.empty(rows, dtype=I64)
        self._call("penstock_sample", (), at, rows, vocab_size, ctypes.addressof(self._sampling), out.data_ptr())
        return out

    # --- measurements -----------------------------------------------------------------------------------

    def kernel_seconds(self) -> float:
        """Seconds that operations have taken so far; the rest of a step is Python and torch."""
        seconds: float = self._library.penstock_busy_seconds(self._context)
        return seconds

    def limit_read(self, memory: Tensor) -> float:
        """Seconds that all threads need to read this memory once."""
        seconds: float = self._library.penstock_limit_read(self._context, memory.data_ptr(), memory.nbytes)
        return seconds

    def limit_multiply(self, kind: int, iterations: int) -> tuple[int, float]:
        """Multiply in registers with all threads, kind 0 float32, 1 bfloat16, 2 int8: operations, and seconds."""
        operations = ctypes.c_int64()
        at = ctypes.addressof(operations)
        seconds = self._library.penstock_limit_multiply(self._context, kind, iterations, at)
        return operations.value, seconds


def _own(weight: PackedLinear, *, gated: bool) -> CpuLinear:
    if type(weight) is not CpuLinear:
        raise TypeError(f"a weight packed by another backend: {type(weight).__name__}")
    if weight.gated is not gated:
        raise ValueError(f"a weight packed {'for' if weight.gated else 'without'} a gate is used otherwise")
    return weight


def _check_experts(gate_up: list[CpuLinear], down: list[CpuLinear]) -> None:
    """As many of one kind as of the other, and all of one shape."""
    shapes = {(gate.shape, plain.shape) for gate, plain in zip(gate_up, down, strict=True)}
    if len(shapes) != 1 or gate_up[0].outputs != down[0].depth or gate_up[0].depth != down[0].outputs:
        raise ValueError(f"experts: weights of these shapes do not follow each other: {sorted(shapes)}")


def _weight_array(weights: list[CpuLinear]) -> "ctypes.Array[PenstockWeight]":
    return (PenstockWeight * len(weights))(*(item.weight for item in weights))
