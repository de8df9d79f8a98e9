"""On a real Ray cluster of three nodes, here: a Serve config file, deaths, growth and shrinking, ranks."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="an extra")

from penstock import LLM, AsyncLLM, SamplingParams
from penstock_lab.prove.ray_deaths import cluster_of, parent_of

OPTIONS: dict[str, Any] = {"model": "demo", "max_model_len": 512, "kv_cache_memory_bytes": 2**24, "threads": 1}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3}
BODY = {"prompt": "Once upon", "max_tokens": 400, "ignore_eos": True, "stream": True, **SAMPLING}
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True, **SAMPLING)
TARGET = 1000  # queued tokens of a replica
SETTLE_S = 280.0  # beside a build, three nodes take minutes to start what is missing
pytestmark = pytest.mark.timeout(1200)  # of a test that settles several times


@pytest.fixture(scope="module")
def expected() -> tuple[str, list[int]]:
    """The answer of one process."""
    with LLM(**OPTIONS) as llm:
        output = llm.generate(["Once upon"], PARAMS)[0].outputs[0]
    return output.text, list(output.token_ids)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(3) as found:
        yield found


@pytest.fixture(scope="module")
def url(cluster: Any) -> Iterator[str]:
    """Where a service listens that was deployed as `serve run FILE` does it."""
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"num_replicas": 2, "max_replicas": 3, "num_cpus": 1, "target_queued_tokens": TARGET}
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 8.0}
    application = {
        "name": "penstock",
        "route_prefix": "/",
        "import_path": "penstock_lab.ray_app:build",
        "args": {**OPTIONS, **options, **delays},
    }
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", SETTLE_S)
        client = serve_start(http_options=config["http_options"], proxy_location="HeadOnly")
    client.deploy_apps(ServeDeploySchema.model_validate(config), _blocking=True)
    yield f"http://127.0.0.1:{port}"
    serve.delete("penstock")


async def stream(client: httpx.AsyncClient) -> AsyncIterator[str]:
    """The pieces of an answer's text."""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                piece = httpx.Response(200, content=line[6:]).json()
                assert "error" not in piece, piece
                yield piece["choices"][0]["text"]


async def serving(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The engines that serve."""
    status = (await client.get("/status")).json()
    return [one for one in status.get("replicas", []) if one["state"] == "ready"]


async def until(client: httpx.AsyncClient, happened: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Ask for the engines until they are as wanted."""
    async with asyncio.timeout(SETTLE_S):
        while not happened(found := await serving(client)):
            await asyncio.sleep(0.1)
        return found


def run(url: str, story: Any) -> None:
    async def with_client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=SETTLE_S) as client:
            await story(client)

    asyncio.run(with_client())


def test_a_stream_outlives_its_replica(url: str, expected: tuple[str, list[int]]) -> None:
    """Guards against a config file that Serve cannot build, and a stream that ends or changes with its replica."""

    async def story(client: httpx.AsyncClient) -> None:
        await until(client, lambda engines: len(engines) == 2)
        text, killed = "", 0
        async for piece in stream(client):
            text += piece
            if text and not killed:
                killed = next(one["pid"] for one in await serving(client) if one["choices"])
                os.kill(parent_of(killed), signal.SIGKILL)
        assert text == expected[0]

    run(url, story)


def test_a_flood_adds_replicas_and_quiet_takes_them_away(url: str, expected: tuple[str, list[int]]) -> None:
    """Guards against a number of replicas that stays, and a stream that is cut when its replica is taken away."""

    async def story(client: httpx.AsyncClient) -> None:
        wanted = 24  # streams at once, of 200 tokens on average
        found: list[bool] = []

        async def keep_asking(number: int) -> None:
            while number < wanted:
                found.append("".join([piece async for piece in stream(client)]) == expected[0])

        asking = [asyncio.create_task(keep_asking(number)) for number in range(wanted)]
        await until(client, lambda engines: len(engines) == 3)
        wanted = 3  # for which two replicas are enough
        await until(client, lambda engines: len(engines) == 2)
        wanted = 0
        await asyncio.gather(*asking)
        assert len(found) >= 24
        assert all(found)

    run(url, story)


def test_ranks_on_several_nodes_and_one_that_is_killed(
    cluster: Any, expected: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ranks that all land on one node, compute other bits, or take the stream with them."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    async def story() -> list[int]:
        split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
        async with AsyncLLM(**OPTIONS, **split) as llm:
            token_ids: list[int] = []
            ranks = []
            async for output in llm.generate("Once upon", PARAMS):
                token_ids = list(output.outputs[0].token_ids)
                if not ranks:
                    ranks = processes_of("penstock.ranks.process")
                    nodes = {parent_of(parent_of(pid)) for pid in ranks}
                    assert (len(ranks), len(nodes)) == (4, 3)
                    os.kill(ranks[0], signal.SIGKILL)
            assert llm.status().restarts == 1
            assert not set(ranks) & set(processes_of("penstock.ranks.process"))
            return token_ids

    assert asyncio.run(story()) == expected[1]


def processes_of(module: str) -> list[int]:
    """The children of places that run a module."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and module in (folder / "cmdline").read_text().split("\0"):
                found.append(int(folder.name))
    return found
