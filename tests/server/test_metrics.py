"""/metrics and /status show what happened."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from penstock.errors import EngineOverloadedError
from penstock.interface.kv_transfer import RemotePrefillStatus
from penstock.interface.messages import EngineOutput
from penstock_lab.prove.scripted import MAX_NUM_SEQS, ScriptedServer
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, app_client, get, running, samples, stream, wait_until

JSON = [(b"content-type", b"application/json")]
ROOT = Path(__file__).parents[2]
IN_VLLMS_DASHBOARDS = {
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count", "e2e_request_latency_seconds_sum",
    "generation_tokens_total", "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum", "iteration_tokens_total_bucket", "kv_cache_usage_perc",
    "num_preemptions_total", "num_requests_running", "num_requests_waiting", "prefix_cache_hits_total",
    "prefix_cache_queries_total", "prompt_tokens_total", "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket", "request_inference_time_seconds_bucket",
    "request_max_num_generation_tokens_bucket", "request_prefill_time_seconds_sum", "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum", "request_success_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_drafts_total", "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
}  # fmt: skip
ABSENT = {
    "iteration_tokens_total_bucket", "request_inference_time_seconds_bucket",
    "request_max_num_generation_tokens_bucket",
}  # fmt: skip
BODY = {"prompt": "a", "max_tokens": 4}


def test_metrics_count_requests_and_times() -> None:
    """Guards against histograms that stay empty, and against labels from the path, whose number is unbounded."""
    client = app_client()
    client.post("/v1/completions", json={**BODY, "n": 2})
    client.post("/v1/completions", json={**BODY, "stream": True})
    client.post("/v1/completions", json={"prompt": ""})
    for index in range(5):
        client.get(f"/no/such/{index}")
        client.get(f"/v1/models/{index}")
    found = samples(client.get("/metrics").text)
    assert found['penstock_http_requests_total{route="/v1/completions",status="200"}'] == 2
    assert found['penstock_http_requests_total{route="/v1/completions",status="400"}'] == 1
    assert found['penstock_http_requests_total{route="/v1/models/{model:path}",status="404"}'] == 5
    assert found['penstock_http_requests_total{route="other",status="404"}'] == 5
    assert found['penstock_choices_total{finish_reason="length"}'] == 3
    assert found['penstock_http_errors_total{code="model_not_found"}'] == 5
    assert found["penstock_time_to_first_token_seconds_count"] == 2
    assert found["penstock_inter_token_latency_seconds_count"] == 3 * 3
    assert found["penstock_request_time_per_output_token_seconds_count"] == 3
    assert found["penstock_e2e_request_latency_seconds_count"] == 2
    assert (found["penstock_request_prompt_tokens_sum"], found["penstock_request_prompt_tokens_count"]) == (4, 2)
    assert (found["penstock_request_generation_tokens_sum"], found["penstock_request_generation_tokens_count"]) == (
        12,
        3,
    )
    assert found["process_resident_memory_bytes"] > 10**6
    assert not [name for name in found if "_created" in name]


def test_embeddings_have_no_tokens() -> None:
    """Guards against embeddings that count as requests whose decoding took no time."""
    client = app_client()
    assert client.post("/v1/embeddings", json={"input": "abc"}).status_code == 200
    found = samples(client.get("/metrics").text)
    assert found["penstock_request_prefill_time_seconds_count"] == 1
    assert found["penstock_request_prompt_tokens_count"] == 1
    for name in ("decode_time_seconds", "time_per_output_token_seconds", "generation_tokens"):
        assert found[f"penstock_request_{name}_count"] == 0
    assert found["penstock_time_to_first_token_seconds_count"] == 0


def test_the_names_of_vllm() -> None:
    """Guards against dashboards made for vLLM that stay empty: each of its names that its own dashboards use, with its
    labels, unless it is one of those that docs/metrics.md calls absent."""
    client = app_client(options=dataclasses.replace(QUIET, metrics_names="vllm", served_model_names=("m",)))
    client.post("/v1/completions", json=BODY)
    found = samples(client.get("/metrics").text, "m")
    for name in IN_VLLMS_DASHBOARDS - ABSENT:
        assert any(key.startswith(f"vllm:{name}{{") for key in found), name
    assert found['vllm:request_success_total{engine="0",finished_reason="length"}'] == 1
    assert found['vllm:time_to_first_token_seconds_count{engine="0"}'] == 1
    assert found['vllm:kv_cache_usage_perc{engine="0"}'] == 1 - 7 / 8
    assert not any(key.startswith("penstock_requests_running") for key in found)
    assert "penstock_healthy" in found  # what vLLM has no name for
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in ABSENT:
        assert f"`vllm:{name.removesuffix('_bucket')}`" in page


def test_a_refusal_for_a_quota_is_no_overload(tmp_path: Path) -> None:
    """Guards against an alert about overload whenever one key exceeds its own limit."""
    key = "sk-alice-0123456789"
    (tmp_path / "keys.toml").write_text(f'[alice]\nkey = "{key}"\nrequests_per_minute = 1\n')
    fake = FakeEngineClient()
    client = app_client(fake, dataclasses.replace(QUIET, api_key_file=str(tmp_path / "keys.toml"), api_key="k"))
    headers, admin = {"Authorization": f"Bearer {key}"}, {"Authorization": "Bearer k"}
    statuses = [client.post("/v1/completions", json=BODY, headers=headers).status_code for _ in range(3)]
    assert statuses == [200, 429, 429]
    fake.overload = EngineOverloadedError("full")
    assert client.post("/v1/completions", json=BODY, headers=admin).status_code == 429
    found = samples(client.get("/metrics", headers=admin).text)
    assert found['penstock_http_errors_total{code="rate_limit_exceeded"}'] == 2
    assert found['penstock_http_errors_total{code="engine_overloaded"}'] == 1


def test_metrics_show_the_engine() -> None:
    """Guards against gauges that freeze at what they were when the server started."""
    fake = FakeEngineClient()
    client = app_client(fake)
    before = samples(client.get("/metrics").text)
    fake.num_tokens, fake.making_progress = 41, False
    fake.remote_prefill = RemotePrefillStatus(num_transferring=3)
    after = samples(client.get("/metrics").text)
    assert (before["penstock_generation_tokens_total"], after["penstock_generation_tokens_total"]) == (0, 41)
    assert (before["penstock_healthy"], after["penstock_healthy"]) == (1, 0)
    assert after["penstock_kv_blocks"] == 8
    assert (before["penstock_requests_transferring"], after["penstock_requests_transferring"]) == (0, 3)
    assert after["penstock_engine_restarts_total"] == 2
    assert after['penstock_engine_state{state="ready"}'] == 1


@pytest.mark.covers("J23", "F10")
def test_backlogs_are_those_of_the_load() -> None:
    """Guards against backlogs that /metrics and /status do not show, show under other names than documented, or that
    stay when the load has gone: 94 prompts of 40 tokens after a step of 512, and at the end."""

    async def scenario() -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
        server = ScriptedServer("demo")
        engine, step, allowed = server.client.engine, server.client.engine.step, 0

        def held_step() -> list[EngineOutput]:
            nonlocal allowed
            allowed -= 1
            return step() if allowed >= 0 else []

        engine.step = held_step  # type: ignore[method-assign]
        prompts = [[100 + number] * 40 for number in range(94)]
        body = json.dumps({"model": "demo", "prompt": prompts, "max_tokens": 20, "ignore_eos": True}).encode()
        call = asyncio.create_task(server.call("POST", "/v1/completions", body, JSON))
        while engine.stats().num_waiting < 94:
            await asyncio.sleep(0)
        allowed = 1
        while not engine.stats().num_running:
            await asyncio.sleep(0)
        during = samples((await server.call("GET", "/metrics")).body.decode(), "demo")
        status = json.loads((await server.call("GET", "/status")).body)
        allowed = 10**6
        assert (await call).status == 200
        after = samples((await server.call("GET", "/metrics")).body.decode(), "demo")
        assert server.client.leftovers() is None
        await server.client.shutdown()
        return during, status, after

    during, status, after = asyncio.run(scenario())
    expected = {"running": 13, "waiting": 81, "prefilling": 1, "preempted": 0}
    assert {name: status[name] for name in expected} == expected
    assert {name: during[f"penstock_requests_{name}"] for name in expected} == expected
    assert {after[f"penstock_requests_{name}"] for name in expected} == {0}
    assert during["penstock_slots"] == status["slots"] == MAX_NUM_SEQS


def test_two_servers_do_not_share_metrics() -> None:
    """Guards against a registry of the module: a second app in the process would crash or count for the first."""
    first, second = app_client(), app_client()
    first.post("/v1/completions", json=BODY)
    counts = [samples(client.get("/metrics").text) for client in (first, second)]
    assert [count["penstock_e2e_request_latency_seconds_count"] for count in counts] == [1, 0]


def test_status_is_exact() -> None:
    """Guards against scripts of users breaking on a renamed field."""
    status = app_client().get("/status").json()
    engine = {"pid": 4321, "state": "ready", "restarts": 2, "heartbeat_age_s": 0.01, "standby": None}
    assert status["engine"] == engine
    assert (status["running"], status["waiting"]) == (0, 0)
    assert status["kv_blocks"] == {"total": 8, "free": 7, "cached": 3, "pinned": 0}
    assert status["journal"] == {"requests": 0, "tokens": 5, "file": None}


def test_gone_clients_are_counted_as_499() -> None:
    """Guards against a client that left being counted as a success or a failure of the server."""
    with running(FakeEngineClient(Behaviour(hang_at=1))) as server:
        with stream("POST", f"{server.url}/v1/completions", json={**BODY, "stream": True}) as response:
            assert json.loads(next(response.iter_lines()).removeprefix("data: "))["choices"]
        gone = 'penstock_http_requests_total{route="/v1/completions",status="499"}'
        wait_until(lambda: samples(get(f"{server.url}/metrics").text).get(gone) == 1)


def test_version() -> None:
    """Guards against a version typed in twice."""
    from penstock import __version__

    assert app_client().get("/version").json() == {"version": __version__}
