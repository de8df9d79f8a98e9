"""Offload: which blocks the next step saves to the store beyond the cache, and which it loads. No bytes, no tokens.

    full, or about to be overwritten -> save -> store -> hit of a prefix -> load

A block is saved when its place is given away and, if the store outlives this process, as soon as it is full, so that
an engine that is killed leaves behind what it has computed. Saves come first in a step: what was planned to be
overwritten is still there. Loads have been read and checked by then, so a step cannot fail on them.
"""

from penstock.interface.step import BlockStore, BlockTransfer


class Offload:
    """Collects the transfers of the next step."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.num_loaded = 0
        self._saves: dict[tuple[int, bytes], int] = {}  # group and hash -> the block that has the content
        self._loads: list[BlockTransfer] = []

    @property
    def has_work(self) -> bool:
        """Return whether a step is needed that saves, even if it computes nothing."""
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

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return what the next step saves, and what it loads."""
        saves = [BlockTransfer(group, block_id, found) for (group, found), block_id in self._saves.items()]
        loads, self._loads, self._saves = self._loads, [], {}
        return saves, loads

    def forget(self) -> None:
        """Drop what was collected: the bookkeeping that it came from broke off half-way."""
        self._saves.clear()
        self._loads.clear()
