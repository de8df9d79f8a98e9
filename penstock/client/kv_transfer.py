"""KVTransfer: a client's part in prefill and decoding on different engines; nothing where its role is None.

    --kv-role prefill    computes prompts for others (server/kv_transfer.py), and gives them the blocks (kv_blocks.py)
    --kv-role decode     has prompts computed by such servers (remote_prefill.py)

What these roles need is imported when it is used: a server starts in less time than their HTTP client takes to load.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from penstock import validation as check
from penstock.client.input_processor import PreparedRequest
from penstock.config import CacheConfig
from penstock.errors import InvalidRequestError
from penstock.interface.messages import ModelInfo

if TYPE_CHECKING:
    from penstock.client.kv_blocks import KVBlocks
    from penstock.client.remote_prefill import RemotePrefill

ROLES = ("prefill", "decode")
MAX_URLS = 64
MAX_BATCH = 64  # blocks in an answer


@dataclass(frozen=True, slots=True)
class KVTransferOptions:
    """Whether prompts are computed here for others, or elsewhere for this engine.

    Attributes:
        kv_role: "prefill" gives its blocks to others, "decode" gets them; None computes all by itself.
        kv_prefill_urls: servers with the role prefill, for the role decode.
        kv_prefill_api_key: what they require.
    """

    kv_role: str | None = None
    kv_prefill_urls: tuple[str, ...] = ()
    kv_prefill_api_key: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError where an option is wrong."""
        if self.kv_role is not None:
            check.check_choice("kv_role", self.kv_role, ROLES)
        urls = check.string_tuple("kv_prefill_urls", self.kv_prefill_urls, max_items=MAX_URLS, max_length=1024)
        object.__setattr__(self, "kv_prefill_urls", tuple(url.rstrip("/") for url in urls))
        check.check_str("kv_prefill_api_key", self.kv_prefill_api_key, optional=True)
        if (self.kv_role == "decode") != bool(self.kv_prefill_urls):
            message = "kv_prefill_urls: the role decode needs at least one, and no other has any"
            raise InvalidRequestError(message, param="kv_prefill_urls")
        for url in self.kv_prefill_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise check.fail("kv_prefill_urls", url, "the URL of a server, like http://10.0.0.5:8000")

    def check_cache(self, cache: CacheConfig) -> None:
        """Raise InvalidRequestError where the engine has no directory for its blocks."""
        if self.kv_role is not None and cache.kv_offload_dir is None:
            message = (
                "kv_offload_dir: a kv_role needs a directory for blocks, at best in memory, like /dev/shm/penstock"
            )
            raise InvalidRequestError(message, param="kv_offload_dir")


class Progress(msgspec.Struct):
    """A line of the answer to POST /v1/kv/prefill.

    Attributes:
        num_blocks: leading blocks of the prompt that can be fetched.
        done: no more will come.
        error: why, if not all came.
    """

    num_blocks: int
    done: bool = False
    error: str | None = None


@dataclass(slots=True)
class RemotePrefillStatus:
    """What was handed over since the start.

    Attributes:
        num_prompts: for which a server was asked.
        num_failures: times that a server could not be asked, or broke off.
        num_blocks, num_bytes: fetched; those that were in a directory shared with the server are not.
    """

    num_prompts: int = 0
    num_failures: int = 0
    num_blocks: int = 0
    num_bytes: int = 0


class KVTransfer:
    """Does what a role asks for. Belongs to one event loop."""

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
        """Return the blocks that others may have; None where the role is not prefill, or no engine was ready."""
        return self._own_blocks() if self._options.kv_role == "prefill" else None

    @property
    def status(self) -> RemotePrefillStatus | None:
        """Return a snapshot; None where the role is not decode."""
        if self._options.kv_role != "decode":
            return None
        return RemotePrefillStatus() if self._remote is None else replace(self._remote.status)

    async def prefill(self, prepared: PreparedRequest) -> None:
        """Have the blocks of a prompt put where the engine finds them, if it will look for them. Raises nothing."""
        if self._options.kv_role != "decode":
            return
        params, blocks = prepared.params, self._own_blocks()
        if blocks is None or params.prompt_logprobs is not None or params.pooling is not None:
            return
        if self._remote is None:
            from penstock.client.remote_prefill import RemotePrefill

            self._remote = RemotePrefill(self._options)
        await self._remote.fetch(prepared.engine_requests[0], blocks)

    def _own_blocks(self) -> "KVBlocks | None":
        info = self._info
        if self._blocks is None and info is not None and info.block_directory is not None:
            from penstock.client.kv_blocks import KVBlocks

            self._blocks = KVBlocks(info.block_directory, info.block_size)
        return self._blocks

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()
