"""BlockPool: the blocks of one cache group. It knows which are free, how many users each has, and what full ones hold.

    free, unknown     no content; allocated first
    free, cached      used by no request, found by content hash; allocated last, least recently used first
    in use            read by one or more requests, or pinned (ref_count); found by content hash if it is full

It handles block ids and hashes, and knows nothing of requests, tokens and memory.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.errors import PenstockError

NO_PARENT = b""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the content hash of a full block: 128 bits over its tokens and all tokens before them.

    Python's own hash() is not safe: a crafted prompt could make it collide, and read another user's cache.
    """
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def salt_bytes(salt: str | None) -> bytes:
    """Return what a salt adds to the hash of a block; nothing for None."""
    return b"" if salt is None else hashlib.blake2b(salt.encode(), digest_size=16, person=b"penstock salt").digest()


class BlockPool:
    """Allocates and frees the block ids 0 .. num_blocks - 1. A block is in exactly one of the states above.

    An assertion that fails here means that a table and this pool disagree about who uses a block. The engine then drops
    both and computes all requests anew (Scheduler.reset), because a wrong count would sooner or later give a request
    another one's keys and values.

    evicted: called for each block whose content can no longer be found here; it stays there until it is overwritten.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int, bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._evicted = evicted
        self.num_cached_blocks = 0  # free blocks that are found by content hash
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of allocation

    @property
    def num_free(self) -> int:  # cached ones included
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks and drop their hashes. The caller has checked that enough are free."""
        assert 0 <= count <= len(self._free), "the caller has not checked that enough blocks are free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            assert self._ref_counts[block_id] == 0, "a free block has a user"
            if (block_hash := self._hashes[block_id]) is not None:
                self.num_cached_blocks -= 1
                if self._evicted is not None:
                    self._evicted(block_id, block_hash)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a user to each of these blocks, in use or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self.num_cached_blocks -= self._hashes[block_id] is not None
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a user from each block. A block without users is free; of cached ones, the first is reused first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, "a block is released that nobody uses"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                cached = self._hashes[block_id] is not None
                self.num_cached_blocks += cached
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=cached)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block with this content, in use or free."""
        return self._by_hash.get(block_hash)

    def is_shared(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 1

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block, which is in use, known by its content. Return False if an equal block already is."""
        # A free block may be given away at any moment, so nobody can know what it will hold when it is found.
        assert self._ref_counts[block_id] > 0, "a block becomes known that nobody uses"
        if block_hash in self._by_hash:
            return False
        self._forget(block_id)
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None

    def check_integrity(self, used: dict[int, int]) -> None:
        """Raise PenstockError unless counts, free blocks, hashes and `used` (block id -> its users) agree."""
        for block_id in range(self.num_blocks):
            count = self._ref_counts[block_id]
            if count != used.get(block_id, 0):
                raise PenstockError(f"block {block_id}: {count} users counted, {used.get(block_id, 0)} found")
            if (count == 0) != (block_id in self._free):
                raise PenstockError(f"block {block_id} has {count} users and is {'' if count else 'not '}free")
        known = {block_hash: i for i, block_hash in enumerate(self._hashes) if block_hash is not None}
        if known != self._by_hash:
            raise PenstockError("block hashes and their index disagree")
        if self.num_cached_blocks != sum(1 for block_id in known.values() if block_id in self._free):
            raise PenstockError(f"{self.num_cached_blocks} cached blocks counted, which is wrong")
