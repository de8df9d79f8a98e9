"""TieredBlockStore: keeps full blocks outside the cache, in main memory and in files. It is the runner's counterpart of
engine/offload.py.

    save: cache -> a copy -> memory, at once; -> files, by a thread beside the steps
    load: memory, or a file that was read and checked when the step was planned -> cache

The content of a block is its bytes in every layer of its group, one after the other. Its key is group and hash.
"""

import logging
import queue
import threading
from collections import OrderedDict
from typing import Any

from penstock.interface.messages import BlockDirectory
from penstock.runner.block_files import BlockFiles

logger = logging.getLogger(__name__)
Key = tuple[int, bytes]  # cache group, block hash
MAX_QUEUED_BYTES = 2**28  # of contents that wait to be written; further blocks get no file


class TieredBlockStore:
    """Keeps blocks within the bounds of memory and files, and drops the least recently used ones first.

    Only the thread that plans and computes steps calls it.

    Args:
        block_bytes: the bytes of a block, by cache group.
        max_bytes: the bound in main memory; 0 keeps no blocks there.
    """

    def __init__(self, block_bytes: list[int], max_bytes: int, files: BlockFiles | None) -> None:
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
        """Return whether the block is in memory or in a file. A file is not read, so it may turn out to be damaged."""
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
        """Return a block that was fetched for this step."""
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
        return True

    def _write(self, files: BlockFiles) -> None:
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
                self._count(is_written)

    def _count(self, is_saved: bool) -> None:
        """Count a block as saved or not. The caller holds the lock, and calls once the outcome is known, so no counter
        ever falls."""
        self._num_saved += is_saved
        self._num_unsaved += not is_saved
