"""TieredBlockStore: keeps full blocks outside the cache, in main memory and in files (BlockFiles). It is the runner's
counterpart of the engine's offload.

    save: cache -> a copy -> memory, at once; -> files, by a thread beside the steps
    load: memory, or a file that was read and checked when the step was planned -> cache

The content of a block is its bytes in every layer of its group, one after the other. Its key is group and hash.

    DIR / fingerprint / group-hash:   magic, checksum over name and content (16 bytes each) | content

A file is written under a temporary name and then renamed, so it is complete or absent, and several engines may share
the directory. Files are checked when they are read; a damaged file is deleted, and counts as absent. An error of the
disk is never raised after the start: it counts as a miss, and the first error of each kind is logged.
`make_store` makes the store that a config asks for.
"""

import errno
import hashlib
import itertools
import logging
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import fail, invalid
from penstock.interface.files import open_regular
from penstock.interface.messages import BlockDirectory
from penstock.interface.step import CacheGroup
from penstock.kernels.cpu.library import chosen_level

logger = logging.getLogger(__name__)
Key = tuple[int, bytes]  # cache group, block hash
MAX_QUEUED_BYTES = 2**28  # of contents that wait to be written; further blocks get no file
MAGIC = b"penstock block 1"
HEADER_BYTES = len(MAGIC) + 16
TEMPORARY = ".writing-"
OLD_S = 3600.0  # the age from which a temporary file counts as abandoned
NAME = re.compile(r"[0-9]+-[0-9a-f]{32}")  # nothing else is ever deleted
KEPT = 0.9  # share of the bound that remains when files are deleted, so that this happens rarely
RESERVED_BYTES = 64 << 20  # of the disk that blocks leave free
RESCAN = 64  # how many files are written before other engines' files are counted again


class TieredBlockStore:
    """Keeps blocks within the bounds of memory and files, and drops the least recently used ones first.

    Only the thread that plans and computes steps calls it.

    Args:
        block_bytes: the bytes of a block, by cache group.
        max_bytes: the bound in main memory; 0 keeps no blocks there.
    """

    def __init__(self, block_bytes: list[int], max_bytes: int, files: "BlockFiles | None") -> None:
        self.survives = files is not None
        self._block_bytes, self._max_bytes, self._files = block_bytes, max_bytes, files
        self._memory: OrderedDict[Key, bytes] = OrderedDict()  # the least recently used block is first
        self._num_bytes = self._num_saved = self._num_unsaved = 0
        self._fetched: dict[Key, bytes] = {}  # blocks for the step being planned
        self._queue: queue.SimpleQueue[tuple[Key, bytes] | None] = queue.SimpleQueue()
        self._queued: dict[Key, bytes] = {}
        self._num_queued_bytes = 0
        self._lock = threading.Lock()  # guards the two attributes above and the counters
        self._writer: threading.Thread | None = None
        if files is not None:
            self._writer = threading.Thread(target=self._write, args=(files,), name="block-writer", daemon=True)
            self._writer.start()

    @property
    def directory(self) -> BlockDirectory | None:
        """The directory of its files; None if it has no files."""
        files = self._files
        if files is None:
            return None
        return BlockDirectory(str(files.root), files.name, files.max_bytes, self._block_bytes)

    def holds(self, group: int, block_hash: bytes) -> bool:
        """Tell whether the block is in memory or in a file. A file is not read, so it may turn out to be damaged."""
        key = group, block_hash
        if key in self._memory or key in self._queued:
            return True
        return self._files is not None and self._files.has(self._files.name_of(*key))

    def fetch(self, group: int, block_hash: bytes) -> bool:
        """Read and check a block, and keep it until `end_step`."""
        key = group, block_hash
        content = self._fetched.get(key) or self._memory.get(key) or self._queued.get(key)
        if content is None and self._files is not None:
            content = self._files.read(self._files.name_of(*key), self._block_bytes[group])
        if content is None:
            return False
        self._fetched[key] = content
        self._remember(key, content)
        return True

    def load(self, group: int, block_hash: bytes) -> bytes:
        """Get a block that was fetched for this step."""
        return self._fetched[group, block_hash]

    def save(self, group: int, block_hash: bytes, content: bytes) -> None:
        """Keep a block. Its file is written later, or never if the disk is too slow."""
        key = group, block_hash
        is_kept = self._remember(key, content)
        with self._lock:
            if self._files is None:
                self._count(is_kept)
            elif key in self._queued:
                return  # it is counted once it is written
            elif self._num_queued_bytes + len(content) <= MAX_QUEUED_BYTES:
                self._queued[key] = content
                self._num_queued_bytes += len(content)
                self._queue.put((key, content))
            else:
                self._count(False)

    def end_step(self) -> None:
        """Drop the blocks that were fetched for the step."""
        self._fetched.clear()

    def counters(self) -> dict[str, Any]:
        return {
            "num_saved_blocks_total": self._num_saved,
            "num_unsaved_blocks_total": self._num_unsaved,
            "num_unreadable_blocks_total": 0 if self._files is None else self._files.num_unreadable,
        }

    def close(self) -> None:
        """Write the queued blocks, and end the thread. A second call does nothing."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _remember(self, key: Key, content: bytes) -> bool:
        """Put a block into memory as the most recently used one. Return False if it is larger than the bound."""
        if len(content) > self._max_bytes:
            return False
        if key not in self._memory:
            self._memory[key] = content
            self._num_bytes += len(content)
        self._memory.move_to_end(key)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._memory.popitem(last=False)[1])
        assert key in self._memory, "the block itself fits, and is dropped last"
        return True

    def _write(self, files: "BlockFiles") -> None:
        while (item := self._queue.get()) is not None:
            key, content = item
            try:
                is_written = files.write(files.name_of(*key), content)
            except Exception:  # a block that cannot be kept must not end the thread
                logger.exception("kv_offload_dir: a block could not be written")
                is_written = False
            with self._lock:
                del self._queued[key]
                self._num_queued_bytes -= len(content)
                assert self._num_queued_bytes >= 0, "every queued block was counted"
                self._count(is_written)

    def _count(self, is_saved: bool) -> None:
        """Count a block as saved or not. The caller holds the lock, and calls once the outcome is known, so no counter
        ever falls."""
        self._num_saved += is_saved
        self._num_unsaved += not is_saved


class BlockFiles:
    """Blocks of the cache as files below root / name, which outlive the process. The bound applies to the files of all
    names below root together.

    The engine's thread calls `read` and `has`; one other thread calls `write`.
    """

    def __init__(self, root: Path, name: str, max_bytes: int) -> None:
        """Make the directory, readable by its owner alone, and count the files in it.

        Raises:
            OSError: the directory cannot be made, read or written to.
        """
        self.root, self.name, self.max_bytes = root, name, max_bytes
        self._own = root / name
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._known: set[str] = set()  # names of files that this engine has seen
        self._broken: set[str] = set()  # names of files that could not be read, until they are written again
        self._count = itertools.count()
        self._num_bytes = self._num_written = 0
        self._complained: set[str] = set()
        self.num_unreadable = 0
        probe = self._own / f"{TEMPORARY}{os.getpid()}-probe"
        probe.touch(0o600)
        probe.unlink()
        self._shrink()

    @staticmethod
    def name_of(group: int, block_hash: bytes) -> str:
        return f"{group}-{block_hash.hex()}"

    def has(self, name: str) -> bool:
        """Tell whether there is a file of this name, which another engine may have written."""
        if name not in self._known:
            if name in self._broken or not os.path.exists(self._own / name):
                return False
            self._known.add(name)
        return True

    def read(self, name: str, num_bytes: int) -> bytes | None:
        """Read the content of a file; None if it does not exist, cannot be read or is damaged."""
        path = self._own / name
        try:
            with open(path, "rb", opener=open_regular) as file:
                data = file.read(HEADER_BYTES + num_bytes + 1)
            content = _content(name, data, num_bytes)
            if content is not None:
                os.utime(path)
                return content
            self._complain("damaged", f"{path} is damaged; it is deleted, and its tokens are computed again")
            _delete(path)
            self._lose(name)
        except OSError as error:
            self._lose(name, error)
        return None

    def _lose(self, name: str, error: OSError | None = None) -> None:
        """Note that a file is gone or, until it is written again, of no use."""
        self._known.discard(name)
        if isinstance(error, FileNotFoundError):  # another engine has deleted it
            return
        if error is not None:
            self._complain("read", f"{self._own / name} cannot be read: {error}; its tokens are computed again")
        self.num_unreadable += 1
        self._broken.add(name)

    def read_whole(self, name: str) -> bytes | None:
        """Read a file with its header, for `write_whole` on another machine; None if it cannot be read."""
        if NAME.fullmatch(name):
            try:
                with open(self._own / name, "rb", opener=open_regular) as file:
                    return file.read()
            except OSError as error:
                self._lose(name, error)
        return None

    def write_whole(self, name: str, data: bytes, num_bytes: int) -> bool:
        """Write a file that `read_whole` returned elsewhere. Return False if it is damaged or cannot be written."""
        content = _content(name, data, num_bytes)
        return content is not None and self.write(name, content)

    def write(self, name: str, content: bytes) -> bool:
        """Write a file, and delete the least recently used ones if the bound requires it. Return False if it cannot be
        written."""
        size = HEADER_BYTES + len(content)
        if size > self.max_bytes:
            self._complain("bound", f"a block of {size} bytes exceeds the {self.max_bytes} of {self.root}")
            return False
        temporary = self._own / f"{TEMPORARY}{os.getpid()}-{id(self):x}-{next(self._count)}"
        try:
            self._num_written += 1
            is_full = self._num_bytes + size > self.max_bytes or self._free_bytes() < size
            if is_full or self._num_written % RESCAN == 0:
                self._shrink(size)
            if self._free_bytes() < size:
                raise OSError(errno.ENOSPC, f"the last {RESERVED_BYTES >> 20} MiB of the disk are left to others")
            with open(temporary, "xb", opener=open_regular) as file:
                file.write(_header(name, content))
                file.write(content)
            temporary.replace(self._own / name)
        except OSError as error:
            self._complain("write", f"{self._own / name} cannot be written: {error}; blocks are not kept until it can")
            _delete(temporary)
            return False
        self._num_bytes += size
        self._broken.discard(name)
        self._known.add(name)
        return True

    def _free_bytes(self) -> int:
        """Count the bytes of the disk that blocks may take; a journal may need the last ones."""
        disk = os.statvfs(self._own)
        return disk.f_bavail * disk.f_frsize - RESERVED_BYTES

    def _shrink(self, more: int = 0) -> None:
        """Count all files. Unless `more` bytes still fit, delete those used longest ago."""
        found: list[tuple[int, int, Path]] = []
        for path in self.root.glob("penstock-*/*"):
            try:
                status = path.stat()
            except OSError:  # deleted meanwhile
                continue
            if NAME.fullmatch(path.name):
                found.append((status.st_mtime_ns, status.st_size, path))
            elif path.name.startswith(TEMPORARY) and status.st_mtime < time.time() - OLD_S:
                _delete(path)
        total = sum(size for _, size, _ in found)
        most = min(self.max_bytes, total + self._free_bytes())
        if total + more > most:
            for _, size, path in sorted(found):
                if total + more <= most * KEPT:
                    break
                total -= size if _delete(path) else 0
                self._known.discard(path.name)
        self._num_bytes = total

    def _complain(self, kind: str, message: str) -> None:
        """Log a message, if it is the first of its kind."""
        if kind not in self._complained:
            self._complained.add(kind)
            logger.warning("kv_offload_dir: %s", message)


def _content(name: str, data: bytes, num_bytes: int) -> bytes | None:
    """Extract the content from a file's data; None if the data is not what was written under this name."""
    content = data[HEADER_BYTES:]
    if len(content) != num_bytes or data[:HEADER_BYTES] != _header(name, content):
        return None
    return content


def _header(name: str, content: bytes) -> bytes:
    """Make the header of a file. Its checksum covers the name, so that no file passes for another."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    digest.update(content)
    return MAGIC + digest.digest()


def _delete(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


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
        raise invalid("kv_offload_dir", f"{directory.root} cannot be used: {error.strerror or error}") from error
