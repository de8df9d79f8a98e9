"""BlockPool: the blocks of one cache group: which are free, how often the others are used, what the full ones hold.

A block is in one of three states:

    free, unknown     nothing worth keeping; handed out first
    free, cached      nobody uses it, but its content can be found again by hash; handed out last, least recently
                      used first
    in use            one or more requests read it (ref_count); if full it can be found by hash too

The pool knows block ids and hashes; it knows no request, no token and no memory.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from penstock.errors import PenstockError

NO_BLOCK = -1  # what a block table holds where nothing is allocated
NO_PARENT = b""


def hash_block(parent: bytes, token_ids: Sequence[int], key: bytes = b"") -> bytes:
    """Content hash of a full block: 128 keyed bits over its tokens and everything before them.

    Python's own hash() could be made to collide by a chosen prompt, which would show one user's cache to another.
    """
    digest = hashlib.blake2b(parent, digest_size=16, key=key)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


class BlockPool:
    """Hands out and takes back the block ids 0 .. num_blocks - 1.

    Attributes:
        num_cached_blocks: free blocks whose content can be found again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached_blocks = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first out comes first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, forgetting what they held. The caller has made sure that there are as many free."""
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self.num_cached_blocks -= self._hashes[block_id] is not None
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more user for each of these blocks, in use or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self.num_cached_blocks -= self._hashes[block_id] is not None
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One user less for each; those without any are free, the first given being the first to be reused."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                cached = self._hashes[block_id] is not None
                self.num_cached_blocks += cached
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=cached)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, in use or free."""
        return self._by_hash.get(block_hash)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def register(self, block_id: int, block_hash: bytes) -> None:
        """From now on this full block, which is in use, is found by its content, unless an equal one is already."""
        if block_hash not in self._by_hash:
            self._forget(block_id)
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None

    def check_integrity(self, used: dict[int, int]) -> None:
        """Raise PenstockError unless the books agree with each other and with `used` (block id -> its users)."""
        for block_id in range(self.num_blocks):
            count = self._ref_counts[block_id]
            if count != used.get(block_id, 0):
                raise PenstockError(f"block {block_id} counts {count} users, its tables {used.get(block_id, 0)}")
            if (count == 0) != (block_id in self._free):
                raise PenstockError(f"block {block_id} has {count} users and is {'' if count else 'not '}free")
        known = {block_hash: i for i, block_hash in enumerate(self._hashes) if block_hash is not None}
        if known != self._by_hash:
            raise PenstockError("block hashes and their index disagree")
        if self.num_cached_blocks != sum(1 for block_id in known.values() if block_id in self._free):
            raise PenstockError(f"{self.num_cached_blocks} cached blocks are counted, which is wrong")
