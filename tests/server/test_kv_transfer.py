"""Prefill and decoding on different engines: equal answers, whatever a prefill server does."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock import AsyncLLM, InvalidRequestError, SamplingParams
from penstock.client import kv_transfer
from penstock.client.kv_transfer import KVBlocks, RemotePrefill
from penstock.interface.kv_transfer import KVTransferOptions, Progress
from penstock.interface.messages import BlockDirectory, EngineRequest
from tests.server.harness import QUIET, RunningServer, get, send, wait_until

pytestmark = pytest.mark.covers("J22")
PROMPT = [(index * 7) % 300 + 3 for index in range(150)]
SPARE: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
BODIES: list[dict[str, Any]] = [
    SPARE | {"prompt": PROMPT, "temperature": 0},
    SPARE | {"prompt": [*PROMPT[:100], 5, 6, 7], "temperature": 1, "seed": 3, "n": 2, "presence_penalty": 0.5},
    SPARE | {"prompt": PROMPT[1:], "temperature": 1, "seed": 4, "cache_salt": "a tenant's"},
    SPARE | {"prompt": [9] * 70, "temperature": 0.7, "seed": 5, "echo": True},  # no cached prefix has its logprobs
    SPARE | {"prompt": [9] * 7, "temperature": 0.7, "seed": 6},  # less than a block
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RunningServer]]:
    """A prefill server and a decode server, with directories of their own, as on two machines."""
    directory = tmp_path_factory.mktemp("blocks")
    options: dict[str, Any] = {"max_num_seqs": 4, "threads": 1}
    prefill_server = RunningServer(
        AsyncLLM(kv_role="prefill", kv_offload_dir=str(directory / "a"), **options).client, QUIET
    )
    prefill_server.start()
    urls = ("http://127.0.0.1:9", prefill_server.url)  # nothing listens on the first one
    decode_server = RunningServer(
        AsyncLLM(kv_role="decode", kv_prefill_urls=urls, kv_offload_dir=str(directory / "b"), **options).client, QUIET
    )
    decode_server.start()
    for server in (prefill_server, decode_server):
        wait_until(lambda server=server: get(f"{server.url}/health").status_code == 200)
    yield prefill_server, decode_server
    prefill_server.stop()
    decode_server.stop()


def answer(server: RunningServer, body: dict[str, Any]) -> list[Any]:
    found = send(f"{server.url}/v1/completions", json=body).json()
    return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in found["choices"]]


def test_a_crowd_gets_the_answers_of_one_engine(servers: tuple[RunningServer, RunningServer]) -> None:
    """Guards against a block that is handed over wrong, and against prompts that are silently computed here."""
    prefill_server, decode_server = servers
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda body: answer(decode_server, body), BODIES * 2))
    assert found == [answer(prefill_server, body) for body in BODIES] * 2
    status = get(f"{decode_server.url}/status").json()
    remote = status["remote_prefill"]
    assert remote["num_prompts"] >= 3
    assert remote["num_failures"] >= 1  # the server that is not there
    assert remote["num_blocks"] == status["kv_offload"]["loaded_blocks_total"] >= 9 + 9
    again = send(f"{decode_server.url}/v1/completions", json=SPARE | {"prompt": PROMPT}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 144


def test_what_a_prefill_server_refuses(servers: tuple[RunningServer, RunningServer]) -> None:
    """Guards against blocks of other bits, files of other directories, and prompts that end the engine."""
    prefill_server, decode_server = servers
    store = prefill_server.client.kv_blocks.name  # type: ignore[attr-defined]  # an AsyncLLM
    prefill, blocks = f"{prefill_server.url}/v1/kv/prefill", f"{prefill_server.url}/v1/kv/blocks"
    ids = [1, 2, 3]
    assert send(prefill, json={"store": "penstock-other", "prompt_token_ids": ids}).status_code == 409
    for wrong in ([10**30], [-1], ["x"], None, [10**9]):
        assert send(prefill, json={"store": store, "prompt_token_ids": wrong}).status_code == 400, wrong
    assert send(prefill, json={"store": store, "prompt_token_ids": ids, "cache_salt": 3}).status_code == 400
    for ids, problem in (([5] * 100_000, "too many"), ([], "at least one")):
        refused = send(prefill, json={"store": store, "prompt_token_ids": ids})
        assert problem in msgspec.json.decode(refused.content.splitlines()[-1])["error"]
    names = ["../../etc/passwd", "0-zz", f"0-{'ab' * 16}", ".writing-1-probe"]
    assert msgspec.msgpack.decode(send(blocks, json={"names": names}).content) == [None] * 4
    for wrong in (["x"] * 65, ["x" * 65], [1], "x", None):
        assert send(blocks, json={"names": wrong}).status_code == 400, wrong
    assert send(f"{decode_server.url}/v1/kv/prefill", json={"store": store, "prompt_token_ids": ids}).status_code == 404


def test_roles_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """Guards against a role that is accepted and does nothing."""
    url = "http://127.0.0.1:8000"
    for options, param in (
        ({"kv_role": "both"}, "kv_role"),
        ({"kv_role": "prefill"}, "kv_offload_dir"),
        ({"kv_role": "decode", "kv_offload_dir": str(tmp_path)}, "kv_prefill_urls"),
        ({"kv_prefill_urls": [url]}, "kv_prefill_urls"),
        ({"kv_role": "decode", "kv_prefill_urls": ["10.0.0.5:8000"]}, "kv_prefill_urls"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            AsyncLLM(**options)
        assert caught.value.param == param


class FakePrefillServer:
    """Answers as it is told, with blocks of four bytes."""

    def __init__(
        self, lines: list[Progress | bytes], *, damage: str = "", missing: str = "none", **headers: str
    ) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.lines = [line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines]
        self.damage, self.missing = damage, missing
        routes = [
            Route("/v1/kv/prefill", self.prefill, methods=["POST"]),
            Route("/v1/kv/blocks", self.blocks, methods=["POST"]),
        ]
        self.status: Any = None  # of the decode server, while it asks
        self.backlog: list[int] = []
        self.transport = httpx.ASGITransport(Starlette(routes=routes))

    async def prefill(self, request: Request) -> Response:
        if self.status is not None:
            self.backlog.append(self.status.num_transferring)
        return Response(b"\n".join(self.lines) + b"\n", headers=self.headers)

    async def blocks(self, request: Request) -> Response:
        files = [self.file(name) for name in (await request.json())["names"]]
        return Response(b"?" if self.damage == "all" else msgspec.msgpack.encode(files))

    def file(self, name: str) -> bytes | None:
        data = self.source.files.read_whole(name)
        assert data is not None
        if re.match(self.missing, name):
            return None
        return data[:-1] + b"!" if re.match(self.damage or "never", name) else data

    def fill(self, source: KVBlocks, hashes: list[bytes]) -> None:
        """Have these blocks, in the two groups that the directory has."""
        self.source = source
        for block_hash in hashes:
            for name, _ in source.names(block_hash):
                source.files.write(name, b"1234")


OTHER_GROUP = r"1-.*"
CASES = {
    "all come": (FakePrefillServer([Progress(2), Progress(4, done=True)]), 8, 0),
    "one at a time": (FakePrefillServer([*(Progress(i) for i in range(5)), Progress(4, done=True)]), 8, 0),
    "more than there are": (FakePrefillServer([Progress(10**9, done=True)]), 8, 0),
    "none behind a window": (FakePrefillServer([Progress(0, done=True)], missing=OTHER_GROUP), 4, 0),
    "one is missing": (FakePrefillServer([Progress(4, done=True)], missing=OTHER_GROUP), 1, 1),
    "damaged": (FakePrefillServer([Progress(4, done=True)], damage=OTHER_GROUP), 1, 1),
    "rubbish for blocks": (FakePrefillServer([Progress(4, done=True)], damage="all"), 0, 1),
    "breaks off": (FakePrefillServer([Progress(2)]), 4, 1),
    "an error": (FakePrefillServer([Progress(1), Progress(1, done=True, error="no")]), 2, 1),
    "rubbish": (FakePrefillServer([b"<html>"]), 0, 1),
    "nothing": (FakePrefillServer([]), 0, 1),
    "nested deep": (FakePrefillServer([b"[" * 60_000]), 0, 1),
    "an endless line": (FakePrefillServer([b"1" * 200_000]), 0, 1),
    "no such charset": (FakePrefillServer([Progress(4, done=True)], content_type="text/plain; charset=zip"), 8, 0),
    "compressed": (FakePrefillServer([Progress(4, done=True)], content_encoding="gzip"), 0, 1),
}


@pytest.mark.covers("J23")
@pytest.mark.parametrize("case", CASES)
def test_whatever_it_answers(case: str, tmp_path: Path) -> None:
    """Guards against an answer that raises, hangs, or leaves a block that is not what was computed, and
    against a prompt that stays in the transfer backlog, or never was there."""
    server, num_blocks, num_failures = CASES[case]
    source, target = (KVBlocks(BlockDirectory(str(tmp_path / n), "penstock-x", 10**6, [4, 4]), 16) for n in "ab")
    request = EngineRequest("1", PROMPT[:70], SamplingParams(), cache_salt="s")
    hashes = source.hashes(request.prompt_token_ids, "s")
    assert len(hashes) == 4
    server.fill(source, hashes)

    async def fetch() -> RemotePrefill:
        options = KVTransferOptions("decode", ("http://prefill",))
        remote = RemotePrefill(options, transport=server.transport)
        server.status, server.backlog = remote.status, []
        await remote.fetch(request, target)
        await remote.close()
        return remote

    status = asyncio.run(fetch()).status
    assert (status.num_blocks, status.num_failures, status.num_prompts) == (num_blocks, num_failures, 1)
    assert (server.backlog, status.num_transferring) == ([1], 0)
    names = [name for block_hash in hashes for name, _ in target.names(block_hash)]
    assert [target.files.read_whole(name) for name in names if target.files.has(name)] == [
        source.files.read_whole(name) for name in names if target.files.has(name)
    ]
    assert sum(target.files.has(name) for name in names) == num_blocks


def test_a_server_that_stands_still_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that reports the same progress again and again, for which a prompt waits for ever."""
    monkeypatch.setattr(kv_transfer, "STANDSTILL_S", -1.0)  # it stands still with the first line that brings nothing
    server = FakePrefillServer([Progress(1), Progress(2), Progress(2), Progress(4, done=True)])
    source, target = (KVBlocks(BlockDirectory(str(tmp_path / n), "penstock-x", 10**6, [4, 4]), 16) for n in "ab")
    request = EngineRequest("1", PROMPT[:70], SamplingParams())
    server.fill(source, source.hashes(request.prompt_token_ids, None))

    async def fetch() -> RemotePrefill:
        remote = RemotePrefill(KVTransferOptions("decode", ("http://prefill",)), transport=server.transport)
        await remote.fetch(request, target)
        await remote.close()
        return remote

    status = asyncio.run(fetch()).status
    assert (status.num_blocks, status.num_failures) == (4, 1)


def test_a_server_that_failed_is_left_alone(tmp_path: Path) -> None:
    """Guards against requests that wait for a dead server one after the other, and for blocks that are here."""
    server = FakePrefillServer([b"x"])
    source, target = (KVBlocks(BlockDirectory(str(tmp_path / n), "penstock-x", 10**6, [4]), 16) for n in "ab")
    request = EngineRequest("1", PROMPT[:70], SamplingParams())
    server.fill(source, source.hashes(request.prompt_token_ids, None))

    async def fetch() -> RemotePrefill:
        options = KVTransferOptions("decode", ("http://one/", "http://two"))
        remote = RemotePrefill(options, transport=server.transport)
        for _ in range(3):
            await remote.fetch(request, target)
        await remote.fetch(request, source)
        await remote.close()
        return remote

    status = asyncio.run(fetch()).status
    assert (status.num_failures, status.num_prompts) == (2, 3)
