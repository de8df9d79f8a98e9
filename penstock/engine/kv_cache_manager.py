"""KVCacheManager: which blocks hold the keys and values of which request. Block ids only, no memory.

Every cache group (layers with the same sliding window) has its own pool and gives each request one block table:

    positions   0 ............................. num_computed ......... + num_new
    table       [ -1  -1 | block | block | block  | block | block ]
                  before   shared or own, full      filled in this step
                  window

An entry is -1 where the sliding window has passed a block, which was then freed; blocks of sink tokens stay. Full
blocks are found by content hash (prefix reuse) as soon as the step that filled them has succeeded. A request's salt is
part of the hash of its first block, and so of all later ones: requests with different salts do not find each other's
blocks. Blocks of a public pin come before the salt (Pins), so that every request may read them.

A request may be forked: the fork shares all its blocks. Full blocks stay shared. A partly filled last block is shared
until one of its users writes to it: that user takes a copy, unless it is the only user left (copy on write).

A group may be a ring instead: a request has one block there from its first step to its end, and overwrites the slots
that its window has passed. The content depends on the length of the request, so no prefix can be reused.

Beyond the pools there may be a store (Offload), which is asked for blocks that the pools do not have.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from penstock.engine.block_pool import BlockPool, Pin, Pins, hash_block
from penstock.engine.request import Request
from penstock.errors import PenstockError, invalid
from penstock.interface.step import NO_BLOCK, BlockCopy, BlockStore, BlockTransfer, CacheGroup

TableUpdates = tuple[list[list[int]], list[int]]  # per group: new entries, and the number of released leading ones


@dataclass(slots=True)
class BlockTable:
    """One request's blocks in one group.

    The executor knows `num_sent` entries; the first `num_registered` were offered to the prefix cache.
    """

    block_ids: list[int] = field(default_factory=list)
    num_released: int = 0
    num_sent: int = 0
    num_registered: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached or stored blocks that a request could reuse.

    in_progress: another request is computing the next block. Choices of one prompt then wait, and compute it once.
    """

    hashes: list[bytes]  # of every block that could be reused, cached or not
    num_blocks: int  # how many leading ones are cached, or stored
    in_progress: bool


class Offload:
    """Lists of the blocks that the next step saves to the store beyond the cache, and that it loads: hashes only.

        full, or about to be overwritten -> save -> store -> hit of a prefix -> load

    A block is saved when its place is given away. If the store outlives this process, it is also saved as soon as it is
    full, so that a killed engine leaves behind what it has computed. Saves come first in a step, while the blocks that
    the step overwrites still have their content. Loads have been read and checked before, so a step cannot fail on
    them.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.num_loaded = 0
        self._saves: dict[tuple[int, bytes], int] = {}  # group and hash -> the block that has the content
        self._loads: list[BlockTransfer] = []

    @property
    def has_work(self) -> bool:
        """Tell whether a step is needed to save blocks, even if it computes nothing."""
        return bool(self._saves)

    def filled(self, group: int, block_id: int, block_hash: bytes) -> None:
        """Note that a block is full and known by its content."""
        if self.store.survives:
            self.evicted(group, block_id, block_hash)

    def evicted(self, group: int, block_id: int, block_hash: bytes) -> None:
        """Note that the content of a block is lost with the next step."""
        if (group, block_hash) not in self._saves and not self.store.holds(group, block_hash):
            self._saves[group, block_hash] = block_id

    def load(self, group: int, block_id: int, block_hash: bytes) -> None:
        """Fill a block with content that the store has fetched."""
        self._loads.append(BlockTransfer(group, block_id, block_hash))
        self.num_loaded += 1

    def pop_transfers(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Take what the next step saves, and what it loads."""
        saves = [BlockTransfer(group, block_id, found) for (group, found), block_id in self._saves.items()]
        loads, self._loads, self._saves = self._loads, [], {}
        return saves, loads

    def forget(self) -> None:
        """Drop what was collected, because the bookkeeping broke off half-way."""
        self._saves.clear()
        self._loads.clear()


class KVCacheManager:
    """Allocates, shares and frees the blocks of all groups. All groups but rings have the same block size."""

    def __init__(
        self, groups: list[CacheGroup], *, enable_prefix_caching: bool = True, store: BlockStore | None = None
    ) -> None:
        sizes = {group.block_size for group in groups if not group.ring} or {groups[0].block_size}
        if len(sizes) != 1:
            raise PenstockError("cache groups need one common block size")
        if enable_prefix_caching and any(group.ring for group in groups):
            raise PenstockError("prefix caching is impossible with a ring; set enable_prefix_caching=False")
        if store is not None and not enable_prefix_caching:
            raise PenstockError("a store of blocks needs prefix caching")
        self.groups = groups
        (self.block_size,) = sizes
        self.enable_prefix_caching = enable_prefix_caching
        self._has_windows = any(group.sliding_window is not None for group in groups)
        self.offload = None if store is None else Offload(store)
        self.pools = self._new_pools()
        self.pins = Pins(self.pools)
        self._tables: dict[str, list[BlockTable]] = {}
        self._settled: dict[str, int] = {}  # request -> length up to which the block tables of the executor are enough
        self.no_updates: TableUpdates = [[] for _ in groups], [0] * len(groups)
        self._in_progress: dict[bytes, str] = {}  # hash of a block being computed -> the request that computes it
        self._forked: set[str] = set()  # requests that have written nothing since they were forked from another one
        self._copies: list[BlockCopy] = []  # to be made before the next step

    def _new_pools(self) -> list[BlockPool]:
        evicted = None if self.offload is None else self.offload.evicted
        return [
            self.make_pool(group.num_blocks, None if evicted is None else partial(evicted, index))
            for index, group in enumerate(self.groups)
        ]

    def make_pool(self, num_blocks: int, evicted: Callable[[int, bytes], None] | None) -> BlockPool:
        """Make the empty pool of a group; a subclass may have pools of its own."""
        return BlockPool(num_blocks, evicted)

    # --- looking up ------------------------------------------------------------------------------------------------

    def tables(self, request: Request) -> list[list[int]]:
        return [list(table.block_ids) for table in self._tables[request.request_id]]

    def pop_updates(self, request: Request) -> TableUpdates:
        """Take, per group, the ids appended since the last call and the number of released leading entries."""
        # Whatever changes a request's tables (allocate_slots, fork, free, reset) first drops it from _settled, so that
        # nothing new to send is overlooked here.
        if request.request_id in self._settled:  # most decodes
            return self.no_updates
        tables = self._tables[request.request_id]
        new_ids: list[list[int]] = []
        for table in tables:
            new_ids.append(table.block_ids[table.num_sent :])
            table.num_sent = len(table.block_ids)
        if not self._has_windows and request.request_id not in self._forked:
            self._settled[request.request_id] = self._room(tables)
        return new_ids, [table.num_released for table in tables]

    def _room(self, tables: list[BlockTable]) -> int:
        """Compute the length up to which a request needs no more blocks."""
        pairs = zip(self.groups, tables, strict=True)
        return min(sys.maxsize if group.ring else group.block_size * len(table.block_ids) for group, table in pairs)

    def pop_copies(self) -> list[BlockCopy]:
        """Take the copies that must be made before the step is computed, in order."""
        copies, self._copies = self._copies, []
        return copies

    def fits_alone(self, num_tokens: int, chunk: int) -> bool:
        """Check that a request that grows to num_tokens could run if it had the whole cache to itself."""
        return all(peak_blocks(group, num_tokens, chunk) <= group.num_blocks for group in self.groups)

    def fits_beside_pins(self, request: Request, chunk: int) -> bool:
        """Check that a request could run to its end with nothing but the pinned prefixes in the cache.

        Blocks that it shares with them count once, except with windows, where it may have to compute them anew.
        """
        if not self.pins:
            return self.fits_alone(request.max_total_tokens, chunk)
        hashes = [] if self._has_windows else self._hashes(request)
        peaks = (peak_blocks(group, request.max_total_tokens, chunk) for group in self.groups)
        return all(peak <= room for peak, room in zip(peaks, self.pins.room(hashes), strict=True))

    # --- prefix reuse ----------------------------------------------------------------------------------------------

    def looks_up(self, request: Request) -> bool:
        """Decide whether a request looks for its prefix in the cache. It does not if its whole prompt has to be
        computed, for the prompt's log-probabilities or the mean of its hidden states."""
        params = request.params
        needs_all = params.prompt_logprobs is not None if params.pooling is None else params.pooling.needs_whole_prompt
        return self.enable_prefix_caching and not needs_all

    def _hashes(self, request: Request) -> list[bytes]:
        """Hash the blocks that could be reused: full ones, leaving at least one token to compute."""
        if not self.looks_up(request):
            return []
        count = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, count)
        return request.block_hashes[:count]

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Compute the hashes of the first `count` blocks. The salt goes into the first block that no public pin has."""
        hashes, size = request.block_hashes, self.block_size
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else request.root_hash
            token_ids = request.token_ids[index * size : (index + 1) * size]
            block_hash = hash_block(parent, token_ids)
            if request.pending_salt and not self.pins.is_public(block_hash):
                block_hash = hash_block(parent + request.pending_salt, token_ids)
                request.pending_salt = b""
            hashes.append(block_hash)

    def _reusable_blocks(self, hashes: list[bytes]) -> int:
        """Find the largest number of leading blocks for which every group has the blocks that its window needs."""
        whole = [index for index, group in enumerate(self.groups) if group.sliding_window is None]
        limit = len(hashes) if not whole else min(self._leading_blocks(index, hashes) for index in whole)
        windows = [
            (group, self._cached_runs(index, hashes[:limit]))
            for index, group in enumerate(self.groups)
            if group.sliding_window
        ]
        for count in range(limit, 0, -1):
            if all(_has_needed(group.hidden_blocks(count * self.block_size), run, count) for group, run in windows):
                return count
        return 0

    def _holds(self, group: int, block_hash: bytes) -> bool:
        if self.pools[group].lookup(block_hash) is not None:
            return True
        return self.offload is not None and self.offload.store.holds(group, block_hash)

    def _leading_blocks(self, group: int, hashes: list[bytes]) -> int:
        """Count the blocks before the first that is missing."""
        return next((i for i, block_hash in enumerate(hashes) if not self._holds(group, block_hash)), len(hashes))

    def _cached_runs(self, group: int, hashes: list[bytes]) -> list[int]:
        """Compute, for each block, the length of the run of available blocks that ends with it."""
        runs, run = [], 0
        for block_hash in hashes:
            run = run + 1 if self._holds(group, block_hash) else 0
            runs.append(run)
        return runs

    def get_computed_blocks(self, request: Request) -> Prefix:
        """Look up a waiting request. The result is valid until a block is allocated, registered or released."""
        hashes = self._hashes(request)
        count = self._reusable_blocks(hashes)
        in_progress = count < len(hashes) and hashes[count] in self._in_progress
        if self.offload is not None and not in_progress:  # another request may be loading a block
            in_progress = any(found in self._in_progress for found in hashes[self._num_cached(hashes, count) : count])
        return Prefix(hashes, count, in_progress)

    def _hidden(self, count: int) -> list[range]:
        """Find, per group, those of `count` leading blocks that no later token sees."""
        return [group.hidden_blocks(count * self.block_size) for group in self.groups]

    def _num_cached(self, hashes: list[bytes], count: int) -> int:
        """Count how many of `count` reusable blocks come before the first that is not in the cache."""
        hidden = self._hidden(count)
        for index in range(count):
            for unseen, pool in zip(hidden, self.pools, strict=True):
                if index not in unseen and pool.lookup(hashes[index]) is None:
                    return index
        return count

    # --- admitting, growing, ending --------------------------------------------------------------------------------

    def admit(self, request: Request, prefix: Prefix, max_new_tokens: int) -> int | None:
        """Give a waiting request the prefix just found, and blocks for up to max_new_tokens more tokens.

        Set num_computed_tokens to the cached length. Return how many tokens it may compute now; None, with nothing
        changed, if too few blocks are free for all its tokens.
        """
        hashes, count = prefix.hashes, prefix.num_blocks
        assert request.request_id not in self._tables, "a running request is admitted again"
        assert count * self.block_size < request.num_tokens, "at least the last token is computed, to sample after it"
        assert max_new_tokens > 0
        shared = [self._shared(group, pool, hashes, count) for group, pool in zip(self.groups, self.pools, strict=True)]
        # The room for all its tokens is asked for, not only for this step's: a request that is admitted on the promise
        # of blocks that others hold would be preempted before it is done, and its work lost. Cached
        # blocks without users (`revived`) count as free until they are shared.
        for group, pool, block_ids in zip(self.groups, self.pools, shared, strict=True):
            revived = sum(1 for block_id in block_ids if block_id != NO_BLOCK and pool.is_free(block_id))
            peak = peak_blocks(group, request.num_tokens, max_new_tokens)
            if peak - (len(block_ids) - block_ids.count(NO_BLOCK)) + revived > pool.num_free:
                return None
        cached = count if self.offload is None else self._num_cached(hashes, count)
        if not self._fetch(hashes, cached, count):  # the store has forgotten that block, so the recursion ends
            return self.admit(request, self.get_computed_blocks(request), max_new_tokens)
        # All prefix blocks are shared before any block is allocated (_loaded, allocate_slots): a cached one without
        # users could otherwise be given away and overwritten.
        for pool, block_ids in zip(self.pools, shared, strict=True):
            pool.share(block_id for block_id in block_ids if block_id != NO_BLOCK)
        self._tables[request.request_id] = [
            BlockTable(
                self._loaded(index, hidden, block_ids, hashes[:count]),
                hidden.stop if hidden else 0,
                num_registered=cached,
            )
            for index, (hidden, block_ids) in enumerate(zip(self._hidden(count), shared, strict=True))
        ]
        request.num_computed_tokens = count * self.block_size
        self._in_progress.update((block_hash, request.request_id) for block_hash in hashes[cached:])
        num_new = min(max_new_tokens, request.num_missing_tokens)
        if not self.allocate_slots(request, num_new):
            raise PenstockError(f"request {request.request_id} was admitted without room")
        return num_new

    def _fetch(self, hashes: list[bytes], cached: int, count: int) -> bool:
        """Let the store read the reusable blocks that the cache lacks. Return False if one is missing after all."""
        if self.offload is None or cached == count:
            return True
        return all(
            self.offload.store.fetch(group, hashes[index])
            for group, (hidden, pool) in enumerate(zip(self._hidden(count), self.pools, strict=True))
            for index in range(cached, count)
            if index not in hidden and pool.lookup(hashes[index]) is None
        )

    def _loaded(self, group: int, hidden: range, block_ids: list[int], hashes: list[bytes]) -> list[int]:
        """Complete the table with new blocks for those that the store has fetched."""
        for index in range(len(hashes)):
            if index not in hidden and block_ids[index] == NO_BLOCK and self.offload is not None:
                (block_ids[index],) = self.pools[group].allocate(1)
                self.offload.load(group, block_ids[index], hashes[index])
        return block_ids

    def fork(self, parent: Request, child: Request) -> None:
        """Give a waiting request everything computed by its parent, whose tokens it begins with.

        The executor must not know the child yet: its table changes when it writes for the first time.
        """
        assert child.request_id not in self._tables, "a fork runs already"
        assert parent.num_computed_tokens <= child.num_tokens, "a fork begins with all that is computed of its parent"
        tables = self._tables[parent.request_id]
        self._settled.pop(parent.request_id, None)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share(block_id for block_id in table.block_ids if block_id != NO_BLOCK)
        self._tables[child.request_id] = [
            BlockTable(list(table.block_ids), table.num_released, num_registered=table.num_registered)
            for table in tables
        ]
        child.num_computed_tokens = parent.num_computed_tokens
        self._forked.add(child.request_id)

    def _shared(self, group: CacheGroup, pool: BlockPool, hashes: list[bytes], count: int) -> list[int]:
        """Make a table of the reusable leading blocks, with -1 where the window has passed or a block is stored."""
        hidden = group.hidden_blocks(count * self.block_size)
        found = [None if index in hidden else pool.lookup(hashes[index]) for index in range(count)]
        return [NO_BLOCK if block_id is None else block_id for block_id in found]

    def settled_streams(self, requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
        """Separate the streams whose next token fits blocks that the executor knows (most decodes) from all others.

        The former need nothing from this manager in the next step.
        """
        streams, others, settled = list[Request](), list[Request](), self._settled
        for request in requests:
            is_settled = request.is_stream and len(request.token_ids) <= settled.get(request.request_id, 0)
            (streams if is_settled else others).append(request)
        return streams, others

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Free the blocks that the window has passed, then allocate blocks for num_new_tokens after the computed ones.

        A fork takes a copy of a shared block before it writes to it. Return False, with nothing allocated, if a group
        has too few free blocks.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= self._settled.get(request.request_id, 0):  # most decodes
            return True
        self._settled.pop(request.request_id, None)
        tables = self._tables[request.request_id]
        if self._has_windows:
            self._release_passed(request, tables)
        missing = [
            table_length(group, num_tokens) - len(table.block_ids)
            for group, table in zip(self.groups, tables, strict=True)
        ]
        shared = self._shared_ends(request, tables) if request.request_id in self._forked else {}
        if max(missing) <= 0 and not shared:
            return True
        # All groups are checked before any block moves, so that a refusal leaves every table as it was.
        for group, (count, pool) in enumerate(zip(missing, self.pools, strict=True)):
            if max(0, count) + (group in shared) > pool.num_free:
                return False
        for group, index in shared.items():
            self._copy(group, tables[group], index)
        for count, pool, table in zip(missing, self.pools, tables, strict=True):
            table.block_ids.extend(pool.allocate(max(0, count)))
            assert len(table.block_ids) >= table.num_sent >= 0, "the executor knows blocks that the table has not"
        return True

    def _shared_ends(self, request: Request, tables: list[BlockTable]) -> dict[int, int]:
        """Find, by group, the index of the table entry that a fork writes next, if the block has other users."""
        shared = {}
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            index = 0 if self.groups[group].ring else request.num_computed_tokens // self.groups[group].block_size
            if index < len(table.block_ids) and pool.is_shared(table.block_ids[index]):
                shared[group] = index
        if not shared:  # and it never will be again
            self._forked.discard(request.request_id)
        return shared

    def _copy(self, group: int, table: BlockTable, index: int) -> None:
        """Replace a shared block by a copy."""
        if table.num_sent > index:
            raise PenstockError("a block is to be replaced that the executor knows")
        pool, source = self.pools[group], table.block_ids[index]
        (table.block_ids[index],) = pool.allocate(1)
        pool.release([source])
        self._copies.append(BlockCopy(group, source, table.block_ids[index]))

    def _release_passed(self, request: Request, tables: list[BlockTable]) -> None:
        """Free the blocks that the windows have passed."""
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            hidden = group.hidden_blocks(request.num_computed_tokens)
            for index in range(max(table.num_released, hidden.start), min(hidden.stop, len(table.block_ids))):
                pool.release([table.block_ids[index]])
                table.block_ids[index] = NO_BLOCK
                table.num_released = index + 1

    def commit(self, request: Request) -> None:
        """Register the request's full blocks for reuse: its computed tokens are in the cache now."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        tables = self._tables[request.request_id]
        if num_full <= tables[0].num_registered:  # most decodes: no block was filled
            return
        assert request.num_computed_tokens <= request.num_tokens, "more is computed than there are tokens"
        assert num_full <= len(tables[0].block_ids), "tokens are computed that have no block"
        self._extend_hashes(request, num_full)
        start = tables[0].num_registered
        self._end_progress(request, start, num_full)
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            assert table.num_registered == start, "groups differ in what is registered, and tables[0] stands for all"
            for index in range(start, num_full):
                block_id, block_hash = table.block_ids[index], request.block_hashes[index]
                if block_id != NO_BLOCK and pool.register(block_id, block_hash) and self.offload is not None:
                    self.offload.filled(group, block_id, block_hash)
            table.num_registered = num_full
        for block_hash in request.block_hashes[start:num_full] if self.pins else ():
            self.pins.hold(block_hash)

    def _end_progress(self, request: Request, start: int, stop: int) -> None:
        for block_hash in request.block_hashes[start:stop]:
            if self._in_progress.get(block_hash) == request.request_id:
                del self._in_progress[block_hash]

    def free(self, request: Request) -> None:
        """Free all blocks of a request. The last ones are reused first, so that prefixes live longest."""
        # Its id must leave every book of this manager: a request of the same name may come in the next step.
        self._settled.pop(request.request_id, None)
        for pool, table in zip(self.pools, self._tables.pop(request.request_id), strict=True):
            pool.release(block_id for block_id in reversed(table.block_ids) if block_id != NO_BLOCK)
        self._end_progress(request, 0, len(request.block_hashes))
        self._forked.discard(request.request_id)
        request.num_computed_tokens = 0

    def reset(self) -> None:
        """Forget every table and all content, because the bookkeeping broke off half-way and cannot be relied on."""
        self.pools = self._new_pools()
        if self.offload is not None:
            self.offload.forget()
        self.pins.lose_blocks(self.pools)
        self._tables.clear()
        self._settled.clear()
        self._in_progress.clear()
        self._forked.clear()
        self._copies.clear()

    # --- pins ------------------------------------------------------------------------------------------------------

    def pin(self, name: str, prefix: Request) -> None:
        """Hold the full blocks of a prefix from now on: cached ones at once, the others when they are computed.

        Raises:
            InvalidRequestError: there is no prefix caching, the prefix fills no block, or Pins.add refuses it.
        """
        count = prefix.num_tokens // self.block_size
        if not self.enable_prefix_caching:
            raise invalid("prompt", "there is nothing to pin, because prefix caching is off")
        if count == 0:
            message = f"{prefix.num_tokens} tokens do not fill a block of {self.block_size}, so there is none to pin"
            raise invalid("prompt", message)
        is_public = not prefix.pending_salt
        self._extend_hashes(prefix, count)
        start = (count - 1) * self.block_size  # prompts may differ in the last block, where the pinned text was cut
        hidden = [group.hidden_blocks(start) for group in self.groups]
        self.pins.add(name, Pin(prefix.block_hashes, hidden, is_public))

    # --- counts ----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached_blocks for pool in self.pools)

    def check_integrity(self) -> None:
        """Raise PenstockError unless every block is free, or in as many tables and pins as its pool counts users."""
        for group, pool in enumerate(self.pools):
            used = Counter(i for tables in self._tables.values() for i in tables[group].block_ids if i != NO_BLOCK)
            used.update(self.pins.held(group))
            pool.check_integrity(used)
        unknown = (set(self._in_progress.values()) | self._forked) - set(self._tables)
        if unknown:
            raise PenstockError(f"blocks are being computed, or shared, for unknown requests: {sorted(unknown)}")


def _has_needed(hidden: range, runs: list[int], count: int) -> bool:
    """Tell whether the first `count` blocks, but for hidden ones, are available; runs: as _cached_runs gives them."""
    first = min(hidden.start, count)
    return runs[count - 1] >= count - max(hidden.stop, first) and (first == 0 or runs[first - 1] == first)


def table_length(group: CacheGroup, num_tokens: int) -> int:
    """Count the block table entries for num_tokens, released ones included; one for a ring."""
    return min(1, num_tokens) if group.ring else -(-num_tokens // group.block_size)


def peak_blocks(group: CacheGroup, num_tokens: int, chunk: int) -> int:
    """Compute the most blocks of a group that a request of num_tokens holds, computed in chunks of `chunk`.

    With a window of W tokens, W - 1 earlier tokens and the chunk are needed, which may touch one block more; and, from
    the beginning on, the blocks of the sink tokens.
    """
    blocks = table_length(group, num_tokens)
    if group.sliding_window is None or group.ring:
        return blocks
    sinks = -(-group.num_sink_tokens // group.block_size)
    return min(blocks, sinks + -(-(group.sliding_window - 1 + chunk) // group.block_size) + 1)
