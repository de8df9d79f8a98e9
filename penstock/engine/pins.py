"""Pins: prefixes whose blocks stay in the cache until they are unpinned.

A pin is a list of content hashes, one per full block of its prefix. It holds a block as a request does, as one more
user, so that the pool never gives the block away:

    group without a window    [ held | held | held | held | held ]
    group with a window       [  --  |  --  |  --  | held | held ]   what a token after the prefix attends to

Nothing is computed for a pin. It takes blocks that are in the cache when it is made, and others later, when a request
has computed them. If its blocks are lost with the whole cache, the next request that begins with the prefix brings them
back.

A pin without a salt is public: requests with any salt read its blocks (KVCacheManager), because whoever pins a prefix
without a salt accepts that everybody may notice it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.block_pool import BlockPool
from penstock.errors import InvalidRequestError

MAX_SHARE = 2  # pins hold at most the cache divided by this


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix.

    Attributes:
        hashes: content hashes of its full blocks, in order.
        first_held: per cache group, the index of the first block that it holds there.
        is_public: whether it has no salt.
    """

    hashes: list[bytes]
    first_held: list[int]
    is_public: bool


class Pins:
    """All pins of an engine, by name, and the blocks that they hold in `pools`, one pool per cache group."""

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
        """Return, per group, how many blocks the pins leave to a request with these hashes, shared ones included."""
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
            raise InvalidRequestError(f"name: {name!r} is the name of another pin", param="name", code="name_in_use")
        for pool, wanted, first in zip(self._pools, self._wanted, pin.first_held, strict=True):
            count, limit = len(wanted.keys() | set(pin.hashes[first:])), pool.num_blocks // MAX_SHARE
            if count > limit:
                message = f"prompt: all pins would hold {count} of {pool.num_blocks} blocks; at most {limit} may be"
                raise InvalidRequestError(message, param="prompt", code="pin_limit_exceeded")
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
    """Return how many of these blocks, from the first on, are wanted."""
    return next((index for index, block_hash in enumerate(hashes) if block_hash not in wanted), len(hashes))


def _places(pin: Pin) -> Iterator[tuple[int, bytes]]:
    """Yield each group and hash of a pin's blocks."""
    for group, first in enumerate(pin.first_held):
        for block_hash in pin.hashes[first:]:
            yield group, block_hash


def _subtract(counts: Counter[bytes], hashes: Iterable[bytes]) -> None:
    for block_hash in hashes:
        counts[block_hash] -= 1
        if not counts[block_hash]:
            del counts[block_hash]
