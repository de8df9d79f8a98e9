"""`response_format`, `text.format` and `structured_outputs`: what bodies mean, and which field an error names."""

from typing import Any

import pytest

from penstock.interface.structured_outputs import StructuredOutputsParams
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client

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


GUIDED: dict[str, Any] = {"json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": 'start: "a"'}
WITH_GUIDED = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", WITH_GUIDED)
@pytest.mark.parametrize("kind", GUIDED)
def test_vllm_s_older_names(path: str, kind: str) -> None:
    """Guards against tutorials for vLLM whose guided_json is refused, ignored, or read as another form."""
    old, wanted = f"guided_{kind}", StructuredOutputsParams.of({kind: GUIDED[kind]})
    nulls = dict.fromkeys([f"guided_{other}" for other in GUIDED if other != kind])
    assert form_of(path, {**nulls, old: GUIDED[kind]}) == wanted
    assert form_of(path, {old: GUIDED[kind], "response_format": {"type": "text"}}) == wanted
    assert form_of(path, {**nulls, old: None}) is None
    if kind == "json":
        assert form_of(path, {old: '{"type": "object"}'}) == StructuredOutputsParams(json={"type": "object"})


@pytest.mark.parametrize("path", WITH_GUIDED)
def test_one_form_at_a_time(path: str) -> None:
    """Guards against a second form that is ignored, and against an error that names a field that was not sent."""
    others: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "b"}}, {"response_format": {"type": "json_object"}}, {"guided_choice": ["a"]},
    ]  # fmt: skip
    for other in others:
        error = refused(path, {"guided_grammar": GUIDED["grammar"], **other})
        assert error["param"] == "guided_grammar"
        assert f"not allowed with {next(iter(other))}" in error["message"]
    for wrong in ({"guided_json": 5}, {"guided_json": "{"}, {"guided_regex": ""}, {"guided_regex": "wrong"},
                  {"guided_choice": []}, {"guided_choice": [1]}, {"guided_grammar": "a" * 2**20}):  # fmt: skip
        error = refused(path, wrong)
        name = next(iter(wrong))
        assert error["param"].split("[")[0] == name
        assert "structured_outputs" not in error["message"]
    for name, value, said in (
        ("guided_decoding_backend", "outlines", "llguidance"),
        ("guided_whitespace_pattern", " ", "structured_outputs"),
    ):
        error = refused(path, {"guided_json": SCHEMA, name: value})
        assert (error["param"], error["code"]) == (name, "not_supported")
        assert said in error["message"]
    neutral = {"guided_decoding_backend": "auto", "guided_whitespace_pattern": None}
    assert form_of(path, {"guided_json": SCHEMA, **neutral}) == WANTED


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_vllm_s_that_change_nothing(path: str) -> None:
    """Guards against refusing a client that sends vLLM's whole object, with its defaults."""
    unused = {"regex": None, "choice": None, "grammar": None, "json_object": None, "whitespace_pattern": None}
    neutral = {"structural_tag": None, "disable_fallback": False, "disable_additional_properties": False}
    assert form_of(path, {"structured_outputs": {"json": SCHEMA, **unused, **neutral}}) == WANTED
    for name in neutral:
        error = refused(path, {"structured_outputs": {"json": SCHEMA, name: True}})
        assert name[:8] in error["message"]
    if path != "/v1/responses":
        return
    assert refused(path, {"guided_json": SCHEMA})["code"] == "unknown_field"


def test_another_form_leaves_no_room_for_thoughts() -> None:
    """Guards against the text of guided_choice that is taken for thoughts, because the model usually thinks first."""
    path = "/v1/chat/completions"
    forms: list[dict[str, Any]] = [{"guided_choice": ["a"]}, {"structured_outputs": {"choice": ["a"], "json": None}}]
    for form in forms:
        fake = FakeEngineClient(chat_template="{{ messages[0].content }}<think>{% if false %}</think>{% endif %}")
        answer = app_client(fake).post(path, json={**BODIES[path], "max_tokens": 3, **form}).json()
        assert len(answer["choices"][0]["message"]["content"]) == 3
