"""Named API keys: the file, the limits, the reload, and what of them may be seen."""

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import InvalidRequestError
from penstock.interface.sampling_params import SamplingParams
from penstock.server.accounts import Account, Bucket, KeyLimitError, KeyRules, Stock
from penstock.server.context import ServerContext
from penstock.server.keys import KeyRing, read_key_file
from penstock.server.metrics import Metrics
from penstock.server.middleware import KeyMiddleware
from penstock.server.options import ServerOptions
from penstock.server.timelines import RequestLog
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, app_client, get, running, samples, send, stream, wait_until

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789abc"
FILE = f"""
[alice]
key = "{ALICE}"
max_concurrent_requests = 1
max_choices = 2
max_tokens = 9

[bob]
key = "{BOB}"
"""
BODY = {"prompt": "a", "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def client(file: Path) -> TestClient:
    return app_client(options=dataclasses.replace(QUIET, api_key_file=str(file), access_log=True))


def test_keys_begin_in_turn(file: Path) -> None:
    """Guards against a crowd of one key's requests, all of which begin before the first of another key."""
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["state"]["log"].key)

    async def scenario() -> None:
        layer = KeyMiddleware(app, keys=KeyRing(None, str(file)), metrics=Metrics([]))
        state = app_client().app
        scopes = [
            {"path": "/v1/models", "method": "GET", "headers": [(b"authorization", b"Bearer " + key.encode())],
             "state": {"log": RequestLog("")}, "app": state} for key in [*[ALICE] * 20, BOB, BOB]
        ]  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            for scope in scopes:
                tasks.create_task(layer(scope, receive, send))

    async def receive() -> Message:
        raise NotImplementedError

    async def send(message: Message) -> None:
        raise NotImplementedError

    asyncio.run(scenario())
    assert len(begun) == 22
    assert begun[:6].count("bob") == 2


def test_further_prompts_of_a_call_begin_in_turn(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a call of many prompts, all of which begin before another key's request."""
    begin, begun = ServerContext.begin, []

    async def counted(context: ServerContext, log: RequestLog) -> None:
        begun.append(log.key)
        await begin(context, log)

    monkeypatch.setattr(ServerContext, "begin", counted)
    assert client.post("/v1/completions", json={**BODY, "prompt": ["a"] * 5}, headers=bearer(BOB)).status_code == 200
    assert begun == ["bob"] * 5


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ('[a]\nkey = "sk-0123456789abcdef"\nmax_concurent_requests = 3\n', "unknown field `max_concurent_requests`", 3),
        ('[a]\nkey = "sk-0123456789abcdef"\n[b]\nkey="short"\n', "at least 16", 4),
        ('[a]\nkey = "sk-0123456789abcdef"\nmax_tokens = "many"\n', "Expected `int", 3),
        ('[a]\nkey = "sk-0123456789abcdef"\nmax_tokens = 0\n', ">= 1", 3),
        ('[a]\nkey = "sk-0123456789abcdef"\n[b]\n\nkey = "sk-0123456789abcdef"\n', "has the key of [a]", 5),
        ('[a]\nmax_tokens = 3\n', "missing required field `key`", 1),
        ('\n[a]\nkey = oops\n', "Invalid value", 3),
        ('key = "sk-0123456789abcdef"\n', "key is not a table", 1),
        ('# nothing\n["a b"]\nkey = "sk-0123456789abcdef"\n', "is not a name", 2),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, reason: str, line: int) -> None:
    """Guards against a limit that is misspelt and ignored, and against an error that does not say where."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read_key_file(path)
    message = str(caught.value)
    assert reason in message
    assert f"line {line}" in message
    assert str(path) in message
    assert "0123456789abcdef" not in message  # errors are logged


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", None])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Guards against a server that is open to all because its file is empty or missing."""
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="api_key_file"):
        ServerOptions(api_key_file=str(path))


def test_names_are_seen_and_keys_never(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a key in the log or in /metrics, and against calls that cannot be told apart there."""
    with caplog.at_level(logging.DEBUG):
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE)).status_code == 200
        assert client.post("/v1/completions", json=BODY, headers=bearer(ALICE + "x")).status_code == 401
        assert client.post("/v1/completions", json=BODY).status_code == 401
    assert " key=alice " in caplog.text
    metrics = samples(client.get("/metrics", headers=bearer(ALICE)).text)
    assert metrics['penstock_key_requests_total{key="alice"}'] == 1
    assert metrics['penstock_key_tokens_total{key="alice",kind="completion"}'] == 5
    assert ALICE not in caplog.text + client.get("/metrics", headers=bearer(ALICE)).text
    assert client.get("/health").status_code == 200


def test_a_call_beyond_its_keys_limits_is_refused(client: TestClient) -> None:
    """Guards against limits that are read and not held, and against those of one key hitting another."""
    for more, param in (({"n": 3}, "n"), ({"prompt": ["a", "b", "c"]}, "n"), ({"max_tokens": 10}, "max_tokens")):
        answer = client.post("/v1/completions", json=BODY | more, headers=bearer(ALICE))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert client.post("/v1/completions", json=BODY | more, headers=bearer(BOB)).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a"}]}  # without max_tokens: as many as the key may have
    answer = client.post("/v1/chat/completions", json=chat, headers=bearer(ALICE))
    assert answer.json()["usage"]["completion_tokens"] == 9


def test_concurrent_requests_are_limited(file: Path) -> None:
    """Guards against a limit that a stream, or a client that has hung up, escapes or holds for ever."""
    fake = FakeEngineClient(Behaviour(hang_at=1))
    body = BODY | {"stream": True}
    with running(fake, dataclasses.replace(QUIET, api_key_file=str(file))) as server:
        url = f"{server.url}/v1/completions"
        with stream("POST", url, json=body, headers=bearer(ALICE)) as response:
            lines = response.iter_lines()
            next(lines)
            refused = send(url, json=BODY, headers=bearer(ALICE))
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["Retry-After"]) >= 1
            assert get(f"{server.url}/status", headers=bearer(ALICE)).status_code == 200
            fake.behaviour = Behaviour()
            assert send(url, json=BODY, headers=bearer(BOB)).status_code == 200
        wait_until(lambda: send(url, json=BODY, headers=bearer(ALICE)).status_code == 200)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_limits_per_minute_fill_steadily() -> None:
    """Guards against a window that lets through twice the limit around its edge, and a Retry-After that is not true."""
    clock = Clock()
    account = Account("a", KeyRules(ALICE, requests_per_minute=60, tokens_per_minute=600), clock)
    for _ in range(60):
        account.open().release()
    with pytest.raises(KeyLimitError) as caught:
        account.open()
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now = 1.0
    lease = account.open()
    lease.use("prompt", 1200)  # not reserved, as for a pin: overdrawn by a minute
    lease.release()
    clock.now = 59.0
    with pytest.raises(KeyLimitError, match="tokens_per_minute = 600") as caught:
        account.open()
    clock.now += caught.value.retry_after_s
    account.open()


def test_running_calls_never_pass_the_tokens_of_a_minute() -> None:
    """Guards against a limit that counts a call when it has ended: calls that run together would pass it."""
    account = Account("a", KeyRules(ALICE, tokens_per_minute=600), Clock())
    first, second = account.open(), account.open()
    first.reserve(500)
    with pytest.raises(KeyLimitError, match="may need more") as caught:
        second.reserve(200)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    first.use("prompt", 30)
    first.use("completion", 70)
    first.release()
    second.reserve(500)


def test_a_lease_ends_with_its_last_holder() -> None:
    """Guards against a background call that frees its place when its POST has returned."""
    account = Account("a", KeyRules(ALICE, max_concurrent_requests=1, tokens_per_minute=600), Clock())
    connection = account.open()
    connection.reserve(600)
    background = connection.share()
    connection.release()
    with pytest.raises(KeyLimitError):
        account.open()
    background.use("completion", 1)
    background.release()
    account.open().reserve(599)
    assert account.num_open == 1


def test_no_key_takes_what_is_left_for_others() -> None:
    """Guards against one key that fills what all keys share."""
    stock = Stock(100)
    while stock.has("a", 1):
        stock.take("a", 1)
    assert stock.held["a"] == 50
    while stock.has("b", 1):
        stock.take("b", 1)
    assert stock.held["b"] == 25
    stock.take("a", -50)
    assert stock.held == {"b": 25}
    assert stock.has("b", 25)


@pytest.mark.parametrize("given", [None, 10])
def test_a_call_that_could_never_run_is_refused_for_good(given: int | None) -> None:
    """Guards against a 429 that no waiting cures, and against an answer without max_tokens that needs a full minute."""
    account = Account("a", KeyRules(ALICE, tokens_per_minute=20), Clock())
    with pytest.raises(InvalidRequestError, match="tokens_per_minute = 20"):
        account.limited(SamplingParams(max_tokens=given), 1, 20)
    with pytest.raises(InvalidRequestError, match="may ask for 4"):
        account.limited(SamplingParams(max_tokens=5, n=2), 2, 4)
    assert account.limited(SamplingParams(max_tokens=None), 1, 4).max_tokens == 16


@pytest.mark.parametrize("amount", [0.0, 1.0])
def test_the_wait_that_is_named_suffices(amount: float) -> None:
    """Guards against a client that waits as long as it was told, and is refused again by a rounding error."""
    clock = Clock()
    for per_minute in (1, 7, 61, 1_000_003):
        bucket = Bucket(per_minute, clock)
        bucket.spend(per_minute + 3.3)
        clock.now += bucket.wait_s(amount)
        assert bucket.wait_s(amount) == 0.0


def test_a_reload_takes_new_keys_and_keeps_what_was_used(file: Path) -> None:
    """Guards against a reload that forgets what runs, and against a bad file that locks everybody out."""
    ring = KeyRing(None, str(file))
    alice = ring.find(ALICE.encode())
    assert alice is not None
    alice.open()
    new_key = ALICE[::-1]
    file.write_text(FILE.replace(ALICE, new_key))
    assert ring.reload() == 2
    assert ring.find(ALICE.encode()) is None
    assert ring.find(new_key.encode()) is alice
    with pytest.raises(KeyLimitError):
        alice.open()
    file.write_text("[alice]\n")
    with pytest.raises(InvalidRequestError):
        ring.reload()
    assert ring.find(new_key.encode()) is alice


def test_unlimited_parameters_stay_as_they_are() -> None:
    params = SamplingParams(max_tokens=None)
    assert Account("a", KeyRules(ALICE)).limited(params, 4, 9) is params


PROGRAM = """
import sys
from penstock.server.options import ServerOptions
from penstock.server.serve import run
from tests.server.fakes import FakeEngineClient
sys.exit(run(FakeEngineClient(), ServerOptions(port=0, api_key_file=sys.argv[1])))
"""


def test_sighup_reads_the_file_again(file: Path) -> None:
    """Guards against SIGHUP's default, which is to end the process, and against a bad file that does so."""
    program = [sys.executable, "-c", PROGRAM, str(file)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = next(word for word in process.stdout.readline().split() if word.startswith("http"))
            lines = iter(process.stderr.readline, "")
            file.write_text("[alice]\nkey = 5\n")
            os.kill(process.pid, signal.SIGHUP)
            wrong = next(line for line in lines if "stay as they were" in line)
            assert f"{file}: [alice] key: Expected `str`, got `int` (at line 2)" in wrong
            assert get(f"{url}/status", headers=bearer(ALICE)).status_code == 200
            file.write_text(FILE.replace(ALICE, ALICE[::-1]))
            os.kill(process.pid, signal.SIGHUP)
            assert next(line for line in lines if "API keys read" in line)
            assert get(f"{url}/status", headers=bearer(ALICE)).status_code == 401
            assert get(f"{url}/status", headers=bearer(ALICE[::-1])).status_code == 200
        finally:
            process.kill()


def test_a_fifo_as_key_file_holds_up_nobody(file: Path) -> None:
    """Guards against a reload that waits for ever in the event loop, where every stream stands still."""
    ring = KeyRing(None, str(file))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidRequestError, match="not a regular file"):
        ring.reload()
    assert ring.find(ALICE.encode()) is not None


def test_a_key_in_the_path_is_not_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a key in the log of a client that puts it into the URL."""
    with caplog.at_level(logging.DEBUG, "penstock"):
        client.get(f"/v1/{ALICE}/models", headers=bearer(ALICE))
    assert "GET ... 404" in caplog.text
    assert ALICE not in "".join(one.getMessage() for one in caplog.records if one.name.startswith("penstock"))
