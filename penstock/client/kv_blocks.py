"""KVBlocks: the blocks that engines of one kind keep as files, as seen by the process that owns an engine.

An engine saves each block of its cache as a file as soon as it is full, and looks for a prompt's blocks there before it
computes them (`--kv-offload-dir`). So putting a file there hands a block over. Nothing here reads the cache itself.
"""

from collections.abc import Sequence

from penstock.assembly.offload import open_files
from penstock.client.router import block_hashes
from penstock.interface.messages import BlockDirectory


class KVBlocks:
    """The files of one directory of blocks.

    Args:
        block_size: tokens per block.

    Attributes:
        name: name of the directory. Equal names mean equal bits.

    Raises:
        InvalidRequestError: the directory cannot be used.
    """

    def __init__(self, directory: BlockDirectory, block_size: int) -> None:
        self.name = directory.name
        self._block_bytes = directory.block_bytes
        self.block_size = block_size
        self._files = open_files(directory)

    def hashes(self, token_ids: Sequence[int], salt: str | None) -> list[bytes]:
        """Return the content hashes of the blocks that a prompt can reuse: whole blocks, never with the last token."""
        return block_hashes(token_ids[:-1], salt, self.block_size, most=len(token_ids))

    def names(self, block_hash: bytes) -> list[tuple[str, int]]:
        """Return the name and the size in bytes of a block's file in each cache group."""
        sizes = enumerate(self._block_bytes)
        return [(self._files.name_of(group, block_hash), num_bytes) for group, num_bytes in sizes]

    def count(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """Return how many leading blocks have files in every group. The first `start` are known to have them."""
        missing = (index for index in range(start, len(hashes)) if not self.has(hashes[index]))
        return next(missing, len(hashes))

    def has(self, block_hash: bytes) -> bool:
        """Return whether a block has a file in every group. Blocks behind a sliding window may never have one."""
        return all(self._files.has(name) for name, _ in self.names(block_hash))

    def has_file(self, name: str) -> bool:
        return self._files.has(name)

    def read(self, name: str) -> bytes | None:
        """Return a whole file, with its checksum; None if there is no file of this name."""
        return self._files.read_whole(name)

    def write(self, name: str, data: bytes, num_bytes: int) -> bool:
        """Keep what `read` returned in another process. Return False if damaged or not kept. Use one thread only."""
        return self._files.write_whole(name, data, num_bytes)
