"""BlockPool: the blocks of one cache group. It knows which are free, how many users each has, and what full ones hold.
Pins: prefixes whose blocks stay in the pools until they are unpinned.

    free, unknown     no content; allocated first
    free, cached      used by no request, found by content hash; allocated last, least recently used first
    in use            read by one or more requests, or pinned (ref_count); found by content hash if it is full

Block ids and hashes go in and out. Nothing here knows requests, tokens or memory.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import PenstockError, invalid

NO_PARENT = b""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash the content of a full block: 128 bits over its tokens and all tokens before them.

    Python's own hash() is not safe: a crafted prompt could make it collide, and read another user's cache.
    """
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def salt_bytes(salt: str | None) -> bytes:
    """Digest a salt for the hash of a block; nothing for None."""
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
                # It was found by its content. Without a hash it would have none to share.
                assert self._hashes[block_id] is not None, "a free block without content is shared"
                del self._free[block_id]
                self.num_cached_blocks -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a user from each block. A block without users is free; of cached ones, the first is reused first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, "a block without users is released"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                cached = self._hashes[block_id] is not None
                self.num_cached_blocks += cached
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=cached)

    def lookup(self, block_hash: bytes) -> int | None:
        """Find the block with this content, in use or free."""
        return self._by_hash.get(block_hash)

    def is_shared(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 1

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block, which is in use, known by its content. Return False if an equal block already is."""
        # A free block may be given away at any moment, and would then be found by a hash that is not its content's.
        assert self._ref_counts[block_id] > 0, "a block without users becomes known"
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


MAX_SHARE = 2  # pins hold at most the cache divided by this


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix.

    Attributes:
        hashes: content hashes of its full blocks, in order.
        hidden: per cache group, the blocks that it does not hold there.
        is_public: whether it has no salt. Requests with any salt then read its blocks (KVCacheManager), because whoever
            pins a prefix without a salt accepts that other users may notice it.
    """

    hashes: list[bytes]
    hidden: list[range]
    is_public: bool

    def wanted(self) -> list[list[bytes]]:
        """List, per cache group, the hashes of the blocks that it holds there."""
        return [self.hashes[: item.start] + self.hashes[item.stop :] for item in self.hidden]


class Pins:
    """All pins of an engine, by name, and the blocks that they hold in `pools`, one pool per cache group.

    A pin holds a block as a request does, as one more user, so that the pool never gives the block away:

        group without a window    [ held | held | held | held | held ]
        group with a window       [  --  |  --  |  --  | held | held ]   what a token after the prefix attends to

    Nothing is computed for a pin. It takes blocks that are in the cache when it is made, and others later, when a
    request has computed them. If its blocks are lost with the whole cache, the next request that begins with the prefix
    brings them back.
    """

    def __init__(self, pools: list[BlockPool]) -> None:
        self._pools = pools
        self._pins: dict[str, Pin] = {}
        self._public: Counter[bytes] = Counter()  # hash -> number of public pins that have it
        self._wanted: list[Counter[bytes]] = [Counter() for _ in pools]  # per group, hash -> number of its pins
        self._held: list[dict[bytes, int]] = [{} for _ in pools]  # per group, hash -> block

    def __len__(self) -> int:
        return len(self._pins)

    def is_public(self, block_hash: bytes) -> bool:
        return block_hash in self._public

    def room(self, hashes: Sequence[bytes]) -> list[int]:
        """Count, per group, the blocks that the pins leave to a request with these hashes, shared ones included."""
        shared = (_num_leading(wanted, hashes) for wanted in self._wanted)
        pairs = zip(self._pools, self._wanted, shared, strict=True)
        return [pool.num_blocks - len(wanted) + count for pool, wanted, count in pairs]

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held))

    def held(self, group: int) -> Iterable[int]:
        return self._held[group].values()

    def add(self, name: str, pin: Pin) -> None:
        """Make a pin, and hold its blocks up to the first that is not in the cache.

        Raises:
            InvalidRequestError: the name is in use, or all pins together would hold more than their share of the cache.
        """
        if name in self._pins:
            raise invalid("name", f"{name!r} is the name of another pin", "name_in_use")
        for pool, wanted, hashes in zip(self._pools, self._wanted, pin.wanted(), strict=True):
            count, limit = len(wanted.keys() | set(hashes)), pool.num_blocks // MAX_SHARE
            if count > limit:
                message = f"all pins would hold {count} of {pool.num_blocks} blocks; at most {limit} may be"
                raise invalid("prompt", message, "pin_limit_exceeded")
        self._pins[name] = pin
        self._public.update(pin.hashes if pin.is_public else ())
        for group, block_hash in _places(pin):
            self._wanted[group][block_hash] += 1
        for block_hash in pin.hashes:
            if not self.hold(block_hash):
                return

    def remove(self, name: str) -> bool:
        """End a pin; its blocks are now cached like any others. Return False if no pin has this name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        if pin.is_public:
            _subtract(self._public, pin.hashes)
        for group, block_hash in reversed(list(_places(pin))):  # the last ones are evicted first
            _subtract(self._wanted[group], [block_hash])
            if block_hash not in self._wanted[group] and block_hash in self._held[group]:
                self._pools[group].release([self._held[group].pop(block_hash)])
        return True

    def hold(self, block_hash: bytes) -> bool:
        """Hold a block that may have become known. Return whether all groups that want it hold it now."""
        groups = [group for group, wanted in enumerate(self._wanted) if block_hash in wanted]
        missing = [group for group in groups if block_hash not in self._held[group]]
        found = [self._pools[group].lookup(block_hash) for group in missing]
        for group, block_id in zip(missing, found, strict=True):
            if None in found or block_id is None:
                return False
            # Shared like a request's block: the pool needs no rule for pins, and cannot give the block away.
            self._pools[group].share([block_id])
            self._held[group][block_hash] = block_id
        return True

    def lose_blocks(self, pools: list[BlockPool]) -> None:
        """Begin again with new, empty pools. The pins stay, and take their blocks as they are computed."""
        self._pools = pools
        self._held = [{} for _ in pools]


def _num_leading(wanted: Counter[bytes], hashes: Sequence[bytes]) -> int:
    """Count the blocks, from the first on, that are wanted without a gap."""
    return next((index for index, block_hash in enumerate(hashes) if block_hash not in wanted), len(hashes))


def _places(pin: Pin) -> Iterator[tuple[int, bytes]]:
    """Yield each group and hash of a pin's blocks."""
    for group, hashes in enumerate(pin.wanted()):
        for block_hash in hashes:
            yield group, block_hash


def _subtract(counts: Counter[bytes], hashes: Iterable[bytes]) -> None:
    for block_hash in hashes:
        counts[block_hash] -= 1
        if not counts[block_hash]:
            del counts[block_hash]
