"""/openapi.json and /docs describe what the server does."""

import base64
import dataclasses
import hashlib
import inspect
import re

import jsonschema
import pytest
import schemathesis

from penstock.server.app import BODIES, _routes
from penstock.server.client_fields import UNSUPPORTED_ROUTES
from penstock_lab.prove.attacks.attack import BODIES as EXAMPLES
from tests.server.harness import QUIET, app_client


def document() -> dict:
    return app_client().get("/openapi.json").json()


def test_every_route_is_described_and_nothing_else() -> None:
    """Guards against a document of yesterday's routes, and one that other programs cannot read."""
    described = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    routes = [route for route in _routes() if route.path not in {"/", *UNSUPPORTED_ROUTES}]
    routes = [route for route in routes if not route.path.startswith("/page/")]
    expected = {(m, route.path.replace(":path}", "}")) for route in routes for m in route.methods or () if m != "HEAD"}
    assert described == expected
    found = {result.ok().label for result in schemathesis.openapi.from_dict(document()).get_all_operations()}
    assert found == {f"{method} {path}" for method, path in expected}
    operations = [operation for methods in document()["paths"].values() for operation in methods.values()]
    assert all(len(operation["summary"]) > 15 for operation in operations)


def test_every_body_is_described() -> None:
    """Guards against a handler that reads a body which the document does not have."""
    for route in _routes():
        handler = getattr(route.endpoint, "func", route.endpoint)
        reads = re.search(r"read_body\(|_create\(", inspect.getsource(handler)) is not None
        assert reads == (handler in BODIES), handler


@pytest.mark.parametrize("path", EXAMPLES)
def test_right_bodies_fit_their_schemas_and_wrong_ones_do_not(path: str) -> None:
    """Guards against schemas that refuse what the server accepts, or accept a field that it refuses."""
    found = document()
    schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": found["components"]}
    jsonschema.Draft202012Validator(whole).validate(EXAMPLES[path])
    for wrong in ({**EXAMPLES[path], "no_such_field": 1}, {name: {"a": object()} for name in EXAMPLES[path]}):
        assert not jsonschema.Draft202012Validator(whole).is_valid(wrong)


def test_answers_fit_their_schemas() -> None:
    """Guards against types of answers that nobody sends."""
    found, client = document(), app_client()
    for path in ("/v1/completions", "/v1/chat/completions"):
        schema = found["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        answer = client.post(path, json=EXAMPLES[path]).json()
        jsonschema.Draft202012Validator({**schema, "components": found["components"]}).validate(answer)
    wrong = client.post("/v1/completions", json={"prompt": 1}).json()
    jsonschema.Draft202012Validator(found["components"]["schemas"]["Error"]).validate(wrong)


def test_the_page_needs_neither_key_nor_script() -> None:
    """Guards against a page that a browser shows without its style or not at all, and one that runs anything."""
    client = app_client(options=dataclasses.replace(QUIET, api_key="secret-key-of-sixteen", root_path="/llm"))
    answer = client.get("/llm/docs")
    assert answer.status_code == 200
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert "<script" not in answer.text
    assert "POST /v1/chat/completions" in answer.text
    assert "://" not in answer.text
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
