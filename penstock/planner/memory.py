"""The size of the key/value cache, decided before anything is allocated. No torch.

    bytes per block = layers of its group x block_size x cache_token_bytes (kernels/attention/layout.py)

Without an explicit size, the cache gets what max_num_seqs sequences of max_model_len need, but at most MAX_SHARE of the
free memory or, with the option `memory`, what the other entries leave (planner/ledger.py). A cache that cannot hold one
sequence of max_model_len is refused.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine.kv_cache_manager import peak_blocks, table_length
from penstock.errors import InvalidRequestError, fail
from penstock.interface.step import CacheGroup
from penstock.kernels.attention.layout import GRANULE, cache_token_bytes
from penstock.kernels.cpu.host import memory_left, read_text
from penstock.spec.model_config import ModelConfig

ENGINE_RUNTIME = 57 * 2**20  # memory of an engine's process before it loads, without torch; measured
MAX_SHARE = 0.4  # largest share of the free memory, unless kv_cache_memory_bytes is given


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache groups with their numbers of blocks, the bytes of all groups, and the reason for this size."""

    groups: list[CacheGroup]
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class _GroupNeed:
    group: CacheGroup  # without blocks
    block_bytes: int
    minimum: int  # blocks for one sequence of max_model_len
    wanted: int  # blocks for max_num_seqs such sequences


def free_memory_bytes() -> int:
    """Return the bytes that this process can still allocate, limited by the machine and by its control groups."""
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, memory_left())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # other systems do not say what is free


def plan_kv_cache(
    config: EngineConfig, model: ModelConfig, free_bytes: int, share: float | None = MAX_SHARE
) -> CachePlan:
    """Return the blocks of every cache group of a resolved config.

    Args:
        free_bytes: memory for the cache and everything allocated after it.
        share: the cache's share of free_bytes, unless kv_cache_memory_bytes is given; None: the cache may take all of
            free_bytes, because the option `memory` is set.

    Raises:
        InvalidRequestError: kv_cache_memory_bytes, or the share of the free memory, cannot hold one sequence of
            max_model_len, or exceeds the free memory.
    """
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    wanted = sum(need.wanted * need.block_bytes for need in needs)
    minimum = sum(need.minimum * need.block_bytes for need in needs)
    given = config.cache.kv_cache_memory_bytes
    if given is not None and given > free_bytes:
        raise fail("kv_cache_memory_bytes", given, f"at most the free memory, {free_bytes} bytes")
    limit = given if given is not None else int(free_bytes * (share or 1.0))
    if limit < minimum:
        raise InvalidRequestError(
            f"kv_cache_memory_bytes: {mib(limit)} cannot hold one sequence of max_model_len = "
            f"{config.scheduler.max_model_len}, which needs {mib(minimum)}; increase it or reduce max_model_len",
            param="kv_cache_memory_bytes",
        )
    counts = _share_out(needs, limit - minimum, fill=given is not None)
    groups = [replace(need.group, num_blocks=count) for need, count in zip(needs, counts, strict=True)]
    num_bytes = sum(need.block_bytes * count for need, count in zip(needs, counts, strict=True))
    source = "the rest of the memory given" if share is None else f"{share:.0%} of the free memory"
    return CachePlan(groups, num_bytes, _reason(config, num_bytes, wanted, source))


def smallest_cache_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of a cache for one sequence of max_model_len."""
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    return sum(need.minimum * need.block_bytes for need in needs)


def plan_given_cache(config: EngineConfig, model: ModelConfig, free_bytes: int, groups: list[CacheGroup]) -> CachePlan:
    """Return the plan of a cache with given groups and numbers of blocks.

    Raises:
        InvalidRequestError: the groups are not those of this model, or exceed the free memory.
    """
    needs = [_need(config, model, layers, window) for layers, window in model.cache_groups()]
    shapes = [replace(group, num_blocks=0) for group in groups]
    if shapes != [need.group for need in needs]:
        raise InvalidRequestError("the cache groups are not those of this model", param="model")
    num_bytes = sum(need.block_bytes * group.num_blocks for need, group in zip(needs, groups, strict=True))
    if num_bytes > free_bytes:
        raise InvalidRequestError(f"the cache takes {mib(num_bytes)}, but only {mib(free_bytes)} are free")
    return CachePlan(groups, num_bytes, f"{mib(num_bytes)}: as given")


def _need(config: EngineConfig, model: ModelConfig, layers: tuple[int, ...], window: int | None) -> _GroupNeed:
    """Return the needs of the cache group of these layers.

    If one block holds the longest request, each request has one block, and a shorter window makes it a ring.
    """
    scheduler, block_size = config.scheduler, config.cache.block_size
    length, chunk = scheduler.max_model_len, scheduler.max_num_batched_tokens
    if block_size is None or length is None or chunk is None:
        raise InvalidRequestError("block_size: the config is not resolved", param="block_size")
    group = CacheGroup(layers, window, 0, block_size)
    ring_size = -(-(window or block_size) // GRANULE) * GRANULE
    if length <= block_size and ring_size < block_size:
        group = CacheGroup(layers, window, 0, ring_size, ring=True)
    minimum = peak_blocks(group, length, chunk)
    # With a window, all sequences together hold at most one step's new tokens more than they hold between steps.
    new = 0 if window is None else -(-chunk // group.block_size)
    most = scheduler.max_num_seqs * table_length(group, length)
    wanted = max(minimum, min(most, scheduler.max_num_seqs * peak_blocks(group, length, 1) + new))
    return _GroupNeed(group, len(layers) * group.block_size * cached_token_bytes(config, model), minimum, wanted)


def cached_token_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes per token and layer in the cache of a resolved config's backend."""
    return cache_token_bytes(
        model.num_key_value_heads,
        model.head_dim,
        config.cache.kv_cache_dtype,
        padded=config.numerics.kernels == "cpu",
        token_scales=config.cache.kv_cache_scales is None,
    )


def _share_out(needs: list[_GroupNeed], rest: int, *, fill: bool) -> list[int]:
    """Return the blocks of each group: its minimum, plus a part of the remaining bytes in proportion to the further
    blocks that it wants. `fill` uses all bytes, even more than are wanted."""
    parts = [need.wanted - need.minimum for need in needs]
    if not any(parts):
        parts = [need.minimum if fill else 0 for need in needs]
    total = sum(part * need.block_bytes for part, need in zip(parts, needs, strict=True))
    scale = rest / total if total else 0.0
    scale = scale if fill else min(scale, 1.0)
    return [need.minimum + int(part * scale) for part, need in zip(parts, needs, strict=True)]


def _reason(config: EngineConfig, num_bytes: int, wanted: int, source: str) -> str:
    scheduler = config.scheduler
    full = f"{scheduler.max_num_seqs} sequences of {scheduler.max_model_len} tokens"
    if config.cache.kv_cache_memory_bytes is not None:
        return f"{mib(num_bytes)}: as given; {full} would need {mib(wanted)}"
    if num_bytes < wanted:
        return f"{mib(num_bytes)}: {source}; {full} would need {mib(wanted)}"
    return f"{mib(num_bytes)}: what {full} need"


def resident_bytes(*, peak: bool = False) -> int:
    """Return the physical memory of this process, including mapped files, or its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def mib(num_bytes: int) -> str:
    """Return bytes as text in MiB."""
    return f"{num_bytes / 2**20:.1f} MiB"


def size_text(num_bytes: int) -> str:
    """Return bytes as text in MiB, or in GiB from 10 GiB on."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 10 * 2**30 else mib(num_bytes)
