"""Who may come in: every route asks for the key but the four that orchestrators poll."""

import base64
import hashlib
import hmac
from dataclasses import replace

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.server import keys
from penstock.server.app import create_app
from penstock.server.middleware import OPEN_PATHS
from penstock.server.options import ServerOptions
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client, get, running, send

KEY = "sk-right"
OPTIONS = ServerOptions(api_key=KEY, access_log=False)


@pytest.fixture
def client() -> TestClient:
    return app_client(options=OPTIONS)


def test_every_route_needs_the_key(client: TestClient) -> None:
    """Guards against a route that was added without thinking of the key: all of the app's are enumerated."""
    routes = [route for route in create_app(FakeEngineClient(), OPTIONS).routes if isinstance(route, Route)]
    assert len(routes) > 20
    for route in routes:
        for method in sorted(route.methods or ()):
            path = route.path.replace("{model:path}", "fake").replace("{id}", "a")
            status = client.request(method, path).status_code
            assert (status == 401) != (path in OPEN_PATHS), f"{method} {path} gave {status}"


@pytest.mark.parametrize(
    "path",
    ["/nope", "/metrics?x=/health", "/health/../metrics", "/metrics#/health", "/%6Detrics", "/health%2F..%2Fmetrics"],
)
def test_tricks_with_the_path(client: TestClient, path: str) -> None:
    """Guards against a check that looks at another string than the router (CVE-2026-48746)."""
    assert client.get(path).status_code == 401


@pytest.mark.parametrize("host", ["a/health?x=", "localhost/health#", "", "x" * 5000])
def test_tricks_with_the_host(client: TestClient, host: str) -> None:
    """Guards against a check on a URL that was put together from the Host header."""
    assert client.get("/metrics", headers={"Host": host}).status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        KEY,
        f"Token {KEY}",
        "Basic",
        "Basic !!!",
        f"Basic {base64.b64encode(f'anyone:{KEY}'.encode()).decode()}",  # a browser sends it for other sites' pages too
        "Bearer \u00e4",
    ],
)
def test_wrong_keys(client: TestClient, header: str) -> None:
    """Guards against a key that nearly fits, or a header that crashes the check."""
    response = client.get("/v1/models", headers={b"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert KEY not in response.text


def test_right_keys(client: TestClient) -> None:
    """Guards against a scheme that only works in one spelling."""
    for header in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "):
        assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
    assert client.get("/v1/models", headers={"X-Api-Key": KEY}).status_code == 200


def test_a_key_is_the_same_in_both_headers() -> None:
    """Guards against a response that its owner cannot fetch, because the key came in the other header."""
    body = {"model": "fake", "input": "Hi", "max_output_tokens": 2}
    with running(FakeEngineClient(), replace(OPTIONS, port=0)) as server:
        made = send(f"{server.url}/v1/responses", json=body, headers={"X-Api-Key": KEY}).json()
        for headers in ({"X-Api-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            assert get(f"{server.url}/v1/responses/{made['id']}", headers=headers).json()["id"] == made["id"]


def test_two_keys_are_none(client: TestClient) -> None:
    """Guards against a second header that a proxy in front has not looked at."""
    right, other = ("Authorization", f"Bearer {KEY}"), ("X-Api-Key", KEY)
    for headers in ([right, ("Authorization", "Bearer x")], [other, ("X-Api-Key", "x")], [other, ("X-Api-Key", KEY)],
                    [other, ("Authorization", "Bearer x")], [other, ("Authorization", "")]):  # fmt: skip
        assert client.get("/v1/models", headers=headers).status_code == 401
    assert client.get("/v1/models", headers=[right, ("X-Api-Key", "x")]).status_code == 200  # as it is documented


def test_keys_are_compared_in_constant_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `==`, whose time tells how many characters were right."""
    compared = []

    class Watched:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.append((a, b))
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(keys, "hmac", Watched)
    client.get("/v1/models", headers={"Authorization": "Bearer guess"})
    assert compared == [tuple(hashlib.sha256(key).digest() for key in (b"guess", KEY.encode()))]


def test_no_cors_by_default() -> None:
    """Guards against a web page on another origin that may read answers."""
    client = app_client()
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = client.options("/v1/completions", headers=headers)
    answer = client.get("/v1/models", headers=headers)
    assert preflight.status_code == 403
    assert not any(name.startswith("access-control") for name in (*preflight.headers, *answer.headers))


def test_cors_for_named_origins() -> None:
    """Guards against preflights that fail for want of a key, and against other origins getting in."""
    client = app_client(options=ServerOptions(api_key=KEY, allowed_origins=("http://ui.example",), access_log=False))
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    good = client.options("/v1/completions", headers={**headers, "Origin": "http://ui.example"})
    bad = client.options("/v1/completions", headers={**headers, "Origin": "http://evil.example"})
    assert good.headers["access-control-allow-origin"] == "http://ui.example"
    assert bad.status_code == 400


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "LocalHost:1", "[::1]", "[::1]:8000"])
def test_loopback_names(host: str) -> None:
    assert app_client().get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1]evil", "localhost:8000@evil", "", "::1"],
)
def test_a_page_that_gives_its_name_this_address_gets_nothing(host: str) -> None:
    """Guards against DNS rebinding: a web page that calls the server under its own site's name."""
    answer = app_client().get("/v1/models", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "site_not_allowed")
    assert app_client().get("/health", headers={"Host": host}).status_code == 200  # says nothing, and probes need it


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9", "evil", ""])
def test_a_page_of_another_origin_gets_nothing(origin: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert app_client().post("/v1/completions", json=body, headers={"Origin": origin}).status_code == 403


def test_who_is_let_in() -> None:
    """Guards against refusing the server's own page, a named origin, and servers that a name or a key protects."""
    body = {"prompt": "a", "max_tokens": 1}

    def status(options: ServerOptions, **headers: str) -> int:
        client = app_client(options=options)
        return client.post("/v1/completions", json=body, headers=headers).status_code

    quiet = {"access_log": False}
    assert status(ServerOptions(**quiet), Origin="http://127.0.0.1:8000") == 200
    assert status(ServerOptions(**quiet, allowed_origins=("https://app.example",)), Origin="https://app.example") == 200
    assert status(ServerOptions(**quiet, host="0.0.0.0"), Host="box.example") == 200
    assert status(ServerOptions(**quiet, allowed_hosts=("box.example",)), Host="Box.example:80") == 200
    assert status(ServerOptions(**quiet, allowed_hosts=("box.example",)), Host="localhost") == 403
    assert status(OPTIONS, Host="box.example", Authorization=f"Bearer {KEY}") == 200
