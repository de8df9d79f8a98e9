"""Two engines behind one server: what is asked of them together, and a kill in the middle of mixed streams."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from penstock.config import EngineConfig
from penstock.kernels.cpu.host import Machine
from penstock.kernels.cpu.library import load_library
from penstock.models.config_json import load_model_config
from penstock.weights.hub import resolve_model
from penstock_lab.prove import servers
from tests.server.harness import QUIET, WAIT_S, RunningServer, call, get, samples, send, wait_until

PROMPT = list(range(3, 60))
SPARE = {"temperature": 1, "ignore_eos": True, "max_tokens": 80}
BODIES: list[dict[str, Any]] = [
    SPARE | {"prompt": [*PROMPT[:48], 5, 6], "seed": 2, "n": 2, "presence_penalty": 0.5},
    SPARE | {"prompt": [7] * 20, "seed": 3, "logprobs": 3},
    SPARE | {"prompt": [8] * 5, "seed": 4, "mirostat": 2},
    SPARE | {"prompt": "Once upon a time", "seed": 5, "repetition_penalty": 1.3},
    {"prompt": [9] * 30, "max_tokens": 40, "use_beam_search": True, "n": 3, "temperature": 0},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    started = RunningServer(AsyncLLM(max_num_seqs=4, data_parallel_size=2).client, QUIET)
    started.start()
    wait_until(lambda: get(f"{started.url}/health").status_code == 200)
    yield started
    started.stop()


def status(server: RunningServer) -> dict[str, Any]:
    answer: dict[str, Any] = get(f"{server.url}/status").json()
    return answer


def read(server: RunningServer, body: dict[str, Any], begun: threading.Semaphore | None = None) -> dict[int, Any]:
    """Return what the reader of each choice gets; a beam search is answered whole."""
    found: dict[int, Any] = {}
    if "use_beam_search" in body:
        answer = send(f"{server.url}/v1/completions", json=body).json()
        return {choice["index"]: choice for choice in answer["choices"]}
    for count, chunk in enumerate(servers.stream(server.url, body)):
        for choice in chunk["choices"]:
            pieces = found.setdefault(choice["index"], [])
            pieces.append((choice["text"], str(choice["logprobs"]), choice["finish_reason"]))
        if begun is not None and count == 20:
            begun.release()
    return found


def test_each_engine_is_shown_and_their_sum(server: RunningServer) -> None:
    """Guards against an operator who sees one engine of several, or cannot tell which of them has the queue."""
    for number in (0, 1):  # the second one goes to the other engine
        send(f"{server.url}/v1/completions", json={"prompt": [number + 3] * 20, "max_tokens": 2})
    wait_until(lambda: status(server)["running"] == 0)
    found = status(server)
    one, other = found["replicas"]
    assert (found["slots"], one["slots"], other["slots"]) == (8, 4, 4)
    assert found["generated_tokens_total"] == one["generated_tokens_total"] + other["generated_tokens_total"] > 0
    assert found["kv_blocks"]["total"] == 2 * one["kv_blocks"]["total"] == 2 * other["kv_blocks"]["total"]
    assert one["pid"] != other["pid"]
    metrics = samples(get(f"{server.url}/metrics").text, "demo")
    for index in (0, 1):
        assert metrics[f'penstock_slots{{engine="{index}"}}'] == 4
        assert metrics[f'penstock_engine_state{{engine="{index}",state="ready"}}'] == 1
        assert metrics[f'penstock_engine_process_resident_memory_bytes{{engine="{index}"}}'] > 10**7
        assert send(f"{server.url}/status/record?engine={index}").status_code == 200
    for wrong in ("2", "-1", "x", "9" * 5000):
        assert send(f"{server.url}/status/record", params={"engine": wrong}).status_code == 400


def test_pins_are_in_every_engine_and_prefixes_are_found_again(server: RunningServer) -> None:
    """Guards against a pin that only some requests find, and against a conversation that changes its engine."""
    tokens = [11] * 64
    assert send(f"{server.url}/v1/cache/pin", json={"prompt": tokens, "name": "all"}).status_code == 200
    wait_until(lambda: [one["kv_blocks"]["pinned"] for one in status(server)["replicas"]] == [4, 4])
    body = {"prompt": [12] * 40, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    for _ in range(3):
        answer = send(f"{server.url}/v1/completions", json=body).json()
        body["prompt"] = body["prompt"] + [12] * 20
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    assert call("DELETE", f"{server.url}/v1/cache/pin/all").status_code == 200
    wait_until(lambda: status(server)["kv_blocks"]["pinned"] == 0)


@pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")
def test_the_streams_of_an_engine_that_dies_go_on_in_the_other_one(server: RunningServer) -> None:
    """Guards against a token that is lost, repeated or changed by a move, against streams that wait for the restart
    though another engine has room, and against a server that counts as ill while one of its engines is well."""
    num_streams = sum("use_beam_search" not in body for body in BODIES)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        undisturbed = list(pool.map(lambda body: read(server, body), BODIES))
        begun = threading.Semaphore(0)
        disturbed = [pool.submit(read, server, body, begun) for body in BODIES]
        for _ in range(num_streams):
            assert begun.acquire(timeout=WAIT_S)
        before = status(server)
        victim = max((0, 1), key=lambda index: before["replicas"][index]["choices"])
        assert before["replicas"][victim]["choices"] > 0
        os.kill(before["replicas"][victim]["pid"], signal.SIGKILL)
        wait_until(lambda: status(server)["engine"]["restarts"] == 1)
        assert get(f"{server.url}/health").status_code == 200
        assert [future.result(WAIT_S) for future in disturbed] == undisturbed
    wait_until(lambda: status(server)["slots"] == 8)  # for other tests too
    after = status(server)
    assert [one["restarts"] for one in after["replicas"]] == [int(index == victim) for index in (0, 1)]
    assert [one["choices"] for one in after["replicas"]] == [0, 0]


@pytest.mark.covers("J22")
def test_offline_too() -> None:
    """Guards against LLM ignoring the option."""
    prompts = [{"prompt_token_ids": [number] * 20} for number in range(1, 7)]
    params, options = SamplingParams(max_tokens=12, seed=1), {"max_num_seqs": 2, "load_format": "mock"}
    with LLM(**options) as one, LLM(**options, engine_in_process=False, data_parallel_size=2) as two:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in two.generate(prompts, params)] == expected
        engines = two.client.status().replicas
        assert len([engine for engine in engines if engine.stats.num_generated_tokens_total]) == 2


def test_what_cannot_be_is_refused() -> None:
    """Guards against options that are accepted and ignored: engines that nobody starts, or that share their cores."""
    for size in (0, 65, True, 1.5):
        with pytest.raises(InvalidRequestError, match="data_parallel_size"):
            AsyncLLM(data_parallel_size=size)
    with pytest.raises(InvalidRequestError, match="engine_in_process=False"):
        LLM(data_parallel_size=2)
    model = load_model_config(resolve_model("demo"))
    with pytest.raises(InvalidRequestError, match="cpu_affinity"):
        EngineConfig.from_options(cpu_affinity="0").resolve(model, num_engines=2)


def test_the_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against engines that have a thread for every core each, and take each other's time."""
    monkeypatch.setattr("penstock.config.SMALL_MATRIX", 0)
    monkeypatch.setattr(Machine, "default_threads", lambda self: (7, "the cores"))
    model = load_model_config(resolve_model("demo"))
    threads = [EngineConfig().resolve(model, num_engines=number).numerics.threads for number in (1, 2, 3, 8)]
    assert threads == [7, 3, 2, 1]
    assert EngineConfig.from_options(threads=5).resolve(model, num_engines=2).numerics.threads == 5
