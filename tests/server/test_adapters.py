"""LoRA adapters over HTTP: which names reach which weights, who may load one, and what a restart keeps."""

import argparse
import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.cli.models import make_pool
from penstock.client.model_pool import ModelPool, ServedModel
from penstock.errors import InvalidRequestError
from penstock.interface.messages import LoRARequest
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from tests.server.fakes import FakeEngineClient
from tests.server.harness import QUIET, app_client, get, running, samples, stream, wait_until

CHAT = [{"role": "user", "content": "a"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True, "resumable": True}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    ("/v1/embeddings", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/api/chat", {"messages": CHAT, "stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"prompt": "a", "stream": False, "options": {"num_predict": 2}}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "other", "wrong"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    return tmp_path / "adapters"


def loading(folder: Path, **options: Any) -> ServerOptions:
    return dataclasses.replace(QUIET, allowed_lora_path=str(folder), served_model_names=("base",), **options)


def load(client: TestClient, name: str, path: str, **more: Any) -> Any:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def test_every_route_reaches_an_adapter_by_its_name(folder: Path) -> None:
    """Guards against a route that answers with the base model in the name of an adapter."""
    fake = FakeEngineClient()
    client = app_client(fake, loading(folder))
    assert load(client, "sql", "sql").text == "Success: LoRA adapter 'sql' added successfully."
    adapter = fake.loras["sql"]
    for path, body in ROUTES:
        for model, expected in (("sql", adapter.id), ("base", None)):
            fake.used.clear()
            answer = client.post(path, json={**body, "model": model})
            assert answer.status_code == 200, answer.text
            assert fake.used
            assert set(fake.used) == {expected}, path
    fake.used.clear()
    assert client.post("/api/generate", json={**ROUTES[9][1], "model": "sql:latest"}).json()["model"] == "sql"
    assert fake.used == [adapter.id]
    prints = [
        client.post(path, json={**body, "model": "sql"}).json()["system_fingerprint"] for path, body in ROUTES[:2]
    ]
    assert prints == [f"fp-fake-{adapter.sha256[:16]}"] * 2
    assert samples(client.get("/metrics").text, "base")['penstock_adapter_requests_total{adapter="sql"}'] == 15


def test_models_are_listed_with_their_base(folder: Path) -> None:
    fake = FakeEngineClient()
    client = app_client(fake, loading(folder))
    load(client, "sql", "sql")
    base, adapter = client.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("base", "base", None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("sql", str(folder / "sql"), "base")
    assert client.get("/v1/models/sql").json() == adapter
    cards = client.get("/api/tags").json()["models"]
    assert [(card["name"], card["details"]["parent_model"]) for card in cards] == [("base", ""), ("sql", "base")]
    assert cards[0]["digest"] != cards[1]["digest"]
    shown = {"name": "sql", "sha256": fake.loras["sql"].sha256, "rank": 8, "bytes": 64}
    assert client.get("/status").json()["adapters"] == [shown]


def test_an_adapter_of_a_model_that_sleeps_is_known() -> None:
    """Guards against a request that is refused, because nothing has loaded its adapter's model yet."""
    adapters = {"big": {"model": "demo", "enable_lora": True, "lora_modules": ["sql=/adapters/sql"]}, "small": "demo"}
    args = argparse.Namespace(max_queue_wait=1.0)
    app = create_app(make_pool(args, adapters, {}), QUIET)
    assert [tuple(context.model_names()) for context in app.state.context.all] == [("big", "sql"), ("small",)]
    assert app.state.context.named("sql").model.name == "big"


def test_two_models_share_no_name() -> None:
    """Guards against an adapter that only the first of two models answers with, and the other never."""
    for first, second, name in (("sql", "sql", "sql"), ("b", "x", "b"), ("a", "x", "a")):
        models = {
            model: {"model": "demo", "enable_lora": True, "lora_modules": [f"{adapter}=/adapters/{model}"]}
            for model, adapter in (("a", first), ("b", second))
        }
        with pytest.raises(InvalidRequestError, match=f"lora_modules: '{name}' names .* of a and [ab]; "):
            make_pool(argparse.Namespace(max_queue_wait=1.0), models, {})


def test_an_adapter_is_replaced_in_its_own_model_only(folder: Path) -> None:
    """Guards against load_inplace that gives the name of one model's adapter to another model too."""
    pool = ModelPool([ServedModel(name, client=FakeEngineClient()) for name in ("base", "other")])
    client = app_client(pool, loading(folder))
    for model, status in (("base", 200), ("other", 400), ("base", 200)):
        assert load(client, "sql", "sql", model=model, load_inplace=True).status_code == status


def test_a_name_stands_for_one_adapter(folder: Path) -> None:
    """Guards against an adapter that takes the name of a model, or of another adapter whose users do not know."""
    fake = FakeEngineClient()
    client = app_client(fake, loading(folder))
    load(client, "sql", "sql")
    for name, more in (("sql", {}), ("base", {}), ("base", {"load_inplace": True})):
        answer = load(client, name, "other", **more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_already_loaded")
    before = fake.loras["sql"].id
    assert load(client, "sql", "other", load_inplace=True).status_code == 200
    assert fake.loras["sql"].id != before
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
    for path, body in (
        ("/v1/unload_lora_adapter", {"lora_name": "sql"}),
        ("/v1/unload_lora_adapter", {"lora_name": "base"}),
        ("/v1/completions", {"model": "sql", "prompt": "a"}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, set(answer.json()["error"])) == (404, {"message", "type", "param", "code"})
    loaded(fake, folder / "sql", "base")  # by --lora-modules
    fake.used.clear()
    assert client.post("/v1/completions", json={"model": "base", "prompt": "a"}).status_code == 200
    assert fake.used == [None]


def test_adapters_come_from_one_directory(folder: Path, tmp_path: Path) -> None:
    """Guards against a client that lets the server read any file, by a path, by dots or by a link."""
    fake = FakeEngineClient()
    client = app_client(fake, loading(folder))
    os.symlink(tmp_path, folder / "link")
    paths = ["/etc", "..", "../adapters2", "link", f"{folder}x", str(tmp_path), "sql/../../x", "a\u0000b"]
    (tmp_path / "adapters2").mkdir()
    for path in paths:
        answer = load(client, "sql", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "path_not_allowed"), path
    assert load(client, "sql", "wrong").status_code == 400
    assert load(client, "", "sql").status_code == 400
    assert fake.loras == {}
    for path in (str(folder / "sql"), "sql"):
        assert load(client, "sql", path, load_inplace=True).status_code == 200


def test_administrators_load_adapters_where_it_is_allowed(folder: Path, tmp_path: Path) -> None:
    """Guards against any user of the API who changes what the others are answered with."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[ann]\nkey = "sk-ann-0123456789ab"\n[root]\nkey = "sk-root-0123456789ab"\nadmin = true\n')
    client = app_client(FakeEngineClient(), loading(folder, api_key_file=str(keys)))
    for name, status in (("ann", 403), ("root", 200)):
        client.headers["Authorization"] = f"Bearer sk-{name}-0123456789ab"
        assert load(client, "sql", "sql").status_code == status
    client.headers["Authorization"] = "Bearer sk-ann-0123456789ab"
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 403
    assert client.get("/v1/models/sql").json()["root"] == "sql"  # where the files are is not for everybody
    closed = app_client(FakeEngineClient(), QUIET)
    for path, body in (("load", {"lora_name": "x", "lora_path": "/etc"}), ("unload", {"lora_name": "x"})):
        answer = closed.post(f"/v1/{path}_lora_adapter", json=body)
        assert answer.status_code == 404
        assert "--allowed-lora-path" in answer.json()["error"]["message"]


def test_a_restart_continues_a_stream_with_the_same_adapter_only(folder: Path, tmp_path: Path) -> None:
    """Guards against the rest of an answer by other weights, after a server that was started with other files."""
    options = loading(folder, journal=str(tmp_path / "journal"))
    body = {"model": "sql", "prompt": "a", "max_tokens": 4, "stream": True, "resumable": True, "seed": 1}
    fake = FakeEngineClient()
    fake.behaviour.hang_at = 2
    with running(fake, options) as server:
        fake.loras["sql"] = loaded(fake, folder / "sql")
        with stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            first = next(line for line in answer.iter_lines() if line.startswith("id: "))
        fake.used.clear()
    call = first.removeprefix("id: ").partition(":")[0]
    for path, code in ((folder / "sql", None), (folder / "other", "model_changed"), (None, "model_changed")):
        journal = tmp_path / "copy"
        journal.write_bytes(Path(options.journal or "").read_bytes())
        again = FakeEngineClient()
        if path is not None:
            again.loras["sql"] = loaded(again, path)
        with running(again, dataclasses.replace(options, journal=str(journal))) as server:
            wait_until(lambda: get(f"{server.url}/health").status_code == 200)
            answer = get(f"{server.url}/v1/completions/{call}?stream=true")
            assert (f'"code":"{code}"' in answer.text) == (code is not None), answer.text
            assert again.used == ([] if code else [fake.loras["sql"].id])


def loaded(fake: FakeEngineClient, path: Path, name: str = "sql") -> Any:
    return asyncio.run(fake.load_adapter(LoRARequest(name, str(path))))
