"""What a key may use and uses: everything that runs is charged while it runs, and given back once."""

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.accounts import Account, KeyLimitError, KeyRules
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, RunningServer, get, running, samples, send, stream, wait_until

ALICE, BOB, ADMIN = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "admin"))
FILE = f"""
[alice]
key = "{ALICE}"
tokens_per_minute = 100
max_concurrent_requests = 2

[bob]
key = "{BOB}"

[admin]
key = "{ADMIN}"
admin = true
"""
CALL = {"model": "fake", "input": [{"role": "user", "content": "a"}], "max_output_tokens": 20}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "keys.toml").write_text(FILE)
    options = replace(QUIET, api_key_file=str(tmp_path / "keys.toml"), drain_timeout_s=0.5)
    with running(FakeEngineClient(), options) as server:
        yield server


def post(server: RunningServer, key: str, path: str = "/v1/responses", **more: Any) -> Any:
    return send(f"{server.url}{path}", json=CALL | more, headers=bearer(key))


def account(server: RunningServer, key: str) -> Account:
    found = server.keys.find(key.encode())
    assert found is not None
    return found


def test_background_calls_are_charged_while_they_run(server: RunningServer) -> None:
    """Guards against a quota that a call escapes because its POST returns before it has computed anything."""
    server.client.behaviour = Behaviour(hang_at=3)
    answers = [post(server, ALICE, background=True) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"

    def counted(name: str) -> float:
        return samples(get(f"{server.url}/metrics", headers=bearer(ADMIN)).text)[f"penstock_key_{name}"]

    wait_until(lambda: counted('tokens_total{key="alice",kind="completion"}') == 2 * 3)
    assert counted('refusals_total{key="alice"}') == 1
    for answer in answers[:2]:
        send(f"{server.url}/v1/responses/{answer.json()['id']}/cancel", json={}, headers=bearer(ALICE))
    wait_until(lambda: account(server, ALICE).num_open == 0)
    server.client.behaviour = Behaviour()
    assert post(server, ALICE).status_code == 200


def test_an_abandoned_stream_keeps_its_place(server: RunningServer) -> None:
    """Guards against resumable streams that cost nothing once their client has hung up."""
    server.client.behaviour = Behaviour(hang_at=2)
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "resumable": True}
    for _ in range(2):
        with stream("POST", f"{server.url}/v1/completions", json=body, headers=bearer(ALICE)) as response:
            next(response.iter_lines())
    assert send(f"{server.url}/v1/completions", json=body, headers=bearer(ALICE)).status_code == 429


def test_a_call_that_cannot_be_begun_gives_back_what_it_held(server: RunningServer, monkeypatch: Any) -> None:
    """Guards against a call that stays in the table, and a place of its key, when its source cannot be made."""

    def fails(*_: Any) -> Any:
        raise ValueError("scripted")

    monkeypatch.setattr(server._serving._app.state.context, "sources", {"responses": fails})
    for _ in range(3):  # more than the key may have open
        assert post(server, ALICE).status_code == 500
    assert account(server, ALICE).num_open == 0
    assert (len(server.kept), server.kept._unfinished.used, server.kept._bytes.used) == (0, 0, 0)


def test_one_key_does_not_take_all_places_of_background_calls(server: RunningServer, monkeypatch: Any) -> None:
    """Guards against small calls of one key after which no other key gets an answer."""
    server.client.behaviour = Behaviour(hang_at=1)
    monkeypatch.setattr(server.kept._unfinished, "capacity", 20)
    codes = [post(server, BOB, background=True).status_code for _ in range(12)]
    assert codes == [200] * 10 + [429] * 2
    assert post(server, ADMIN, background=True).status_code == 200


def test_what_a_key_has_stored_makes_room_for_this_key_only(server: RunningServer, monkeypatch: Any) -> None:
    """Guards against one key's answers that push out another's, and against a bound that is checked too late."""
    monkeypatch.setattr(server.kept._bytes, "capacity", 200_000)
    first = post(server, ADMIN).json()["id"]
    for _ in range(60):
        assert post(server, BOB, metadata={"k": "x" * 500}).status_code == 200
        assert server.kept._bytes.used <= 200_000
    assert server.kept._bytes.held["bob"] > 50_000
    assert get(f"{server.url}/v1/responses/{first}", headers=bearer(ADMIN)).status_code == 200
    measured = sum(call.measured() for call in server.kept._calls.values())
    assert server.kept._bytes.used == measured


@pytest.mark.parametrize("metadata", [{"k": "x" * 513}, {"k" * 65: ""}, {str(i): "" for i in range(17)}])
def test_metadata_is_small(server: RunningServer, metadata: dict[str, str]) -> None:
    """Guards against megabytes that a call stores beside its answer: OpenAI's limits hold here too."""
    answer = post(server, BOB, metadata=metadata)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_the_parts_of_a_call_are_freed_when_it_is_forgotten(server: RunningServer) -> None:
    """Guards against a cycle of references, which keeps a call's memory until the collector runs."""
    gc.collect()
    gc.disable()
    try:
        stored = {post(server, BOB).json()["id"] for _ in range(5)}
        calls = [weakref.ref(call) for call in server.kept._calls.values()]
        assert len(calls) == 5
        for call_id in stored:
            httpx.delete(f"{server.url}/v1/responses/{call_id}", headers=bearer(BOB))
        wait_until(lambda: all(call() is None for call in calls))
    finally:
        gc.enable()


def test_a_plain_key_sees_its_own_use_only(server: RunningServer) -> None:
    """Guards against /metrics that tells one tenant how much another one uses, and which prefixes are pinned."""
    assert post(server, ALICE).status_code == post(server, BOB).status_code == 200
    body = {"name": "secret", "prompt": "abc"}
    assert send(f"{server.url}/v1/cache/pin", json=body, headers=bearer(ADMIN)).status_code == 200
    own = get(f"{server.url}/metrics", headers=bearer(BOB)).text
    assert 'key="bob"' in own
    assert "alice" not in own
    assert "secret" not in own
    assert "secret" in get(f"{server.url}/metrics", headers=bearer(ADMIN)).text


def test_a_key_without_a_priority_is_not_more_urgent_than_others() -> None:
    """Guards against a flood at -1000 before which other keys wait."""
    assert Account("a", KeyRules("k")).allowed_priority(-1000) == 0
    assert Account("a", KeyRules("k")).allowed_priority(7) == 7
    assert Account("a", KeyRules("k", priority=-5)).allowed_priority(-1000) == -5
    assert Account("", KeyRules("k")).allowed_priority(-1000) == -1000


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_an_account_returns_to_where_it_was(seed: int) -> None:
    """Guards against a path on which something is not given back, or given back twice: any mix of calls and ends."""
    rng, clock = random.Random(seed), [0.0]
    key = Account("a", KeyRules("k", max_concurrent_requests=6, tokens_per_minute=1000), lambda: clock[0])
    spent, holders = 0, []
    for _ in range(60):
        choice = rng.random()
        if choice < 0.4:
            try:
                lease = key.open()
            except KeyLimitError:
                continue
            holders.append([lease, 0])
            try:
                lease.reserve(most := rng.randrange(400))
                holders[-1][1] = most
            except KeyLimitError:
                holders.pop()[0].release()
                continue
            if rng.random() < 0.5:  # a call that outlives its connection
                holders.append([lease.share(), 0])
        elif holders and choice < 0.8:
            one = rng.choice(holders)
            amount = rng.randint(0, one[1])
            one[0].use("completion", amount)
            one[1] -= amount
            spent += amount
            assert spent <= 1000
        elif holders:
            holders.pop(rng.randrange(len(holders)))[0].release()
        assert key.num_open <= 6
    for lease, _ in holders:
        lease.release()
    assert key.num_open == 0
    assert key.tokens is not None
    assert key.tokens._level == pytest.approx(1000 - spent)
