"""CpuOps: every operation is one call of the native library with the addresses of tensors.

Bits depend only on the instruction level, never on the batch or the threads (native/abi.h). A decode step makes about
180 calls, so the checks of each are cheap, and it allocates nothing if `out=` is given.
"""

import ctypes
from collections import Counter

import torch
from torch import Tensor

from penstock.kernels.cpu.arguments import address, optional_address, output, rows_of
from penstock.kernels.cpu.attention import CpuKVCache, NativeParams, check_plan, new_step, own_cache, planned
from penstock.kernels.cpu.calls import remembered
from penstock.kernels.cpu.library import PenstockAttentionStep, PenstockSampling, check_status
from penstock.kernels.cpu.products import ProductOps
from penstock.kernels.cpu.rows import RowOps
from penstock.kernels.cpu.sampling import fill_sampling
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, Heads, KVCache, KVScales
from penstock.kernels.sampling import SamplingTensors

F32, I64 = torch.float32, torch.int64
REMEMBERED_STEPS = 8  # steps whose native form is kept for the other layers
REMEMBERED_PARAMS = 1024  # layers whose NativeParams are kept


class CpuOps(ProductOps, RowOps):
    """All operations at one instruction level: products, operations on rows, and here attention and logits. Runs one
    call at a time, so every engine has its own.

    Attributes:
        plan_counts: number of plans by key of the kind of attention (kernels/attention/key.py).
    """

    def __init__(self, dtype: torch.dtype, *, threads: int = 1, level: str | None = None) -> None:
        super().__init__(dtype, threads=threads, level=level)
        self._sampling = PenstockSampling()
        self._params: dict[tuple[AttentionParams, int], NativeParams] = {}
        self._steps: dict[int, tuple[AttentionMetadata, PenstockAttentionStep]] = {}
        self.plan_counts: Counter[int] = Counter()
        self._reserved = (0, 0)  # bytes of workspace and scratch memory of attention

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
        out = output(out, shape, self.dtype)
        step = self._step(meta, own, num_heads)
        native_params = remembered(
            self._params, (params, num_heads), REMEMBERED_PARAMS, lambda: NativeParams(params, num_heads)
        )
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
        """Return the native form of planned metadata: that of the program being recorded, or of one of the last steps.

        Raises:
            ValueError: the plan was made for other heads, another cache or another number of threads.
        """
        check_plan(meta, cache, num_heads, self.threads)
        recorded = None if self._recorder is None else self._recorder.step(meta)
        if recorded is not None:
            return recorded
        return remembered(self._steps, id(meta), REMEMBERED_STEPS, lambda: (meta, new_step(meta)))[1]

    # --- logits ----------------------------------------------------------------------------------------------------

    def finite_rows(self, logits: Tensor) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out = torch.empty(rows, dtype=torch.bool)
        self._call("penstock_finite_rows", (), address(logits, shape, F32, "logits"), rows, vocab_size, out.data_ptr())
        return out

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        rows, vocab_size = shape = rows_of(logits, "logits")
        out = output(out, shape, F32)
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
