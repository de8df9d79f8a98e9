"""Several models in one server, over engines that are fakes, and a sample of `prove --only models`, over real ones."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from penstock.client.model_pool import ModelPool, ServedModel
from penstock.errors import ModelLoadError, PenstockError
from penstock.interface.messages import ModelInfo
from penstock_lab.prove.servers import QUICK
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import WAIT_S, running, wait_until


class SleepyFake(FakeEngineClient):
    """A FakeEngineClient that counts its starts. With an error, it cannot be started."""

    failure: PenstockError | None = None

    def __init__(self, name: str, error: PenstockError | None = None) -> None:
        super().__init__(Behaviour(text=f"I am {name}."))
        self.info = ModelInfo(name, 512, 300, (257,), "float32", f"fp-{name}", {})
        self.error, self.num_starts, self.is_asleep = error, 0, True

    async def start(self) -> ModelInfo:
        if self.error is not None:
            raise self.error
        return await self.wake_up()

    async def wake_up(self) -> ModelInfo:
        await asyncio.sleep(0.001)
        self.num_starts, self.is_asleep = self.num_starts + 1, False
        return self.info

    async def sleep(self) -> None:
        assert not self.open, "a model was put to sleep under a request"
        self.is_asleep = True

    async def shutdown(self) -> None:
        pass


@contextmanager
def serving(errors: dict[str, PenstockError] | None = None, **options: Any) -> Iterator[tuple[httpx.Client, ModelPool]]:
    """A server of the models a, b and c, with memory for two."""

    def maker(name: str) -> Callable[[int | None], Any]:
        return lambda memory: SleepyFake(name, (errors or {}).get(name))

    pool = ModelPool([ServedModel(name, maker(name), memory=4, **options) for name in "abc"], budget=9, max_wait_s=20.0)
    with running(pool) as server, httpx.Client(base_url=server.url, timeout=WAIT_S, **QUICK) as client:
        yield client, pool


def ask(client: httpx.Client, model: str, **more: Any) -> Any:
    return client.post("/v1/completions", json={"model": model, "prompt": "Who?", "max_tokens": 40, **more})


def loaded(client: httpx.Client) -> list[str]:
    return [card["name"] for card in client.get("/api/ps").json()["models"]]


def test_each_route_asks_the_model_that_is_named() -> None:
    """Guards against an answer of another model, under another name, or after its memory was taken."""
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 40}
    with serving() as (client, pool):
        for model in "abcab":
            assert ask(client, model).json()["choices"][0]["text"] == f"I am {model}."
            answer = client.post("/v1/chat/completions", json={"model": model, **chat}).json()
            assert (answer["model"], answer["system_fingerprint"]) == (model, f"fp-{model}")
            assert f"I am {model}." in client.post("/v1/responses", json={"model": model, "input": "Who?"}).text
            assert f"I am {model}." in client.post("/v1/messages", json={"model": model, **chat}).text
            ollama = client.post("/api/generate", json={"model": f"{model}:latest", "prompt": "Who?", "stream": False})
            assert (ollama.json()["model"], ollama.json()["response"]) == (model, f"I am {model}.")
            assert client.post("/tokenize", json={"model": model, "prompt": "Who?"}).json()["count"] == 5
            assert client.post("/v1/embeddings", json={"model": model, "input": "Who?"}).json()["model"] == model
            streamed = ask(client, model, stream=True).text
            assert "".join(re.findall(r'"text":"([^"]*)"', streamed)) == f"I am {model}."
            assert pool.held <= 9
        wait_until(lambda: not any(model.num_uses for model in pool))  # the last answer may just have been sent
        assert ask(client, "d").status_code == 404
        assert "a, b, c" in ask(client, "d").json()["error"]["message"]
        del chat["max_tokens"]
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "a"  # the first, without a name


def test_what_is_loaded_is_shown() -> None:
    """Guards against lists, metrics and states of one model only, and against loading models to list them."""
    with serving() as (client, pool):
        assert [card["state"] for card in client.get("/v1/models").json()["data"]] == ["sleeping"] * 3
        assert [card["name"] for card in client.get("/api/tags").json()["models"]] == ["a", "b", "c"]
        assert client.post("/api/show", json={"model": "b"}).json()["capabilities"] == ["completion"]
        assert (loaded(client), client.get("/health").status_code) == ([], 200)
        for model in "ab":
            ask(client, model)
        card = client.get("/v1/models/b").json()
        assert (card["state"], card["max_model_len"]) == ("ready", 512)
        assert loaded(client) == ["a", "b"]
        ask(client, "c")
        assert loaded(client) == ["b", "c"]
        status = client.get("/status?model=c").json()
        assert (status["model"], status["models"]["a"]["state"], status["models"]["c"]["loads"]) == ("c", "sleeping", 1)
        assert status["models_memory_bytes"] == pool.held <= status["models_memory_budget_bytes"]
        text = client.get("/metrics").text
        for model, loads in (("a", 1.0), ("c", 1.0)):
            assert f'penstock_model_loads_total{{model_name="{model}"}} {loads}' in text
            assert f'penstock_generation_tokens_total{{model_name="{model}"}}' in text
        assert text.count("# TYPE penstock_healthy gauge") == 1
        assert client.get("/health?model=d").status_code == 404


def test_clients_say_how_long_a_model_stays() -> None:
    """Guards against keep_alive and ttl that are accepted and do nothing, or unload a model in use."""
    with serving(idle_s=100.0) as (client, pool):
        a, b, _ = pool
        ask(client, "a")
        assert client.post("/api/generate", json={"model": "a", "keep_alive": 0}).json()["done_reason"] == "unload"
        wait_until(lambda: loaded(client) == [])
        assert client.post("/api/generate", json={"model": "a"}).json()["done_reason"] == "load"
        assert (loaded(client), a.num_loads) == (["a"], 2)
        client.post("/api/chat", json={"model": "a", "keep_alive": -1, "messages": [{"role": "user", "content": "?"}]})
        assert a.expires_at is None
        client.post("/api/generate", json={"model": "a", "keep_alive": 1e300})  # an end that no date can show
        assert loaded(client) == ["a"]
        ask(client, "a")
        assert a.expires_at is not None
        for number, path, field in ((1, "/v1/completions", "prompt"), (2, "/pooling", "input")):
            answer = client.post(path, json={"model": "b", field: "Who?", "ttl": 0})
            assert (answer.status_code, "X-Ignored-Fields" in answer.headers) == (200, False)
            wait_until(lambda: loaded(client) == ["a"])
            assert b.num_loads == number


def test_one_that_fails_leaves_the_others_alone() -> None:
    """Guards against a model that cannot be loaded and ends the server, or whose files are named to clients."""
    with serving({"b": ModelLoadError("/secret/path is damaged")}) as (client, _):
        answer = ask(client, "b")
        assert (answer.status_code, "secret" in answer.text) == (503, False)
        assert ask(client, "a").status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/health?model=b").json()["error"]["message"] == "the engine is failed"


def test_a_sample_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against what fakes do not show: engines that pass the budget, or lose requests when they are killed."""
    from penstock_lab.prove import several_models
    from penstock_lab.prove.proof import Outcome, Subject, Trials
    from penstock_lab.prove.run import chosen

    monkeypatch.setattr(several_models, "CLIENTS", 8)
    monkeypatch.setattr(several_models, "NAMES", several_models.NAMES[:3])
    monkeypatch.setattr(several_models, "PROMPTS", several_models.PROMPTS[:1])
    monkeypatch.setattr(several_models, "ENGINE_KILL_S", 4.0)
    (proof,) = chosen(["models"])
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject(), outcome, goal=16, seed=1))
    assert outcome.wrong == []
    assert outcome.tried >= 16
    assert outcome.figures["counted_of_budget"] <= 1
