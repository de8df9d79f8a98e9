"""What native attention is told: a layer's cache, how it makes scores, and where a step's sequences stand.

The layout of a cache is native/attention.h's; here it is memory of the right size.
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
from penstock.kernels.cpu.arguments import address
from penstock.kernels.cpu.library import PenstockAttention, PenstockAttentionStep, PenstockCache
from penstock.kernels.cpu.packed import empty
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, Heads, KVCache, KVScales

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # native/attention.h, CacheKind
SLICES = (2, 3)  # of an int8 cache
F32, I32, I64 = torch.float32, torch.int32, torch.int64


class CpuKVCache:
    """Keys and values of one layer.

    Attributes:
        memory: [num_blocks, block bytes] uint8.
        slices: int8 only: rows that stand for a query row; else 0.
        token_scales: int8 only: scales belong to tokens, not to channels.
        address: of the PenstockCache that native functions get.
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
        """Not initialised; arguments as for Ops.new_kv_cache.

        Raises:
            NotSupportedError: the native kernels have no such cache.
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
        """That of all layers with so many query heads and such a cache; dtype is that of queries and results."""
        key = num_heads, dtype, level, threads, meta.sliding_window, meta.num_sink_tokens
        known = self._planners.get(key)
        if known is None:
            shape = AttentionShape(
                num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.dtype_name,
                self.slices,
                self.token_scales,
                _name(dtype),
                level,
            )
            known = Planner(shape, self.block_size, meta.sliding_window, meta.num_sink_tokens, threads)
            self._planners[key] = known
        return known


CHANNEL_FIELDS = ("key_scales", "key_offsets", "value_scales", "value_offsets")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def own_cache(cache: KVCache) -> CpuKVCache:
    """The cache as one of this backend."""
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
        message = f"head_dim: {head_dim}; the native kernels have even ones up to {MAX_HEAD_DIM}, 'reference' has any"
        raise NotSupportedError(message, param="head_dim")
    if dtype not in KINDS:
        raise NotSupportedError(
            f"kv_cache_dtype: {dtype}; there are float32, bfloat16 and int8", param="kv_cache_dtype"
        )
    if dtype is torch.int8 and slices not in SLICES:
        raise NotSupportedError(f"slices: {slices}; the native kernels have 2 and 3", param="slices")
    if dtype is not torch.int8 and (slices or scales is not None):
        raise NotSupportedError("slices, scales: only an int8 cache has them", param="slices")
    if scales is not None:
        for name in CHANNEL_FIELDS:
            address(getattr(scales, name), (num_kv_heads, head_dim), F32, name)


def _padded(scales: KVScales, head_dim: int) -> tuple[Tensor, ...]:
    """Scales and offsets [Hkv, D] with zeros up to the padded head dim."""
    extra = padded_head_dim(head_dim) - head_dim
    return tuple(torch.nn.functional.pad(getattr(scales, name), (0, extra)).contiguous() for name in CHANNEL_FIELDS)


class NativeParams:
    """AttentionParams as the native functions read them, and the tensors behind them."""

    def __init__(self, params: AttentionParams, num_heads: int) -> None:
        """Check and take them.

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
    """The metadata with a plan for these heads and this cache.

    Raises:
        ValueError: its tensors are of another type or shape than kernels/metadata.py says, or a block is missing.
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
    """Raise ValueError unless the plan is for such heads, such a cache and so many threads."""
    plan = meta.plan
    if plan is None:
        raise ValueError("plan: attention runs only what was planned")
    shape = plan.shape
    fits = shape.num_heads == num_heads and shape.num_kv_heads == cache.num_kv_heads
    fits &= shape.head_dim == cache.head_dim and shape.kv_cache_dtype == cache.dtype_name
    fits &= shape.slices == cache.slices and shape.token_scales == cache.token_scales
    if not fits or meta.block_size != cache.block_size or len(plan.starts) != threads + 1:
        raise ValueError(f"plan: made for {shape}, blocks of {meta.block_size}, {len(plan.starts) - 1} threads")


def fill_step(step: PenstockAttentionStep, meta: AttentionMetadata) -> None:
    """Write what `planned` has checked. The step keeps addresses: meta has to outlive its use."""
    plan = meta.plan
    if plan is None:
        raise ValueError("plan: attention runs only what was planned")
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
