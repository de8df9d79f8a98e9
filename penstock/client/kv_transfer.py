"""KVTransfer: what a client does when prompts are computed on some engines and answers on others. Without a role it
does nothing.

    --kv-role prefill    computes prompts for other servers (server/kv_transfer.py), and gives the blocks (kv_blocks.py)
    --kv-role decode     has prompts computed by such servers (remote_prefill.py)

The modules of these roles are imported on first use: their HTTP client takes longer to load than a server to start.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.client.open_requests import OpenRequest
from penstock.interface.kv_transfer import KVTransferOptions, RemotePrefillStatus
from penstock.interface.messages import ModelInfo

if TYPE_CHECKING:
    from penstock.client.kv_blocks import KVBlocks
    from penstock.client.remote_prefill import RemotePrefill


class KVTransfer:
    """Carries out a role. It belongs to one event loop."""

    def __init__(self, options: KVTransferOptions) -> None:
        self._options = options
        self._info: ModelInfo | None = None
        self._blocks: KVBlocks | None = None
        self._remote: RemotePrefill | None = None

    def use(self, info: ModelInfo) -> None:
        """Expect the blocks of this model from now on."""
        if self._info is None or info.block_directory != self._info.block_directory:
            self._info, self._blocks = info, None

    @property
    def given_blocks(self) -> "KVBlocks | None":
        """Return the blocks that other servers may fetch; None if the role is not prefill, or no engine was ready."""
        return self._own_blocks() if self._options.kv_role == "prefill" else None

    @property
    def status(self) -> RemotePrefillStatus | None:
        """Return a snapshot; None if the role is not decode."""
        if self._options.kv_role != "decode":
            return None
        return RemotePrefillStatus() if self._remote is None else replace(self._remote.status)

    async def prefill(self, request: OpenRequest) -> None:
        """Get the blocks of a prompt to where the engine finds them, if it will look for them.

        What another server cannot do is computed here. Raise InvalidRequestError if the directory of blocks cannot be
        used.
        """
        if self._options.kv_role != "decode":
            return
        params, blocks = request.params, self._own_blocks()
        if blocks is None or params.prompt_logprobs is not None or params.pooling is not None:
            return
        if self._remote is None:
            from penstock.client.remote_prefill import RemotePrefill

            self._remote = RemotePrefill(self._options)
        await self._remote.fetch(request.engine_requests[0], blocks)

    def _own_blocks(self) -> "KVBlocks | None":
        info = self._info
        if self._blocks is None and info is not None and info.block_directory is not None:
            from penstock.client.kv_blocks import KVBlocks

            self._blocks = KVBlocks(info.block_directory, info.block_size)
        return self._blocks

    async def close(self) -> None:
        """End the connections to other servers."""
        if self._remote is not None:
            await self._remote.close()
