"""Arguments of native attention: the cache of a layer, the parameters of its scores, and plans.

native/attention/attention.h describes the layout of a cache. Python only allocates memory of the right size.
"""

import ctypes
from dataclasses import replace

import numpy as np

from penstock.errors import NotSupportedError
from penstock.kernels.attention.layout import (
    GRANULE,
    MAX_HEAD_DIM,
    AttentionShape,
    cache_token_bytes,
    padded_head_dim,
)
from penstock.kernels.attention.plan import Planner
from penstock.kernels.cpu.calls import address, check_tensor
from penstock.kernels.cpu.library import ABI, PenstockAttention, PenstockCache
from penstock.kernels.metadata import AttentionMetadata, AttentionParams, CacheSpec, Heads
from penstock.kernels.tensors import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    ArrayType,
    address_of,
    array_type,
    as_array,
    dtype_of,
    empty,
)

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
        """Return the metadata with a plan for these heads, queries and results of type `dtype`, and this cache.

        A caller may pass the metadata of its previous call again, after writing the next step's lengths and slots into
        the same tensors, if the blocks are the same. If the plan also fits that step, the previous result is returned.

        Raises:
            ValueError: the type or shape of a tensor is not that of kernels/metadata.py, or a block is missing.
        """
        key = heads.num_heads, dtype, level, threads, meta.sliding_window, meta.num_sink_tokens
        if self._last is not None and self._last[0] is meta and self._last[1] == key:
            planned = self._last[2]
            if planned.plan is not None and self._planners[key].renew(planned.plan, as_array(meta.seq_lens)):
                return planned
        self._check(meta, heads)
        meta.check_blocks(self.spec.num_blocks)
        planner = self._planners.get(key)
        if planner is None:
            shape = AttentionShape(heads.num_heads, *self._shape, str(dtype), level)
            planner = Planner(shape, self.spec.block_size, meta.sliding_window, meta.num_sink_tokens, threads)
            self._planners[key] = planner
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
    if dtype is INT8 and slices not in SLICES:
        raise NotSupportedError(f"slices: {slices}; the native kernels support 2 and 3", param="slices")
    if dtype is not INT8 and (slices or spec.scales is not None):
        raise NotSupportedError("slices, scales: only an int8 cache has them", param="slices")
    for name in CHANNEL_FIELDS if spec.scales is not None else ():
        address(getattr(spec.scales, name), (spec.num_kv_heads, head_dim), FLOAT32, name)


class NativeParams:
    """AttentionParams as a structure for native functions. It keeps the tensors that it points to alive."""

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
            self.struct.slopes = address(params.alibi_slopes, (num_heads,), FLOAT32, "alibi_slopes")
        if params.sink_logits is not None:
            self.struct.sink_logits = address(params.sink_logits, (num_heads,), FLOAT32, "sink_logits")
        self.address = ctypes.addressof(self.struct)
