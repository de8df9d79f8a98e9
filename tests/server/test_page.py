"""The web page stands alone."""

import json
import re
import shutil
import subprocess

import pytest

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


# A document of elements that do nothing but keep what the script gives them; then one message is sent.
BROWSER = """
const [page, answered, typed] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const made = {};
const element = () => ({
  value: "", textContent: "", style: {}, classList: { remove() {} }, children: [], setAttribute() {}, focus() {},
  append(child) {
    this.children.push(child);
    child.remove = () => this.children.splice(this.children.indexOf(child), 1);
  },
});
globalThis.document = {
  getElementById: id => made[id] ??= element(), createElement: element, querySelector: () => null,
};
globalThis.sessionStorage = { getItem: () => null, setItem() {} };
globalThis.setInterval = () => {};
globalThis.fetch = async path => {
  if (path !== "/v1/chat/completions") return new Promise(() => {});
  made.input.value = typed;  // while the answer is awaited
  if (answered === null) throw new TypeError("Failed to fetch");
  return new Response(answered[1], { status: answered[0] });
};
require("vm").runInThisContext(page);
made.input.value = "My long message";
made.form.onsubmit({ preventDefault() {} });
const turns_shown = () => made.talk.children.map(child => [child.className, child.textContent]);
const report = () => console.log(JSON.stringify([made.input.value, turns_shown()]));
const wait = () => setImmediate(made.send.textContent === "Send" ? report : wait);
wait();
"""
ERROR = '{"error": {"message": "the queue is full"}}'


def after_sending(answer: tuple[int, str] | None, typed: str = "") -> tuple[str, list[list[str]]]:
    """What the input box and the conversation hold after the server's (status, body), or after no answer at all."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    (script,) = re.findall(r"<script>(.*)</script>", app_client().get("/").text, re.DOTALL)
    task = json.dumps([script, answer, typed])
    done = subprocess.run(
        [node, "-e", f"{{{BROWSER}}}"], input=task, capture_output=True, text=True, timeout=60, check=True
    )
    box, conversation = json.loads(done.stdout)
    return box, conversation


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ((429, ERROR), "the queue is full"),
        ((502, "<html>"), "HTTP 502"),
        ((200, f"data: {ERROR}\n\n"), "the queue is full"),
        (None, "Failed to fetch"),
    ],
)
def test_refused_message_stays_in_the_box(answer: tuple[int, str] | None, note: str) -> None:
    """Guards against a message that has to be typed again because the server was busy or out of reach."""
    assert after_sending(answer) == ("My long message", [["note bad", note]])
    assert after_sending(answer, typed="And then?")[0] == "My long message\nAnd then?"


def test_answered_message_leaves_the_box() -> None:
    """Guards against a message that is sent twice, also where its answer broke off half-way."""
    piece = 'data: {"choices": [{"delta": {"content": "Yes"}, "finish_reason": null}]}\n\n'
    last = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "seed": 7}\n\n'
    box, conversation = after_sending((200, f"{piece}{last}data: [DONE]\n\n"), typed="And then?")
    assert (box, [text for _, text in conversation[:2]]) == ("And then?", ["My long message", "Yes"])
    box, conversation = after_sending((200, f"{piece}data: {ERROR}\n\n"))
    assert (box, [text for _, text in conversation]) == ("", ["My long message", "Yes", "the queue is full"])
