"""The client's part when prompts are computed on some engines and answers on others.

It is imported only with a role, because its HTTP client takes longer to load than a server to start.

    --kv-role prefill    computes prompts for other servers (server/app.py), and gives them the blocks
    --kv-role decode     has prompts computed by such servers (RemotePrefill)

    decode server                              prefill server
    POST /v1/kv/prefill  token ids ----------> computes the prompt; its engine saves each full block as a file
                         <-- lines: how many blocks are ready so far
    POST /v1/kv/blocks  names ---------------> the files that are missing here, with their checksums
    the engine finds the files, and goes on after them

So long prompts do not hold up the streams of the decode server (the disaggregated run of JetStream; DistServe, Zhong et
al. 2024). The blocks are what the engine here would have computed: directories have the same name only if their bits
are equal. If anything fails (a server is gone or busy, a block is damaged), the prompt is computed here instead.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec

from penstock.client.admission import Router, block_hashes
from penstock.client.open_requests import OpenRequest
from penstock.errors import PenstockError
from penstock.interface.kv_transfer import MAX_BATCH, KVTransferOptions, Progress, RemotePrefillStatus
from penstock.interface.messages import BlockDirectory, EngineRequest, ModelInfo
from penstock.runner.block_store import open_files

LOGGER = logging.getLogger("penstock")
CONNECT_S = 2.0
SILENCE_S = 10.0  # a prefill server sends something every second
RETRY_S = 5.0  # a server that failed is not asked for this long
BATCH_BYTES = 4 * 2**20  # of blocks in one answer; the last block may exceed it
AT_ONCE = 4  # most answers under way
STANDSTILL_S = 120.0  # a prompt of which no block becomes ready for this long is computed here
MAX_LINE_BYTES = 64 * 1024  # of a line of progress, and of an error
BLOCK_OVERHEAD = 256  # bytes that an answer has beside each block


class KVTransfer:
    """Carries out a role. It belongs to one event loop."""

    def __init__(self, options: KVTransferOptions) -> None:
        self._shares_blocks = options.kv_role == "prefill"
        self._remote = RemotePrefill(options) if options.kv_role == "decode" else None
        self._info: ModelInfo | None = None
        self._blocks: KVBlocks | None = None

    def use(self, info: ModelInfo) -> None:
        """Expect the blocks of this model from now on."""
        if self._info is None or info.block_directory != self._info.block_directory:
            self._info, self._blocks = info, None

    @property
    def shared_blocks(self) -> "KVBlocks | None":
        """The blocks that other servers may fetch; None if the role is not prefill, or no engine was ready."""
        return self._own_blocks() if self._shares_blocks else None

    @property
    def status(self) -> RemotePrefillStatus | None:
        """A snapshot; None if the role is not decode."""
        return None if self._remote is None else replace(self._remote.status)

    async def prefill(self, request: OpenRequest, root: bytes = b"") -> None:
        """Get the blocks of a prompt to where the engine finds them, if it will look for them. root: of its adapter.

        A block that no other server provides is computed here. Raise InvalidRequestError if the directory of blocks
        cannot be used.
        """
        if self._remote is None:
            return
        params, blocks = request.params, self._own_blocks()
        if blocks is not None and params.prompt_logprobs is None and params.pooling is None:
            await self._remote.fetch(request.engine_requests[0], blocks, root)

    def _own_blocks(self) -> "KVBlocks | None":
        info = self._info
        if self._blocks is None and info is not None and info.block_directory is not None:
            self._blocks = KVBlocks(info.block_directory, info.block_size)
        return self._blocks

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()


class KVBlocks:
    """The blocks that engines of one kind keep as files, as seen by the process that owns an engine.

    An engine saves each block of its cache as a file as soon as it is full, and looks for a prompt's blocks there
    before it computes them (`--kv-offload-dir`). So putting a file there hands a block over. Nothing here reads the
    cache itself.

    Args:
        block_size: tokens per block.

    Attributes:
        name: name of the directory. Equal names mean equal bits.
        files: its files; only one thread may write.

    Raises:
        InvalidRequestError: the directory cannot be used.
    """

    def __init__(self, directory: BlockDirectory, block_size: int) -> None:
        self.name = directory.name
        self._block_bytes = directory.block_bytes
        self.block_size = block_size
        self.files = open_files(directory)

    def hashes(self, token_ids: Sequence[int], salt: str | None, root: bytes = b"") -> list[bytes]:
        """Hash the blocks that a prompt can reuse: whole blocks, never with the last token."""
        return block_hashes(token_ids[:-1], salt, self.block_size, most=len(token_ids), root=root)

    def names(self, block_hash: bytes) -> list[tuple[str, int]]:
        """List the name and the size in bytes of a block's file in each cache group."""
        sizes = enumerate(self._block_bytes)
        return [(self.files.name_of(group, block_hash), num_bytes) for group, num_bytes in sizes]

    def count(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """Count the leading blocks that have files in every group. The first `start` are known to have them."""
        missing = (index for index in range(start, len(hashes)) if not self.has(hashes[index]))
        return next(missing, len(hashes))

    def has(self, block_hash: bytes) -> bool:
        """Check that a block has a file in every group. Blocks behind a sliding window may never have one."""
        return all(self.files.has(name) for name, _ in self.names(block_hash))


class _PrefillError(PenstockError):
    """A prefill server did not do what it was asked to do."""


# Whatever another server sends, the prompt can be computed here.
FAILURES = (httpx.HTTPError, msgspec.MsgspecError, ValueError, RecursionError, _PrefillError)


@dataclass(slots=True)
class _Server:
    url: str
    num_tokens: int = 0  # prompt tokens that it is computing for this engine
    retry_at: float = 0.0


class RemotePrefill:
    """Has prompts computed by prefill servers, and fetches their blocks. It belongs to one event loop.

    Args:
        transport: replaces the network.

    Attributes:
        status: what was done so far.
    """

    def __init__(self, options: KVTransferOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.status = RemotePrefillStatus()
        self._servers = {url: _Server(url) for url in options.kv_prefill_urls}
        self._router: Router[str] | None = None
        self._coming: dict[str, asyncio.Task[Exception | None]] = {}  # by name, the files under way
        self._places = asyncio.Semaphore(AT_ONCE)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="block-writer")  # BlockFiles has one writer
        key = options.kv_prefill_api_key
        plain = {"Accept-Encoding": "identity"}
        self._http = httpx.AsyncClient(
            headers=plain if key is None else {**plain, "Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def fetch(self, request: EngineRequest, blocks: KVBlocks, root: bytes = b"") -> None:
        """Add the blocks of a prompt to those of the engine, as far as servers are available. Raise nothing."""
        token_ids = request.prompt_token_ids
        hashes = blocks.hashes(token_ids, request.cache_salt, root)
        if blocks.count(hashes) == len(hashes):
            return
        if self._router is None:
            self._router = Router(blocks.block_size)
        self.status.num_prompts += 1
        self.status.num_transferring += 1
        try:
            await self._fetch_somewhere(self._router, request, blocks, hashes)
        finally:
            self.status.num_transferring -= 1

    async def _fetch_somewhere(
        self, router: Router[str], request: EngineRequest, blocks: KVBlocks, hashes: list[bytes]
    ) -> None:
        """Ask servers, one after the other, until one has given the blocks or none is left."""
        token_ids = request.prompt_token_ids
        tried: set[str] = set()
        while (server := self._choose(router, hashes, len(token_ids), tried)) is not None:
            tried.add(server.url)
            server.num_tokens += len(token_ids)
            try:
                await self._fetch_from(server.url, request, blocks, hashes)
                return
            except FAILURES as error:
                self.status.num_failures += 1
                server.retry_at = time.monotonic() + RETRY_S
                router.forget(server.url)
                reason = str(error) or type(error).__name__
                LOGGER.warning("prefill server %s: %s; it is asked again in %g s", server.url, reason, RETRY_S)
            finally:
                server.num_tokens -= len(token_ids)

    def _choose(self, router: Router[str], hashes: Sequence[bytes], num_tokens: int, tried: set[str]) -> _Server | None:
        """Choose the server that can compute the prompt soonest, by cache and queue; None if none is left."""
        now = time.monotonic()
        able = {url: float(one.num_tokens) for url, one in self._servers.items() if one.retry_at <= now}
        able = {url: queued for url, queued in able.items() if url not in tried}
        if not able:
            return None
        chosen = router.choose(hashes, num_tokens, able)
        router.note(chosen, hashes)
        return self._servers[chosen]

    async def _fetch_from(self, url: str, request: EngineRequest, blocks: KVBlocks, hashes: list[bytes]) -> None:
        body = {
            "store": blocks.name,
            "prompt_token_ids": request.prompt_token_ids,
            "cache_salt": request.cache_salt,
            "adapter": request.adapter,
        }
        done, line = 0, Progress(0)
        async with self._http.stream("POST", f"{url}/v1/kv/prefill", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _PrefillError(_reason(answer.status_code, await _content(answer, MAX_LINE_BYTES)))
            moved_at = time.monotonic()
            async for text in _lines(answer):
                line = msgspec.json.decode(text, type=Progress)
                if line.num_blocks > done:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > STANDSTILL_S:
                    raise _PrefillError(f"no block has become ready for {STANDSTILL_S:g} s")
                ready = min(max(line.num_blocks, done), len(hashes))
                await self._fetch_files(url, blocks, hashes[done:ready], must_be_there=True)
                done = ready
        if line.error is not None or not line.done:
            raise _PrefillError(line.error or "the answer broke off")
        # Behind a sliding window, some cache groups have no block.
        await self._fetch_files(url, blocks, hashes[done:], must_be_there=False)

    async def _fetch_files(self, url: str, blocks: KVBlocks, hashes: Sequence[bytes], *, must_be_there: bool) -> None:
        """Fetch the missing files of these blocks, several at a time."""
        tasks: set[asyncio.Task[Exception | None]] = set()
        batch: list[tuple[str, int]] = []
        for name, num_bytes in (pair for block_hash in hashes for pair in blocks.names(block_hash)):
            if name in self._coming:  # prompts that arrive together often begin alike
                tasks.add(self._coming[name])
            elif not blocks.files.has(name):
                batch.append((name, num_bytes))
                if sum(size for _, size in batch) >= BATCH_BYTES or len(batch) == MAX_BATCH:
                    tasks.add(self._start(url, blocks, batch, must_be_there))
                    batch = []
        if batch:
            tasks.add(self._start(url, blocks, batch, must_be_there))
        for error in await asyncio.gather(*(asyncio.shield(task) for task in tasks)):  # others may wait for them too
            if error is not None:
                raise error

    def _start(
        self, url: str, blocks: KVBlocks, batch: list[tuple[str, int]], must_be_there: bool
    ) -> asyncio.Task[Exception | None]:
        """Begin to fetch files, for all prompts that wait for them."""
        task = asyncio.create_task(self._fetch_batch(url, blocks, batch, must_be_there))
        names = [name for name, _ in batch]
        self._coming.update(dict.fromkeys(names, task))

        def arrived(_: object) -> None:
            for name in names:
                del self._coming[name]

        task.add_done_callback(arrived)
        return task

    async def _fetch_batch(
        self, url: str, blocks: KVBlocks, batch: list[tuple[str, int]], must_be_there: bool
    ) -> Exception | None:
        """Fetch files. Return what went wrong."""
        try:
            names, most = [name for name, _ in batch], sum(size + BLOCK_OVERHEAD for _, size in batch)
            async with self._places, self._http.stream("POST", f"{url}/v1/kv/blocks", json={"names": names}) as answer:
                content = await _content(answer, max(most, MAX_LINE_BYTES))
            if answer.status_code != httpx.codes.OK:
                raise _PrefillError(_reason(answer.status_code, content))
            found = msgspec.msgpack.decode(content, type=list[bytes | None])
            for (name, num_bytes), data in zip(batch, found, strict=True):
                if data is None:
                    if must_be_there:
                        raise _PrefillError(f"block {name} is missing")
                    continue
                loop = asyncio.get_running_loop()
                if not await loop.run_in_executor(self._writer, blocks.files.write_whole, name, data, num_bytes):
                    raise _PrefillError(f"block {name} arrived damaged, or could not be written")
                self.status.num_blocks += 1
                self.status.num_bytes += num_bytes
        except FAILURES as error:
            return error
        return None

    async def close(self) -> None:
        await self._http.aclose()
        self._writer.shutdown(wait=False, cancel_futures=True)


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer. Raise _PrefillError if it is compressed, which was not asked for."""
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise _PrefillError("the answer is compressed")
    async for piece in answer.aiter_raw():
        yield piece


async def _content(answer: httpx.Response, most: int) -> bytes:
    """Read an answer of at most so many bytes."""
    content = bytearray()
    async for piece in _pieces(answer):
        content += piece
        if len(content) > most:
            raise _PrefillError(f"the answer has more than {most} bytes")
    return bytes(content)


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in _pieces(answer):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise _PrefillError(f"a line has more than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


def _reason(status: int, content: bytes) -> str:
    """Describe a failed answer in one line: its status, and the error message if it has one."""
    try:
        found: Any = msgspec.json.decode(content)
        return f"HTTP {status}: {found['error']['message']}"[:300]
    except (msgspec.DecodeError, TypeError, KeyError, RecursionError, UnicodeDecodeError):
        return f"HTTP {status}"
