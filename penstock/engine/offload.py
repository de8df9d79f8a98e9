"""Offload: which blocks the next step saves to the store beyond the cache, and which it loads. It
handles block ids and hashes, not contents.

    full, or about to be overwritten -> save -> store -> hit of a prefix -> load

A block is saved when its place is given away. If the store outlives this process, it is also saved as soon as it is
full, so that a killed engine leaves behind what it has computed. Saves come first in a step, while the blocks that the
step overwrites still have their content. Loads have been read and checked before, so a step cannot fail on them.
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
        """Return whether a step is needed to save blocks, even if it computes nothing."""
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
        """Drop what was collected, because the bookkeeping broke off half-way."""
        self._saves.clear()
        self._loads.clear()
