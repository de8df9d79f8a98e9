"""Arguments of native attention: the cache of a layer, the parameters of its scores, and the sequences of a step.

native/attention/attention.h has the layout of a cache; here it is memory of the right size.
"""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import NotSupportedError
from penstock.kernels.attention.layout import (
    GRANULE,
    MAX_HEAD_DIM,
    AttentionShape,
    cache_token_bytes,
    padded_head_dim,
)
from penstock.kernels.attention.plan import Planner
from penstock.kernels.cpu.abi import ABI
from penstock.kernels.cpu.arguments import address
from penstock.kernels.cpu.library import PenstockAttention, PenstockAttentionStep, PenstockCache
from penstock.kernels.cpu.packed import empty
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, Heads, KVCache, KVScales

KINDS = dict(zip((torch.float32, torch.bfloat16, torch.int8), ABI.enums["CacheKind"].values(), strict=False))
SLICES = (2, 3)  # of an int8 cache
CHANNEL_FIELDS = ("key_scales", "key_offsets", "value_scales", "value_offsets")
F32, I32, I64 = torch.float32, torch.int32, torch.int64


class CpuKVCache:
    """Keys and values of one layer.

    Attributes:
        memory: [num_blocks, block bytes] uint8.
        slices: int8 only: int8 rows per query row; else 0.
        token_scales: int8 only: one scale per token, not per channel.
        address: address of the PenstockCache.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        slices: int = 0,
        scales: KVScales | None = None,
    ) -> None:
        """Allocate memory without initialising it; arguments as for Ops.new_kv_cache.

        Raises:
            NotSupportedError: the native kernels do not support such a cache.
        """
        _check_cache(block_size, num_kv_heads, head_dim, dtype, slices, scales)
        self.dtype_name = name = _name(dtype)
        self.dtype = dtype
        self.block_size, self.num_kv_heads, self.head_dim = block_size, num_kv_heads, head_dim
        self.slices, self.token_scales = slices, scales is None
        token_bytes = cache_token_bytes(num_kv_heads, head_dim, name, token_scales=self.token_scales)
        self.memory = empty((num_blocks, block_size * token_bytes), torch.uint8)
        self.num_bytes = self.memory.nbytes
        self._planners: dict[tuple[object, ...], Planner] = {}
        self._scales = None if scales is None else _padded(scales, head_dim)
        self.struct = PenstockCache(
            memory=self.memory.data_ptr(),
            blocks=num_blocks,
            block_size=block_size,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            padded_dim=padded_head_dim(head_dim),
            kind=KINDS[dtype],
            slices=slices,
        )
        if self._scales is not None:
            for field, tensor in zip(CHANNEL_FIELDS, self._scales, strict=True):
                setattr(self.struct, field, tensor.data_ptr())
        self.address = ctypes.addressof(self.struct)

    def planner(self, num_heads: int, dtype: torch.dtype, level: str, threads: int, meta: AttentionMetadata) -> Planner:
        """Return the planner for a number of query heads and a type of queries and results; layers share it."""
        key = num_heads, dtype, level, threads, meta.sliding_window, meta.num_sink_tokens
        if key not in self._planners:
            cache = self.num_kv_heads, self.head_dim, self.dtype_name, self.slices, self.token_scales
            shape = AttentionShape(num_heads, *cache, _name(dtype), level)
            window = meta.sliding_window, meta.num_sink_tokens
            self._planners[key] = Planner(shape, self.block_size, *window, threads)
        return self._planners[key]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def own_cache(cache: KVCache) -> CpuKVCache:
    """Return the cache.

    Raises:
        TypeError: it belongs to another backend.
    """
    if type(cache) is not CpuKVCache:
        raise TypeError(f"a cache of another backend: {type(cache).__name__}")
    return cache


def _check_cache(
    block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, slices: int, scales: KVScales | None
) -> None:
    if block_size < 1 or block_size % GRANULE:
        raise NotSupportedError(
            f"block_size: {block_size}; the native kernels need a multiple of {GRANULE}", param="block_size"
        )
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        message = f"head_dim: {head_dim}; the native kernels support even ones up to {MAX_HEAD_DIM}, 'reference' any"
        raise NotSupportedError(message, param="head_dim")
    if dtype not in KINDS:
        raise NotSupportedError(
            f"kv_cache_dtype: {dtype}; supported are float32, bfloat16 and int8", param="kv_cache_dtype"
        )
    if dtype is torch.int8 and slices not in SLICES:
        raise NotSupportedError(f"slices: {slices}; the native kernels support 2 and 3", param="slices")
    if dtype is not torch.int8 and (slices or scales is not None):
        raise NotSupportedError("slices, scales: only an int8 cache has them", param="slices")
    if scales is not None:
        for name in CHANNEL_FIELDS:
            address(getattr(scales, name), (num_kv_heads, head_dim), F32, name)


def _padded(scales: KVScales, head_dim: int) -> tuple[Tensor, ...]:
    """Return scales and offsets [Hkv, D], zero-padded to the padded head dim."""
    extra = padded_head_dim(head_dim) - head_dim
    return tuple(torch.nn.functional.pad(getattr(scales, name), (0, extra)).contiguous() for name in CHANNEL_FIELDS)


class NativeParams:
    """AttentionParams as a structure for native functions; keeps the tensors that it points to alive."""

    def __init__(self, params: AttentionParams, num_heads: int) -> None:
        """Check and copy the parameters.

        Raises:
            ValueError: slopes or sink logits are not [H] float32; softcap is not above 0.
        """
        if params.softcap is not None and not params.softcap > 0:
            raise ValueError(f"softcap: {params.softcap} is not above 0")
        self.params = params
        self.struct = PenstockAttention(
            scale=params.scale, softcap=params.softcap or 0.0, bias_before_scale=params.bias_before_scale
        )
        if params.alibi_slopes is not None:
            self.struct.slopes = address(params.alibi_slopes, (num_heads,), F32, "alibi_slopes")
        if params.sink_logits is not None:
            self.struct.sink_logits = address(params.sink_logits, (num_heads,), F32, "sink_logits")
        self.address = ctypes.addressof(self.struct)


def planned(meta: AttentionMetadata, heads: Heads, cache: CpuKVCache, planner: Planner) -> AttentionMetadata:
    """Return the metadata with a plan for these heads and this cache.

    Raises:
        ValueError: a tensor has another type or shape than kernels/metadata.py says, or a block is missing.
    """
    num_seqs, num_tokens = len(meta.seq_lens), len(meta.slot_mapping)
    address(meta.query_start_loc, (num_seqs + 1,), I32, "query_start_loc")
    address(meta.seq_lens, (num_seqs,), I32, "seq_lens")
    address(meta.block_table, (num_seqs, meta.block_table.shape[-1]), I32, "block_table")
    address(meta.slot_mapping, (num_tokens,), I64, "slot_mapping")
    if meta.block_size != cache.block_size:
        raise ValueError(f"block_size: {meta.block_size} where the cache has {cache.block_size}")
    if (heads.num_kv_heads, heads.head_dim) != (cache.num_kv_heads, cache.head_dim) or (
        heads.num_heads % heads.num_kv_heads
    ):
        raise ValueError(f"heads: {heads} does not fit a cache of {cache.num_kv_heads} heads of {cache.head_dim}")
    meta.check_blocks(cache.struct.blocks)
    plan = planner.plan(meta.query_start_loc.numpy(), meta.seq_lens.numpy(), meta.block_table.numpy())
    return replace(meta, plan=plan)


def check_plan(meta: AttentionMetadata, cache: CpuKVCache, num_heads: int, threads: int) -> None:
    """Raise ValueError unless the plan fits these heads, this cache and this number of threads."""
    plan = meta.plan
    if plan is None:
        raise ValueError("plan: the metadata has no plan")
    shape = plan.shape
    fits = shape.num_heads == num_heads and shape.num_kv_heads == cache.num_kv_heads
    fits &= shape.head_dim == cache.head_dim and shape.kv_cache_dtype == cache.dtype_name
    fits &= shape.slices == cache.slices and shape.token_scales == cache.token_scales
    if not fits or meta.block_size != cache.block_size or len(plan.starts) != threads + 1:
        raise ValueError(f"plan: made for {shape}, blocks of {meta.block_size}, {len(plan.starts) - 1} threads")


def fill_step(step: PenstockAttentionStep, meta: AttentionMetadata) -> None:
    """Write planned metadata. The step keeps addresses of its tensors, so meta has to outlive the step."""
    plan = meta.plan
    if plan is None:
        raise ValueError("plan: the metadata has no plan")
    step.sequences, step.tokens = len(meta.seq_lens), len(meta.slot_mapping)
    step.query_start_loc = meta.query_start_loc.data_ptr()
    step.seq_lens = meta.seq_lens.data_ptr()
    step.block_table = meta.block_table.data_ptr()
    step.max_blocks = meta.block_table.shape[1]
    step.slot_mapping = meta.slot_mapping.data_ptr()
    step.sliding_window = meta.sliding_window or 0
    step.num_sink_tokens = meta.num_sink_tokens
    step.positions = plan.positions.ctypes.data
    step.items, step.combines = len(plan.items), len(plan.combines)
    step.item = plan.items.ctypes.data
    step.item_starts = plan.starts.ctypes.data
    step.combine = plan.combines.ctypes.data
    step.references = plan.references.ctypes.data
    step.staged = plan.staged.ctypes.data
    step.partial_rows = plan.partial_rows


def new_step(meta: AttentionMetadata) -> PenstockAttentionStep:
    """Return a step for planned metadata; see `fill_step`."""
    step = PenstockAttentionStep()
    fill_step(step, meta)
    return step
