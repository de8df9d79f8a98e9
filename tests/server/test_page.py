"""The web page stands alone."""

import re

from tests.server.harness import app_client


def test_page_needs_nothing_from_elsewhere() -> None:
    """Guards against a page that loads scripts, styles or fonts from the internet, or that others may frame."""
    response = app_client().get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import""", response.text)
    assert [link for link, _ in links if not link.startswith("data:")] == []


def test_page_puts_texts_in_as_text() -> None:
    """Guards against a model's answer being read as HTML by the page."""
    text = app_client().get("/").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_page_asks_for_routes_that_exist() -> None:
    """Guards against a page that was forgotten when a route or a field was renamed."""
    client = app_client()
    text = client.get("/").text
    paths = set(re.findall(r'fetch\("(/[^"]*)"', text))
    assert paths == {"/v1/chat/completions", "/status", "/v1/models"}
    status = client.get("/status").json()
    flat = {*status, *status["engine"], *status["kv_blocks"]}
    used = set(re.findall(r"status\.(?:engine\.)?(\w+)", text)) | set(re.findall(r"blocks\.(\w+)", text))
    assert used - {"engine", "kv_blocks"} <= flat | {"style"}
