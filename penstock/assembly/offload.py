"""Makes the store of blocks beyond the cache that the config asks for."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError, fail
from penstock.interface.messages import BlockDirectory
from penstock.interface.step import CacheGroup
from penstock.kernels.cpu.library import chosen_level
from penstock.runner.block_store import BlockFiles, TieredBlockStore


def check_offload(config: EngineConfig) -> None:
    """Refuse a store for an engine whose blocks it cannot keep.

    Raises:
        InvalidRequestError: the engine has no model, or several processes.
    """
    name, numerics = config.cache.offload_option, config.numerics
    if name is None:
        return
    why = None
    if numerics.load_format == "mock":
        why = "mock has no keys and values to keep"
    elif config.parallel.num_ranks > 1 or config.parallel.pipeline_parallel_size > 1:
        why = "blocks of a model that several processes share cannot be saved"
    if why is not None:
        raise fail(name, getattr(config.cache, name), f"left out: {why}")


def make_store(
    config: EngineConfig, fingerprint: str, groups: Sequence[CacheGroup], block_bytes: list[int]
) -> TieredBlockStore:
    """Make the store of an engine whose config asks for one.

    fingerprint: the fingerprint of all that can change a bit.

    Raises:
        InvalidRequestError: the directory cannot be used.
    """
    cache = config.cache
    files = None
    if cache.kv_offload_dir is not None:
        layout = [(group.layers, group.sliding_window, group.chunked, group.block_size) for group in groups]
        parts = repr((fingerprint, layout, block_bytes, chosen_level()))
        name = f"{fingerprint}-{hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()}"
        files = open_files(BlockDirectory(cache.kv_offload_dir, name, cache.kv_offload_dir_bytes or 0, block_bytes))
    return TieredBlockStore(block_bytes, cache.kv_offload_memory_bytes or 0, files)


def open_files(directory: BlockDirectory) -> BlockFiles:
    """Open a directory of blocks. Raise InvalidRequestError if it cannot be used."""
    try:
        return BlockFiles(Path(directory.root), directory.name, directory.max_bytes)
    except OSError as error:
        message = f"kv_offload_dir: {directory.root} cannot be used: {error.strerror or error}"
        raise InvalidRequestError(message, param="kv_offload_dir") from error
