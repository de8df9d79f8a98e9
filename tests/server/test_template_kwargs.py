"""`chat_template_kwargs` and `documents`: what the model's own template sees of a request, and what it must not see."""

import asyncio
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.client.text import IsolatedTokenizer
from penstock.errors import InvalidRequestError
from penstock.server.options import ServerOptions
from penstock.server.serve import run_server
from penstock.tokenizer.template_variables import RESERVED_NAMES
from penstock.tokenizer.tokenizer import render_chat
from penstock.weights.hub import MODEL_DIR
from tests.server.fakes import EOS, FakeEngineClient
from tests.server.harness import QUIET, app_client, running, send

USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{{ style }}{{ (options or {}).tone }}{% for item in documents or [] %}[{{ item.title }}]{% endfor %}"
)
CLOSED = "<think>\n\n</think>\n\n"
THINKS_NOT = {"chat_template_kwargs": {"enable_thinking": False}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/tokenize": {"messages": [USER]},
    "/v1/cache/pin": {"messages": [USER]},
}


def engine() -> FakeEngineClient:
    return FakeEngineClient(chat_template=TEMPLATE)


def answered(path: str, fields: dict[str, Any], options: ServerOptions = QUIET) -> Any:
    """The status, and the prompt that was rendered or the error."""
    fake = engine()
    response = app_client(fake, options).post(path, json={**BODIES[path], **fields})
    answer = response.json()
    if response.status_code != 200:
        return response.status_code, answer["error"]
    ids = answer["tokens"] if path == "/tokenize" else fake.seen[0][0] if fake.seen else fake.pinned[0]
    return 200, bytes(i for i in ids if i < 256).decode()


@pytest.mark.parametrize("path", BODIES)
def test_every_route_gives_the_variables_to_the_template(path: str) -> None:
    """Guards against a route that accepts enable_thinking: false, and whose prompt lets the model think."""
    assert CLOSED not in answered(path, {})[1]
    for neutral in (None, {}, {"enable_thinking": None}):
        assert answered(path, {"chat_template_kwargs": neutral}) == answered(path, {})
    assert answered(path, THINKS_NOT)[1].endswith(CLOSED)
    nested = {"chat_template_kwargs": {"options": {"tone": ["kind"]}}}
    assert answered(path, nested)[1].endswith("['kind']")


@pytest.mark.parametrize("path", [*BODIES, "/v1/completions"])
@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_reserved_names_are_refused_on_every_route(path: str, name: str) -> None:
    """Guards against CVE-2026-115918: a template or a message of a request's own, smuggled in as a variable."""
    for kwargs in ({name: "x"}, {"style": {name: "x"}}, {"style": [{"a": [{name: None}]}]}, {name: None, "style": 1}):
        body = {**BODIES.get(path, {"prompt": "Hi"}), "chat_template_kwargs": kwargs}
        fake = engine()
        response = app_client(fake).post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs"), kwargs
        assert not fake.seen


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"enable_thinkin": False}, "enable_thinkin"),
        ({"style": 10**30}, "10000"),
        ({"style": "a" * 10_000}, "characters"),
        ("style", "object"),
        ([], "object"),
    ],
)
def test_bad_variables(path: str, kwargs: Any, said: str) -> None:
    """Guards against a misspelt variable that is ignored, so that the model goes on thinking, and against sizes."""
    status, error = answered(path, {"chat_template_kwargs": kwargs})
    assert status == 400
    assert said in error["message"]


@pytest.mark.parametrize("field", ["chat_template_kwargs", "documents", "tools", "messages"])
def test_deep_values(field: str) -> None:
    """Guards against a 500 from Python's limit on recursion: a value that is nested 300 to 900 deep."""
    for depth in (300, 600, 900):
        deep: Any = {"a": 1}
        for _ in range(depth):
            deep = {"a": deep}
        text = str(deep).replace("'", '"')
        call = {"id": "1", "function": {"name": "f", "arguments": text}}
        value: Any = {
            "chat_template_kwargs": {"style": deep},
            "documents": [deep],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}],
            "messages": [{"role": "assistant", "tool_calls": [call]}],
        }[field]
        status, error = answered("/v1/chat/completions", {field: value})
        assert (status, error["param"]) == (400, field)


def test_a_prompt_takes_no_variables() -> None:
    """Guards against variables and tools that are ignored, because there is no conversation to render."""
    for path in ("/tokenize", "/v1/cache/pin"):
        for fields in (THINKS_NOT, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            response = app_client(engine()).post(path, json={"prompt": "Hi", **fields})
            assert response.json()["error"]["param"] == next(iter(fields))
    for neutral in (None, {}):
        body = {"prompt": "Hi", "chat_template_kwargs": neutral, "max_tokens": 1}
        assert app_client().post("/v1/completions", json=body).status_code == 200


def test_variables_cannot_write_control_tokens() -> None:
    """Guards against a user's text in a variable or document that ends the turn and begins one of the system."""
    fake = engine()
    spelled = fake.tokenizer.token_to_text(EOS)
    fields = {"chat_template_kwargs": {"style": spelled}, "documents": [{"title": spelled}]}
    chat = render_chat(
        fake.tokenizer, [USER], template_kwargs=fields["chat_template_kwargs"], documents=fields["documents"]
    )
    assert spelled in chat.text
    assert all(spelled not in part for part in chat.parts)


def test_documents() -> None:
    """Guards against documents that the model is not shown, and against refusing a client's empty list."""
    path, documents = "/v1/chat/completions", [{"title": "a", "text": "x"}, {"title": "b", "text": "y"}]
    assert answered(path, {"documents": documents})[1].endswith("[a][b]")
    assert answered(path, {"documents": []}) == answered(path, {"documents": None}) == answered(path, {})
    error = app_client().post(path, json={**BODIES[path], "documents": documents}).json()["error"]
    assert (error["param"], error["code"]) == ("documents", "no_documents")
    assert answered(path, {"documents": ["a"]})[0] == 400
    assert answered(path, {"documents": [{"title": "a" * 10_000}]})[0] == 400
    body = {"prompt": "Hi", "max_tokens": 1}
    assert app_client().post("/v1/completions", json={**body, "documents": []}).status_code == 200
    assert app_client().post("/v1/completions", json={**body, "documents": documents}).status_code == 400


LEVELS = "{{ messages[0].content }}{{ reasoning_effort }}{{ enable_thinking }}"


def test_reasoning_effort() -> None:
    """Guards against an effort that changes nothing: levels need a template that reads them."""
    path = "/v1/chat/completions"
    assert answered(path, {"reasoning_effort": "none"}) == answered(path, THINKS_NOT)
    assert answered(path, {"reasoning_effort": None}) == answered(path, {})
    thinks = dataclasses.replace(QUIET, default_chat_template_kwargs={"enable_thinking": True})
    assert answered(path, {"reasoning_effort": "none"}, thinks)[1].endswith(CLOSED)
    assert answered(path, {"reasoning_effort": "low"})[0] == 200  # and the answer's header says that it was ignored
    status, error = answered(path, {"reasoning_effort": "low"}, dataclasses.replace(QUIET, unknown_fields="refuse"))
    assert (status, error["param"], error["code"]) == (400, "reasoning_effort", "not_implemented")
    for kwargs, status in (({"enable_thinking": True}, 400), ({"enable_thinking": False}, 200)):
        assert answered(path, {"reasoning_effort": "none", "chat_template_kwargs": kwargs})[0] == status
    assert answered(path, {"reasoning_effort": "much"})[0] == 400
    for effort, said in (("low", "lowTrue"), ("none", "noneFalse")):
        fake = FakeEngineClient(chat_template=LEVELS)
        assert app_client(fake).post(path, json={**BODIES[path], "reasoning_effort": effort}).status_code == 200
        assert bytes(fake.seen[0][0]).decode() == f"Hi{said}"


def test_enable_thinking_by_itself() -> None:
    """Guards against a switch that changes nothing, for clients that send it outside chat_template_kwargs, and against
    two switches of which one loses."""
    path = "/v1/chat/completions"
    assert answered(path, {"enable_thinking": False}, DEFAULTS) == answered(path, THINKS_NOT, DEFAULTS)
    assert answered(path, {"enable_thinking": True}, DEFAULTS)[1].endswith("<assistant>s")
    for other in (THINKS_NOT, {"reasoning_effort": "none"}):
        assert answered(path, {"enable_thinking": True, **other}, DEFAULTS)[0] == 400
    for template, accepted in (
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content }}<think></think>", True),
    ):
        client = app_client(FakeEngineClient(chat_template=template))
        for wanted in (False, True):
            answer = client.post(path, json={**BODIES[path], "enable_thinking": wanted})
            assert answer.status_code == (200 if wanted is accepted else 400)
            assert wanted is accepted or answer.json()["error"]["param"] == "enable_thinking"


# --- the server's own variables ---------------------------------------------------------------------------------------

DEFAULTS = dataclasses.replace(QUIET, default_chat_template_kwargs={"enable_thinking": False, "style": "s"})


@pytest.mark.parametrize("path", BODIES)
def test_requests_override_the_server_key_by_key(path: str) -> None:
    """Guards against a request's single variable that drops all those of the server, and against a null that does."""
    assert answered(path, {}, DEFAULTS)[1].endswith(f"{CLOSED}s")
    assert answered(path, {"chat_template_kwargs": {"style": "r"}}, DEFAULTS)[1].endswith(f"{CLOSED}r")
    assert answered(path, {"chat_template_kwargs": {"enable_thinking": None}}, DEFAULTS)[1].endswith(f"{CLOSED}s")
    assert answered(path, {"chat_template_kwargs": {"enable_thinking": True}}, DEFAULTS)[1].endswith("<assistant>s")


def test_a_wrong_default_ends_the_start() -> None:
    """Guards against a server whose every request fails for an option of its operator's."""
    for wrong in ({"chat_template": "x"}, {"style": {"tools": 1}}, "x"):
        with pytest.raises(InvalidRequestError, match="default_chat_template_kwargs"):
            ServerOptions(default_chat_template_kwargs=wrong)  # type: ignore[arg-type]
    for fake in (engine(), FakeEngineClient(chat_template=None)):
        options = dataclasses.replace(QUIET, default_chat_template_kwargs={"stile": "s"})
        with pytest.raises(InvalidRequestError, match=r"default_chat_template_kwargs: .* 'stile'"):
            asyncio.run(run_server(fake, options))


def test_the_command_takes_variables() -> None:
    """Guards against a flag that does not reach the server: the demo's template reads no such variable."""
    command = [sys.executable, "-m", "penstock", "serve", "demo", "--port", "0", "--default-chat-template-kwargs"]
    for text, said in (('{"mood": 1}', "mood"), ("[1]", "is not a JSON object"), ('{"tools": []}', "tools")):
        done = subprocess.run([*command, text], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr


# --- where rendering happens, and what is kept ------------------------------------------------------------------------


def test_the_text_process_gets_the_variables(tmp_path: Path) -> None:
    """Guards against variables that do not travel to the process that renders, or that hold it up."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    loop = "{% for a in range(count or 0) %}{% for b in range(count) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(TEMPLATE + loop)
    tokenizer: Any = IsolatedTokenizer(folder)
    try:
        tokenizer.load()
        kwargs = {"enable_thinking": False, "style": "x" * 5000, "options": {"tone": [1, 2.5, True, None]}}
        text = render_chat(tokenizer, [USER], template_kwargs=kwargs, documents=[{"title": "t"}]).text
        assert text == f"<user>Hi\n<assistant>{CLOSED}{'x' * 5000}[1, 2.5, True, None][t]"
        with pytest.raises(InvalidRequestError, match="chat template"):
            render_chat(tokenizer, [USER], template_kwargs={"count": 99_999})
        with pytest.raises(InvalidRequestError, match="chat_template cannot be set"):
            tokenizer.chat_template.render([USER], template_kwargs={"chat_template": "x"})
        assert render_chat(tokenizer, [USER]).text == "<user>Hi\n<assistant>"
    finally:
        tokenizer.close()


def test_a_resumed_stream_has_the_same_variables() -> None:
    """Guards against variables that are left out of what is kept: another body would continue the stream."""
    body = {**BODIES["/v1/chat/completions"], **THINKS_NOT, "stream": True, "resumable": True}
    with running(engine()) as server:
        url = f"{server.url}/v1/chat/completions"
        again = {"Last-Event-ID": send(url, json=body).text.split("id: ")[1].split("\n")[0]}
        assert send(url, json=body, headers=again).status_code == 200
        other = {**body, "chat_template_kwargs": {"enable_thinking": True}}
        assert send(url, json=other, headers=again).status_code == 400


def test_an_answer_without_thoughts_is_content() -> None:
    """Guards against --reasoning-parser deepseek_r1 taking an answer for thoughts that the template has closed."""
    options = dataclasses.replace(QUIET, reasoning_parser="deepseek_r1")
    body = BODIES["/v1/chat/completions"]
    whole = app_client(engine(), options).post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (whole["content"], len(whole["reasoning_content"])) == ("", 2)
    answer = app_client(engine(), options).post("/v1/chat/completions", json={**body, **THINKS_NOT}).json()
    message = answer["choices"][0]["message"]
    assert len(message["content"]) == 2
    assert "reasoning_content" not in message


def test_the_server_is_used_over_sockets() -> None:
    """Guards against defaults that only the application has, not the server that the command starts."""
    with running(engine(), DEFAULTS) as server:
        answer = send(f"{server.url}/tokenize", json=BODIES["/tokenize"]).json()
        assert bytes(i for i in answer["tokens"] if i < 256).decode().endswith(f"{CLOSED}s")
