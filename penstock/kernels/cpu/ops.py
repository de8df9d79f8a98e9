"""CpuOps: every operation is one call of the native library with the addresses of tensors.

Bits depend only on the instruction level, never on the batch or the threads (native/abi.h). A decode step makes about
180 calls, so the checks of each call are cheap, and a call allocates nothing if `out=` is given.
"""

import ctypes
from collections import Counter

import numpy as np

from penstock.kernels.cpu.attention import CpuKVCache, NativeParams
from penstock.kernels.cpu.calls import address, optional_address, remembered, rows_of
from penstock.kernels.cpu.library import PenstockAttentionStep, PenstockSampling, check_status
from penstock.kernels.cpu.products import ProductOps
from penstock.kernels.cpu.program import fill_step
from penstock.kernels.cpu.rows import RowOps
from penstock.kernels.metadata import (
    AttentionMetadata,
    AttentionParams,
    CacheSpec,
    Heads,
    KVCache,
    check_block_ids,
    own,
)
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
    as_array,
    is_torch,
)

REMEMBERED_STEPS = 8  # number of steps whose native form is kept for further layers
REMEMBERED_PARAMS = 1024  # number of layers whose NativeParams are kept


class CpuOps(ProductOps, RowOps):
    """All operations at one instruction level: products and operations on rows from the base classes, attention and
    logits here. It runs one call at a time, so every engine has its own.

    Attributes:
        plan_counts: number of plans made for each plan key (kernels/attention/plan.py).
    """

    def __init__(self, dtype: Dtype, *, threads: int = 1, level: str | None = None) -> None:
        super().__init__(dtype, threads=threads, level=level)
        self._sampling = PenstockSampling()
        self._filled: tuple[SamplingTensors | None, tuple[int, int]] = None, (0, 0)  # what filled _sampling
        self._params: dict[tuple[AttentionParams, int], NativeParams] = {}
        self._steps: dict[int, tuple[AttentionMetadata, PenstockAttentionStep]] = {}
        self.plan_counts: Counter[int] = Counter()
        self._reserved = (0, 0)  # bytes of workspace and scratch memory of attention

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
