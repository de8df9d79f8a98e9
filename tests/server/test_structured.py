"""`response_format`, `text.format` and `structured_outputs`: what bodies mean, and which field an error names."""

from typing import Any

import pytest

from penstock.interface.structured_outputs import StructuredOutputsParams
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client

pytestmark = pytest.mark.covers("C20")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WANTED = StructuredOutputsParams(json=SCHEMA)
NAMED = {"name": "answer", "schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
}


def spelt(path: str, kind: dict[str, Any]) -> dict[str, Any]:
    """The field in which a route gives a format."""
    if path != "/v1/responses":
        schema = {name: value for name, value in kind.items() if name != "type"}
        return {"response_format": {"type": kind["type"], "json_schema": schema} if schema else kind}
    return {"text": {"format": kind}}


def form_of(path: str, fields: dict[str, Any]) -> StructuredOutputsParams | None:
    fake = FakeEngineClient()
    response = app_client(fake).post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    form: StructuredOutputsParams | None = fake.seen[0][1].structured_outputs
    return form


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_openai_s_spelling_and_vllm_s(path: str) -> None:
    """Guards against a route that accepts a form and does not follow it."""
    for strict in ({}, {"strict": True}, {"strict": False}, {"strict": None, "description": "an answer"}):
        assert form_of(path, spelt(path, {"type": "json_schema", **NAMED, **strict})) == WANTED
    assert form_of(path, spelt(path, {"type": "json_object"})) == StructuredOutputsParams(json_object=True)
    assert form_of(path, spelt(path, {"type": "text"})) is None
    assert form_of(path, {"structured_outputs": {"json": SCHEMA, "regex": None}}) == WANTED
    assert form_of(path, {"structured_outputs": {"choice": ["a", "b"]}}) == StructuredOutputsParams(choice=["a", "b"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field_of_the_body(path: str, stream: bool) -> None:
    """Guards against a wrong schema that is found out after the stream has begun, or named as another field's."""
    formats: list[Any] = [
        {"type": "json_schema"}, {"type": "json_schema", **NAMED, "schema": 5}, {"type": "yaml"}, {"mood": "good"}, {},
        {"type": "json_schema", **NAMED, "strict": "yes"}, {"type": "json_schema", **NAMED, "mood": 1},
        {"type": "json_object", "schema": SCHEMA, "mood": 1}, {"type": "json_schema", **NAMED, "name": 7},
    ]  # fmt: skip
    for kind in formats:
        fields = {"text": {"format": kind}} if path == "/v1/responses" else {"response_format": kind}
        assert refused(path, {**fields, "stream": stream})["param"] == next(iter(fields))
    for form in ({}, {"mood": 1}, {"regex": ""}, {"regex": "a", "json": {}}, {"regex": "wrong"}, {"choice": [1]}):
        assert refused(path, {"structured_outputs": form, "stream": stream})["param"] == "structured_outputs"
    both = {"structured_outputs": {"regex": "a"}, **spelt(path, {"type": "json_object"})}
    assert refused(path, both)["param"] == "structured_outputs"


def refused(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = app_client(FakeEngineClient()).post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400, (fields, response.text)
    error: dict[str, Any] = response.json()["error"]
    return error
