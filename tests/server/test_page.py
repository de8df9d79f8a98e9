"""The web page stands alone."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import app_client


def page() -> str:
    return app_client().get("/").text


def script() -> str:
    (found,) = re.findall(r"<script>(.*)</script>", page(), re.DOTALL)
    return found


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


def test_policy_allows_this_script_and_style_only() -> None:
    """Guards against a policy that lets any script run, and against one that blocks the page's own."""
    response = app_client().get("/")
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.search(r"""\son\w+\s*=\s*["']|\sstyle\s*=\s*["']""", response.text)  # the policy would block these


def test_page_puts_texts_in_as_text() -> None:
    """Guards against a model's answer being read as HTML by the page."""
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", page())


def test_page_asks_for_routes_that_exist() -> None:
    """Guards against a page that was forgotten when a route or a field was renamed."""
    text = page()
    paths = set(re.findall(r'fetch\("(/[^"]*)"', text))
    assert paths == {"/v1/chat/completions", "/status", "/v1/models"}
    status = app_client().get("/status").json()
    flat = {*status, *status["engine"], *status["kv_blocks"]}
    used = set(re.findall(r"status\.(?:engine\.)?(\w+)", text)) | set(re.findall(r"blocks\.(\w+)", text))
    assert used - {"engine", "kv_blocks"} <= flat | {"style"}


BROWSER = Path(__file__).with_name("browser.js").read_text(encoding="utf-8")
ERROR = '{"error": {"message": "the queue is full"}}'
PIECE = 'data: {{"choices": [{{"delta": {{"content": "{}"}}, "finish_reason": null}}]}}\n\n'
LAST = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "seed": 7}\n\ndata: [DONE]\n\n'


def answering(text: str) -> tuple[int, str]:
    return 200, PIECE.format(text) + LAST


def run(steps: str, *answers: tuple[int, str] | None) -> Any:
    """Run steps on the page, whose server gives these answers; return what the steps return."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    task = json.dumps([script(), answers, steps])
    done = subprocess.run(
        [node, "-e", f"{{{BROWSER}}}"], input=task, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


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
    box, shown, listed = run("await say('My long message'); return [box().value, talk(), conversations]", answer)
    assert (box, shown[-1], listed) == ("My long message", ["note bad", note], [])
    assert [text for kind, text in shown if kind.startswith("turn")] == []
    typed = "say('My long message'); box().value = 'And then?'; await rest(); return box().value"
    assert run(typed, answer) == "My long message\nAnd then?"


def test_answered_message_leaves_the_box() -> None:
    """Guards against a message that is sent twice, also where its answer broke off half-way."""
    steps = "await say('My message'); return [box().value, talk(), conversations]"
    box, shown, (kept,) = run(steps, answering("Yes"))
    assert (box, kept["title"]) == ("", "My message")
    assert [text for kind, text in shown if kind.startswith("turn")] == ["My message", "Yes"]
    assert [turn["content"] for turn in kept["turns"]] == ["My message", "Yes"]
    box, shown, _ = run(steps, (200, f"{PIECE.format('Yes')}data: {ERROR}\n\n"))
    assert (box, shown[2]) == ("", ["turn assistant", "Yes"])
    assert "the queue is full" in shown[3][1]


def test_answers_are_made_again_and_messages_edited() -> None:
    """Guards against a new answer that sees the old one, and an edited message that loses what came before it."""
    steps = """
        await say('One'); await say('Two');
        press(made.talk.children[7], "Regenerate"); await rest();
        const again = sent.at(-1);
        press(made.talk.children[5], 'Edit');
        const offered = box().value;
        await say('Three');
        return [again, offered, sent.at(-1), conversations[0].turns.map(turn => turn.content)];
    """
    again, offered, edited, turns = run(steps, *map(answering, "abcd"))
    assert [message["content"] for message in again] == ["One", "a", "Two"]
    assert offered == "Two"
    assert [message["content"] for message in edited] == ["One", "a", "Three"]
    assert turns == ["One", "a", "Three", "d"]
    kept = "await say('One'); press(made.talk.children[3], 'Regenerate'); await rest(); return conversations[0].turns"
    assert [turn["content"] for turn in run(kept, answering("a"), (429, ERROR))] == ["One", "a"]


def test_conversations_are_kept_apart() -> None:
    """Guards against an answer that lands in the conversation that was opened meanwhile."""
    steps = """
        await say('One'); made.new.onclick(); say('Two'); made.new.onclick(); await rest();
        const shown = talk();
        await say('Three');
        const kept = JSON.parse(store['penstock.conversations']);
        return [shown.length, sent, kept.map(one => one.turns.map(turn => turn.content))];
    """
    shown, sent, kept = run(steps, *map(answering, "abc"))
    assert shown == 1  # the hint of an empty conversation
    assert [len(messages) for messages in sent] == [1, 1, 1]
    assert kept == [["Three", "c"], ["Two", "b"], ["One", "a"]]


MARKDOWN = {
    "a **b** *c* `d*e*` ~~f~~": "<p>a <strong>b</> <em>c</> <code>d*e*</> <del>f</></>",
    "2 * 3 * 4 and snake_case_name and **open": "<p>2 * 3 * 4 and snake_case_name and **open</>",
    "# T\n\n- a\n- b\n  1. c\n\nx": "<h1>T</><ul><li>a</><li><p>b</><ol><li>c</></></></><p>x</>",
    "3. a\n4. b": "<ol 3><li>a</><li>b</></>",
    "```py\nx < 1\n\n# y\n```\nz": "<div><div><span>py</><button>Copy</></><pre><code>x < 1\n\n# y</></></><p>z</>",
    "```\nhalf": "<div><div><span></><button>Copy</></><pre><code>half</></></>",
    "> q\n> r": "<blockquote><p>q<br></>r</></>",
    "|a|b|\n|-|-|\n|1|*2*|": (
        "<div><table><thead><tr><th>a</><th>b</></></><tbody><tr><td>1</><td><em>2</></></></></></>"
    ),
    "---": "<hr></>",
    "<script>alert(1)</script> <b>": "<p><script>alert(1)</script> <b></>",
    "[x](javascript:alert(1)) [y](https://a.b/c) https://d.e.": (
        "<p>[x](javascript:alert(1)) <a https://a.b/c>y</> <a https://d.e>https://d.e</>.</>"
    ),
    "![i](http://a/b.png)": "<p><a http://a/b.png>i</></>",
    "\\*a\\*": "<p>*a*</>",
}


def test_markdown_becomes_nodes() -> None:
    """Guards against markup, scripts and requests that an answer brings along: all is text, links need a click."""
    render = "renderMarkdown(text).map(node => node.shown ?? node).join('')"
    steps = f"return {json.dumps(list(MARKDOWN))}.map(text => {render})"
    assert dict(zip(MARKDOWN, run(steps), strict=True)) == MARKDOWN


def test_markdown_of_any_text_ends() -> None:
    """Guards against a page that hangs or breaks over an answer that is hostile, huge or only half there yet."""
    steps = """
        const marks = "** * _ ` ``` > - 1. | |-| [ ](http:// ) # x ~~".split(" ");
        const pieces = marks.concat("\\n", " ", "> ", "- ", "1. ");
        let seed = 1;
        const draw = count => { seed = (seed * 48271) % 2147483647; return seed % count; };
        let total = 0;
        for (let round = 0; round < 1000; round += 1) {
            let text = '';
            for (let at = draw(40); at >= 0; at -= 1) text += pieces[draw(pieces.length)];
            total += renderMarkdown(text).length;
        }
        for (const piece of ['>', '**a', '`a', '- ', '[', '|', '~~a', '_a', '![](', 'http://'])
            total += renderMarkdown(piece.repeat(7999 / piece.length)).length;
        return total;
    """
    assert run(steps) > 1000
