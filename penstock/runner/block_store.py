"""TieredBlockStore: full blocks beyond the cache, in main memory and in files; the runner's half of engine/offload.py.

    save: cache -> a copy -> memory, at once; -> files, by a thread beside the steps
    load: memory, or a file that was read and checked when the step was planned -> cache

A content is the block's bytes of every layer of its group, one after the other, named by group and hash.
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
MAX_QUEUED_BYTES = 2**28  # of contents that wait to be written; what comes on top is dropped


class TieredBlockStore:
    """Keeps blocks for as long as both bounds allow, the least recently used ones shortest.

    Only the thread that plans and computes steps calls it.

    Args:
        block_bytes: by cache group.
        max_bytes: in main memory; 0: none.
    """

    def __init__(self, block_bytes: list[int], max_bytes: int, files: BlockFiles | None) -> None:
        self.survives = files is not None
        self._block_bytes, self._max_bytes, self._files = block_bytes, max_bytes, files
        self._memory: OrderedDict[Key, bytes] = OrderedDict()  # the least recently used first
        self._num_bytes = self._num_saved = self._num_unsaved = 0
        self._fetched: dict[Key, bytes] = {}  # for the step being planned
        self._queue: queue.SimpleQueue[tuple[Key, bytes] | None] = queue.SimpleQueue()
        self._queued: dict[Key, bytes] = {}
        self._num_queued_bytes = 0
        self._lock = threading.Lock()  # over the two above and the counters
        self._writer: threading.Thread | None = None
        if files is not None:
            self._writer = threading.Thread(target=self._write, args=(files,), name="block-writer", daemon=True)
            self._writer.start()

    @property
    def directory(self) -> BlockDirectory | None:
        """Return where its files are; None if it has none."""
        files = self._files
        if files is None:
            return None
        return BlockDirectory(str(files.root), files.name, files.max_bytes, self._block_bytes)

    def holds(self, group: int, block_hash: bytes) -> bool:
        """Return whether there is such a block in memory or in a file, as far as can be told without reading it."""
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
        """Drop what was fetched and not loaded."""
        self._fetched.clear()

    def counters(self) -> dict[str, Any]:
        return {
            "num_saved_blocks_total": self._num_saved,
            "num_unsaved_blocks_total": self._num_unsaved,
            "num_unreadable_blocks_total": 0 if self._files is None else self._files.num_unreadable,
        }

    def close(self) -> None:
        """Write what is queued, and end. A second call does nothing."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _remember(self, key: Key, content: bytes) -> bool:
        """Put a block into memory, as the one used last. False if it never fits."""
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
            except Exception:  # one block that is not kept must not be the end of all writing
                logger.exception("kv_offload_dir: a block could not be written")
                is_written = False
            with self._lock:
                del self._queued[key]
                self._num_queued_bytes -= len(content)
                self._count(is_written)

    def _count(self, is_saved: bool) -> None:
        """Count a block once its fate is known, so that no counter ever falls. The lock must be held."""
        self._num_saved += is_saved
        self._num_unsaved += not is_saved
