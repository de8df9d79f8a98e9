"""The web page: its files, and what a real browser makes of them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.interface.sampling_params import fields_of
from penstock.server.options import ServerOptions
from penstock.server.page import FILES, ONE_ANSWER, PAGE_PATHS, STATIC
from tests import browser
from tests.browser import Browser, Page
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import RunningServer, app_client, running
from tests.server.markdown_cases import CASES, SHORT
from tests.server.test_several_models import serving
from tools.vendor_page import VENDOR, entry_of, read_table

OWN = sorted(name for name in FILES if not name.startswith("vendor/"))
KEY = "sk-of-the-page"

# --- the files --------------------------------------------------------------------------------------------------------


def test_page_needs_nothing_from_elsewhere() -> None:
    """Guards against a page that loads scripts, styles or fonts from the internet, or that others may frame."""
    response = app_client().get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert f"{part};" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""\son\w+\s*=\s*["']|\sstyle\s*=\s*["']|<script>|<style""", response.text)
    for text in [response.text, *((STATIC / name).read_text(encoding="utf-8") for name in OWN)]:
        links = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import\s+(\S+)""", text)
        found = [link for groups in links for link in groups if link]
        assert [link for link in found if not link.startswith(("data:", "page/", "#", "${"))] == []


def test_imports_of_the_scripts_exist() -> None:
    """Guards against a module that was renamed or left out, and against one that nothing imports."""
    imported = {"main.js", "page.css", "vendor/katex/katex.min.css"}
    for name in [name for name in OWN if name.endswith(".js")]:
        text = (STATIC / name).read_text(encoding="utf-8")
        imported |= set(re.findall(r"""(?:from|import|import\()\s*["']\./([^"']+)["']""", text))
    assert imported == {name for name in FILES if not name.endswith(".woff2")}
    fonts = set(re.findall(r"fonts/[\w-]+\.woff2", (VENDOR / "katex" / "katex.min.css").read_text()))
    assert {f"vendor/katex/{font}" for font in fonts} == {name for name in FILES if name.endswith(".woff2")}


def test_page_puts_texts_in_as_text() -> None:
    """Guards against a model's answer being read as HTML by the page itself; only DOMPurify reads any."""
    for name in OWN:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", text), name


def test_libraries_are_as_published() -> None:
    """Guards against a library that was changed here, and a file without version, licence and origin."""
    table = read_table()
    for folder, library in table.items():
        assert set(library) == {"package", "version", "licence", "source", "contains", "files"}
        assert "LICENSE" in library["files"]
        for name, known in library["files"].items():
            found = entry_of((VENDOR / folder / name).read_bytes())
            assert found == {key: known[key] for key in ("bytes", "sha256")}, name
    named = {f"{folder}/{name}" for folder, library in table.items() for name in library["files"]}
    there = {file.relative_to(VENDOR).as_posix() for file in VENDOR.rglob("*") if file.is_file()}
    assert there == named | {"vendor.json"}


def test_files_are_served_with_their_types_and_kept_by_browsers() -> None:
    """Guards against modules that a browser refuses for their type, and against old ones after an update."""
    client = app_client()
    for name in sorted(FILES):
        response = client.get(f"/page/{name}")
        kind = {"css": "text/css", "js": "text/javascript", "mjs": "text/javascript", "woff2": "font/woff2"}
        assert response.headers["content-type"].partition(";")[0] == kind[name.rpartition(".")[2]]
        assert response.content == (STATIC / name).read_bytes()
        assert response.headers["cache-control"] == "no-cache"
        tag = response.headers["etag"]
        again = client.get(f"/page/{name}", headers={"If-None-Match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)


@pytest.mark.parametrize(
    "name", ["", "x.js", "index.html", "../page.py", "..%2Fpage.py", "vendor", "vendor/vendor.json", "//main.js"]
)
def test_nothing_else_is_served(name: str) -> None:
    """Guards against paths that lead out of the folder, or to files in it that are not the page's."""
    assert app_client().get(f"/page/{name}").status_code == 404


def test_files_need_no_key_and_the_settings_do() -> None:
    """Guards against a browser's own dialog for the key, and against anything else that is open with the page."""
    client = app_client(options=ServerOptions(api_key=KEY, access_log=False))
    assert {path: client.get(path).status_code for path in PAGE_PATHS} == dict.fromkeys(PAGE_PATHS, 200)
    answer = client.get("/page/settings")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_page_below_another_path(chromium: Browser) -> None:
    """Guards against paths on the page that lead past a proxy's prefix."""
    options = ServerOptions(port=0, access_log=False, root_path="/llm")
    client = app_client(options=options)
    moved = client.get("/llm?x=1", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, "llm/")
    with running(FakeEngineClient(Behaviour(text="Yes.")), options) as server, chromium.page() as page:
        opened(page, server, "/llm")
        say(page, "One")
        assert turns(page) == ["One", "Yes."]
        assert page.value("location.pathname") == "/llm/"
        loaded = page.value("performance.getEntriesByType('resource').map(entry => new URL(entry.name).pathname)")
        assert [path for path in loaded if not path.startswith("/llm/")] == []


def test_settings_are_the_chats_with_the_models_defaults() -> None:
    """Guards against a parameter that the page does not offer, and a default that is not what an answer would have."""
    client = FakeEngineClient()
    own = {"temperature": 0.6, "top_k": 40, "stop": ("x",)}
    client.info = replace(client.info, default_sampling=own)
    found = {item["name"]: item for item in app_client(client).get("/page/settings").json()["data"]}
    missing = set(fields_of("chat")) - set(found)
    assert missing == (ONE_ANSWER & set(fields_of("chat"))) | {"dry_sequence_breaker_ids"}
    assert (found["temperature"]["default"], found["temperature"]["kind"]) == (0.6, "number")
    assert (found["top_k"]["default"], found["top_k"]["kind"], found["top_k"]["low"]) == (40, "integer", -1)
    assert (found["max_tokens"]["default"], found["max_tokens"]["kind"]) == (None, "integer")
    assert (found["stop"]["default"], found["stop"]["kind"]) == (["x"], "texts")
    assert (found["logit_bias"]["kind"], found["ignore_eos"]["kind"]) == ("json", "flag")


# --- in a browser -----------------------------------------------------------------------------------------------------

ERROR = '{"error": {"message": "the queue is full"}}'
PIECE = 'data: {{"choices": [{{"delta": {{"content": {}}}, "finish_reason": null}}]}}\n\n'
LAST = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "seed": 7}\n\ndata: [DONE]\n\n'
# The chat route gives the answers of `answers`, [status, body] or null for a network that fails; then the server's own.
FAKE_ANSWERS = """
    window.answers = []; window.sent = [];
    const real = window.fetch;
    window.fetch = async (path, options) => {
        if (path !== "v1/chat/completions") return real(path, options);
        sent.push(JSON.parse(options.body));
        if (!answers.length) return real(path, options);
        const answer = answers.shift();
        if (answer === null) throw new TypeError("Failed to fetch");
        return new Response(answer[1], { status: answer[0] });
    };
"""


def answering(text: str) -> tuple[int, str]:
    return 200, PIECE.format(json.dumps(text)) + LAST


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser.started() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeEngineClient(Behaviour(text="An answer."), max_model_len=2048)) as found:
        yield found


@pytest.fixture(scope="module")
def markdown_page(chromium: Browser, server: RunningServer) -> Iterator[Page]:
    with chromium.page() as found:
        opened(found, server)
        yield found
        assert found.complaints() == []


@pytest.fixture
def page(chromium: Browser, server: RunningServer) -> Iterator[Page]:
    """The page, whose complaints fail the test; what a test provokes it takes out of `complaints` first."""
    with chromium.page() as found:
        opened(found, server)
        yield found
        assert found.complaints() == []


def opened(page: Page, server: RunningServer, path: str = "/") -> None:
    page.before(FAKE_ANSWERS)
    page.open(server.url + path)
    page.wait("document.querySelector('#state').innerText === 'ready' && document.querySelector('#setting-seed')")


def say(page: Page, text: str, *answers: tuple[int, str] | None) -> None:
    """Type a message, send it, and wait for the end of its answer."""
    page.run(f"globalThis.answers?.push(...{json.dumps(answers)}); document.querySelector('#input').focus()")
    page.type(text)
    page.press("Enter")
    rest(page)


def rest(page: Page) -> None:
    page.wait("document.querySelector('#send').innerText === 'Send'")


def turns(page: Page) -> list[str]:
    return page.text(".turn > .text")


def box(page: Page) -> str:
    text: str = page.value("document.querySelector('#input').value")
    return text


def sent(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.value("sent.map(body => body.messages.map(message => message.content))")
    return found


@pytest.mark.parametrize(("text", "shown"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_markdown(markdown_page: Page, text: str, shown: str) -> None:
    """Guards against answers that lose their code, lists, tables, links or formulas, and against markup in them."""
    script = f"""
        {SHORT}
        const {{ showMarkdown }} = await import("/page/markdown.js"), box = document.createElement("div");
        document.body.append(box);
        showMarkdown(box, {json.dumps(text)});
        const isReady = node => node.querySelector(".katex") || node.matches(".wrong");
        while (![...box.querySelectorAll(".formula")].every(isReady)) await new Promise(done => setTimeout(done, 5));
        return [...box.childNodes].filter(node => node.nodeType !== Node.TEXT_NODE).map(short).join("");
    """
    assert markdown_page.run(script) == shown


def test_markdown_that_grows_is_what_it_is_at_once(markdown_page: Page) -> None:
    """Guards against blocks of a stream that stay as they were when only half of them had come."""
    script = f"""
        const {{ showMarkdown }} = await import("/page/markdown.js");
        const differing = [];
        for (const text of {json.dumps([case[1] for case in CASES if "$" not in case[1] and "(" not in case[1]])}) {{
            const whole = document.createElement("div"), growing = document.createElement("div");
            for (let end = 1; end <= text.length; end += 1) showMarkdown(growing, text.slice(0, end));
            showMarkdown(whole, text);
            if (whole.innerHTML !== growing.innerHTML) differing.push(text);
        }}
        return differing;
    """
    assert markdown_page.run(script) == []


def test_markdown_of_any_text_ends(markdown_page: Page) -> None:
    """Guards against a page that hangs or breaks over an answer that is hostile, huge or only half there yet."""
    script = r"""
        const { toHtmlBlocks } = await import("/page/markdown.js");
        const marks = "** * _ ` ``` > - 1. | |-| [ ](http:// ) # x ~~ $ $$ \\( \\] <br> <b> &amp;".split(" ");
        const pieces = marks.concat("\n", " ", "> ", "- ", "1. ");
        let seed = 1, total = 0;
        const draw = count => { seed = (seed * 48271) % 2147483647; return seed % count; };
        for (let round = 0; round < 1000; round += 1) {
            let text = "";
            for (let at = draw(40); at >= 0; at -= 1) text += pieces[draw(pieces.length)];
            total += toHtmlBlocks(text).length;
        }
        const repeated = [">", "**a", "`a", "- ", "[", "|", "~~a", "_a", "![](", "http://", "$a", "$$", "\\(", "\\[\n"];
        for (const piece of repeated)
            total += toHtmlBlocks(piece.repeat(20000 / piece.length)).length;
        return total;
    """
    assert markdown_page.run(script) > 1000


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ((429, ERROR), "the queue is full"),
        ((502, "<html>"), "HTTP 502"),
        ((200, f"data: {ERROR}\n\n"), "the queue is full"),
        (None, "Failed to fetch"),
        ((200, ""), "The connection ended before the answer did."),
    ],
)
def test_refused_message_stays_in_the_box(page: Page, answer: Any, note: str) -> None:
    """Guards against a message that has to be typed again because the server was busy or out of reach."""
    say(page, "My long message", answer)
    assert (box(page), turns(page), page.text("#talk .bad")) == ("My long message", [], [note])
    assert page.text("#conversations li") == []


def test_answered_message_leaves_the_box(page: Page) -> None:
    """Guards against a message that is sent twice, also where its answer broke off half-way."""
    say(page, "My message", answering("Yes"))
    assert (box(page), turns(page)) == ("", ["My message", "Yes"])
    assert page.text("#conversations .name") == ["My message"]
    say(page, "And then?", (200, f"{PIECE.format(json.dumps('Half'))}data: {ERROR}\n\n"))
    assert (box(page), turns(page)[2:]) == ("", ["And then?", "Half"])
    assert page.text(".under .bad") == ["the queue is full"]


def test_other_versions_of_messages_and_answers_stay(page: Page) -> None:
    """Guards against an edit or a new answer that loses what was there, or that sees it."""
    say(page, "One", answering("a"))
    say(page, "Two", answering("b"))
    page.run(f"answers.push({json.dumps(answering('c'))})")
    page.click("Regenerate")
    rest(page)
    assert turns(page) == ["One", "a", "Two", "c"]
    page.press("ArrowUp")
    assert box(page) == "Two"
    page.run("document.querySelector('#input').value = ''")
    say(page, "Three", answering("d"))
    assert turns(page) == ["One", "a", "Three", "d"]
    assert sent(page) == [["One"], ["One", "a", "Two"], ["One", "a", "Two"], ["One", "a", "Three"]]
    page.click("‹")
    assert turns(page) == ["One", "a", "Two", "c"]
    page.click("‹")
    assert turns(page) == ["One", "a", "Two", "b"]
    assert [text.strip() for text in page.text(".versions")] == ["‹ 1 of 2 ›", "‹ 1 of 2 ›"]
    say(page, "Four", answering("e"))
    assert sent(page)[-1] == ["One", "a", "Two", "b", "Four"]
    page.run(f"answers.push({json.dumps((429, ERROR))})")
    page.click("Regenerate")
    rest(page)
    assert turns(page)[-1] == "e"  # the old answer stays
    page.press("ArrowUp")
    page.run("document.querySelector('#input').value = ''")
    say(page, "Five", (429, ERROR))
    assert (box(page), turns(page)[-2:]) == ("Five", ["Four", "e"])
    page.press("Enter")
    rest(page)
    assert sent(page)[-1] == ["One", "a", "Two", "b", "Five"]  # it is still an edit


def test_the_open_conversation_survives_a_reload(page: Page, server: RunningServer) -> None:
    """Guards against an empty page after a reload, and against a draft that is lost with it."""
    say(page, "One", answering("**a**"))
    page.run("document.querySelector('#input').focus()")
    page.type("A draft")
    page.run("document.body.dataset.old = 'true'")
    page.call("Page.reload")
    page.wait("document.body?.dataset.ready === 'true' && !document.body.dataset.old")
    assert (turns(page), box(page)) == (["One", "a"], "A draft")
    page.click("New conversation")
    assert turns(page) == []
    page.run("history.back()")
    page.wait("document.querySelectorAll('.turn').length === 2")


def test_conversations_are_kept_apart(page: Page) -> None:
    """Guards against an answer that lands in the conversation that was opened meanwhile."""
    page.run("""
        const held = window.fetch;
        window.fetch = async (path, options) => {
            if (path === "v1/chat/completions") await new Promise(done => { window.letGo = done; });
            return held(path, options);
        };
    """)
    page.run(f"answers.push({json.dumps(answering('a'))}); document.querySelector('#input').focus()")
    page.type("One")
    page.press("Enter")
    page.wait("window.letGo")
    page.click("New conversation")
    page.run("letGo()")
    rest(page)
    assert turns(page) == []
    page.click("One", ".name")
    assert turns(page) == ["One", "a"]
    page.run(f"letGo = null; confirm = () => true; answers.push({json.dumps(answering('b'))})")
    page.click("Regenerate")
    page.wait("window.letGo")
    page.click("Delete")
    page.run("letGo()")
    rest(page)
    assert page.text("#conversations .name") == []  # the answer does not bring it back


def test_tabs_show_the_same_conversations(chromium: Browser, server: RunningServer) -> None:
    """Guards against a tab that writes an old state over what another one has added."""
    with chromium.page() as first:
        opened(first, server)
        say(first, "One", answering("a"))
        second = chromium.tab(first.context)
        opened(second, server, first.value("'/' + location.hash"))
        say(first, "Two", answering("b"))
        second.wait("document.querySelectorAll('.turn').length === 4")
        say(second, "Three", answering("c"))
        assert sent(second) == [["One", "a", "Two", "b", "Three"]]
        first.wait("document.querySelectorAll('.turn').length === 6")
        second.run("confirm = () => true")
        second.click("Delete")
        first.wait("document.querySelectorAll('.turn, #conversations li').length === 0")


def test_search_finds_what_was_said(page: Page) -> None:
    """Guards against conversations that can only be found by their first words."""
    for text, answer in (("One", "the lock gates"), ("Two", "a weir"), ("Three", "a sluice")):
        page.click("New conversation")
        say(page, text, answering(answer))
    page.press("k", control=True)
    page.type("WEIR a")
    assert page.text("#conversations .name") == ["Two\na weir"]
    assert page.text("#found") == ["1 of 3 conversations"]


def test_exported_conversations_can_be_imported(page: Page) -> None:
    """Guards against an export that loses a version, and an import that doubles or replaces what is there."""
    page.run("""
        window.saved = [];
        const made = URL.createObjectURL;
        URL.createObjectURL = blob => { saved.push(blob); return made.call(URL, blob); };
        window.confirm = () => true;
        window.importText = async text => {
            const files = new DataTransfer(), input = document.querySelector("#import-file");
            files.items.add(new File([text], "x.json"));
            input.files = files.files;
            input.dispatchEvent(new Event("change"));
        };
    """)
    say(page, "One", answering("a"))
    page.run(f"answers.push({json.dumps(answering('b'))})")
    page.click("Regenerate")
    rest(page)
    page.click("Export all")
    page.run("await importText(await saved[0].text())")
    page.wait("document.querySelector('#notes').innerText.includes('x.json: 1 conversations')")
    assert page.text("#conversations .name") == ["One"]
    page.click("Delete")
    assert page.text("#conversations .name") == []
    page.run("await importText(await saved[0].text())")
    page.wait("document.querySelectorAll('#conversations .name').length === 1")
    page.click("One", ".name")
    assert (turns(page), [text.strip() for text in page.text(".versions")]) == (["One", "b"], ["‹ 2 of 2 ›"])
    for broken, problem in (("{", "it is not JSON"), ("{}", "it was not exported from this page")):
        page.run(f"await importText({json.dumps(broken)})")
        page.wait(f"document.querySelector('#notes').innerText.includes('x.json was not imported: {problem}')")


def test_conversations_of_the_earlier_page_are_taken_over(chromium: Browser, server: RunningServer) -> None:
    """Guards against an update after which all conversations are gone."""
    old = [
        {
            "id": "1-2",
            "title": "Old",
            "turns": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        }
    ]
    with chromium.page() as page:
        page.before(f"localStorage.setItem('penstock.conversations', {json.dumps(json.dumps(old))})")
        opened(page, server, "/#1-2")
        assert (page.text("#conversations .name"), turns(page)) == (["Old"], ["q", "a"])


def test_text_files_go_with_the_message(page: Page) -> None:
    """Guards against files that the model does not see, fences in them that end theirs, and files that are no text."""
    page.run("""
        const files = new DataTransfer();
        files.items.add(new File(["# A\\n```py\\nx\\n```\\n"], "a.md"));
        files.items.add(new File([new Uint8Array([0, 255, 1])], "b.png"));
        dispatchEvent(new DragEvent("drop", { dataTransfer: files, cancelable: true }));
    """)
    page.wait("document.querySelector('#files').innerText.includes('a.md')")
    page.wait("document.querySelector('#notes').innerText.includes('b.png was not added: it is not a text')")
    say(page, "Explain", answering("a"))
    assert sent(page) == [["File a.md:\n````\n# A\n```py\nx\n```\n````\n\nExplain"]]
    assert (page.text(".file summary"), page.text("#files")) == (["a.md"], [""])
    page.click("Edit")
    assert page.text("#files li")[0].startswith("a.md")


def test_settings_are_sent_as_typed(page: Page) -> None:
    """Guards against a 64-bit seed that is rounded, a wrong number that is sent, and a setting that is forgotten."""
    typed = {"seed": "12345678901234567890", "temperature": "0.5", "stop": "END\n###", "ignore_eos": "true",
             "logit_bias": '{"5": -1}'}  # fmt: skip
    fill = """
        for (const [name, text] of Object.entries(TYPED)) {
            const input = document.querySelector("#setting-" + name);
            input.value = text;
            input.dispatchEvent(new Event("change"));
        }
    """
    page.run("""
        window.bodies = [];
        const next = window.fetch;
        window.fetch = (path, options) => { bodies.push(options.body); return next(path, options); };
    """)
    page.run(fill.replace("TYPED", json.dumps(typed)))
    say(page, "One", answering("a"))
    body = json.loads(next(text for text in page.value("bodies") if text and '"stream":true' in text))
    given = {name: body[name] for name in typed}
    assert given == {"seed": 12345678901234567890, "temperature": 0.5, "stop": ["END", "###"], "ignore_eos": True,
                     "logit_bias": {"5": -1}}  # fmt: skip
    page.run(fill.replace("TYPED", json.dumps({"top_p": "1.5"})))
    assert "must be from 0 to 1" in page.text("#help-top_p")[0]
    say(page, "Two")
    assert (box(page), page.text("#talk .bad")) == ("Two", ["top_p: must be from 0 to 1, not 1.5"])
    page.click("Use the model's defaults")
    page.wait("document.querySelector('#setting-top_p').value === ''")
    say(page, "", answering("b"))
    assert "temperature" not in page.value("sent.at(-1)")


def test_a_full_context_leaves_the_oldest_turns_out(chromium: Browser) -> None:
    """Guards against a conversation that cannot go on, and a note that says max_tokens where the context ended."""
    client = FakeEngineClient(Behaviour(text="y" * 100), max_model_len=600)  # a token per byte
    with running(client) as server, chromium.page() as page:
        opened(page, server)
        for number in range(5):
            say(page, f"{number}" * 100)
        found = sent(page)
        assert [len(messages) for messages in found] == [1, 3, 3, 3, 3]
        assert found[-1][0] == "3" * 100  # the last two turns
        assert len(turns(page)) == 10  # all are still shown
        assert page.text(".divider") == ["the model sees what is below"]
        client.behaviour = Behaviour()  # letters up to the end of the context
        say(page, "x")
        assert "the context is full" in page.text(".under")[-1]
        say(page, "x" * 700)
        assert (box(page), "tokens are too many" in page.text("#talk .bad")[0]) == ("x" * 700, True)


def test_figures_are_the_engines(page: Page) -> None:
    """Guards against speeds that count how fast a browser was told (66000.0 tokens/s)."""
    parts = [
        {"kind": "preparing", "at_s": 0.0, "duration_s": 0.002},
        {"kind": "prefill", "at_s": 0.002, "duration_s": 0.048, "computed_tokens": 10, "generated_tokens": 1},
        {"kind": "decode", "at_s": 0.05, "duration_s": 2.0, "generated_tokens": 50},
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 51, "total_tokens": 61}
    usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
    last = {"choices": [], "usage": usage, "timeline": {"choices": [{"index": 0, "parts": parts}]}}
    status, body = answering("Yes")
    say(page, "One", (status, body.replace("data: [DONE]", f"data: {json.dumps(last)}\n\ndata: [DONE]")))
    assert page.text(".under.assistant .note") == [
        "51 tokens · 25.0 tokens/s · first token after 50 ms · prompt of 10 tokens, 4 of them cached · seed 7"
    ]


def test_an_answer_can_be_stopped_and_continued(chromium: Browser) -> None:
    """Guards against an answer that nothing stops, and one that begins anew where it should go on."""
    client = FakeEngineClient(Behaviour(text="abcdefgh", hang_at=3), max_model_len=600)
    with running(client) as server, chromium.page() as page:
        opened(page, server)
        page.run("document.querySelector('#input').focus()")
        page.type("One")
        page.press("Enter")
        page.wait("document.querySelector('.assistant > .text')?.innerText === 'abc'")
        page.press("Escape")
        rest(page)
        assert page.text(".under.assistant .note") == ["stopped"]
        client.behaviour = Behaviour(text="defgh")
        page.click("Continue")
        rest(page)
        assert turns(page) == ["One", "abcdefgh"]
        assert page.value("sent.at(-1).continue_final_message") is True


@pytest.mark.parametrize("hang_at", [0, 3])
def test_a_reload_keeps_what_was_answered_so_far(chromium: Browser, hang_at: int) -> None:
    """Guards against an answer that is lost with its page, and a message that nothing can answer any more."""
    client = FakeEngineClient(Behaviour(text="abcdefgh", hang_at=hang_at), max_model_len=600)
    with running(client) as server, chromium.page() as page:
        opened(page, server)
        page.run("document.querySelector('#input').focus()")
        page.type("One")
        page.press("Enter")
        page.wait(f"document.querySelector('.assistant > .text')?.innerText === {json.dumps('abc'[:hang_at])}")
        page.run("document.body.dataset.old = 'true'")
        page.call("Page.reload")
        page.wait("document.body?.dataset.ready === 'true' && !document.body.dataset.old")
        page.wait("document.querySelector('#state').innerText === 'ready'")
        question, *answers = turns(page)
        assert question == "One"
        assert "abc".startswith(*answers) if hang_at else answers == []
        client.behaviour = Behaviour(text="xyz")
        page.click("Continue" if hang_at else "Answer")
        rest(page)
        assert turns(page) == ["One", "".join(answers) + "xyz"]


def test_formulas_look_as_they_should_in_spite_of_the_policy(chromium: Browser, server: RunningServer) -> None:
    """Guards against formulas whose style attributes the policy has blocked."""
    with chromium.page() as page:
        opened(page, server)
        say(page, "One", answering("$\\vec{v}$"))
        page.wait("document.querySelector('.katex svg[style]')")
        assert page.value("[...document.querySelectorAll('.katex [style]')].filter(e => !e.style.length).length") == 0


def test_reasoning_is_shown_apart(page: Page) -> None:
    """Guards against reasoning that is mixed into the answer, or sent back as a part of it."""
    thought = 'data: {"choices": [{"delta": {"reasoning_content": "Hm."}, "finish_reason": null}]}\n\n'
    status, body = answering("Yes")
    say(page, "One", (status, thought + body))
    assert (turns(page)[1], page.text(".thinking summary")) == ("Yes", ["Thinking"])
    say(page, "Two", answering("No"))
    assert sent(page)[-1] == ["One", "Yes", "Two"]


def test_models_can_be_chosen(chromium: Browser) -> None:
    """Guards against a name that the page shows but does not send."""
    options = ServerOptions(port=0, access_log=False, served_model_names=("big", "small"))
    with running(FakeEngineClient(Behaviour(text="x")), options) as server, chromium.page() as page:
        opened(page, server)
        page.run("const s = document.querySelector('#model'); s.value = 'small'; s.dispatchEvent(new Event('change'))")
        say(page, "One")
        assert page.value("sent[0].model") == "small"
        page.open(server.url + "/#x")
        page.wait("document.querySelector('#model').value === 'small'")


def test_a_key_is_asked_for_on_the_page(chromium: Browser) -> None:
    """Guards against a page that cannot be used where the server has a key, and a key that outlives its tab unasked."""
    options = ServerOptions(port=0, access_log=False, api_key=KEY)
    with running(FakeEngineClient(Behaviour(text="Welcome.")), options) as server, chromium.page() as page:
        page.before(FAKE_ANSWERS)
        page.open(server.url)
        page.wait("document.querySelector('#login').open")
        page.run("document.querySelector('#key').focus()")
        page.type("sk-wrong")
        page.press("Enter")
        page.wait("document.querySelector('#login-problem').innerText === 'The server does not know this key.'")
        page.run("document.querySelector('#key').value = ''; document.querySelector('#key').focus()")
        page.type(KEY)
        page.press("Enter")
        page.wait("!document.querySelector('#login').open && document.querySelector('#state').innerText === 'ready'")
        say(page, "One")
        assert turns(page) == ["One", "Welcome."]
        assert page.value("[localStorage.getItem('penstock.key'), sessionStorage.getItem('penstock.key')]") == [
            None,
            KEY,
        ]


def test_everything_can_be_reached_with_the_keyboard(page: Page) -> None:
    """Guards against controls without a name, and shortcuts that do nothing."""
    say(page, "One", answering("```\nx\n```"))
    nameless = """
        return [...document.querySelectorAll("button, input, textarea, select, [tabindex]")]
            .filter(e => e.checkVisibility() && !e.closest(".code"))
            .filter(e => !(e.innerText?.trim() || e.labels?.length || e.ariaLabel))
            .map(e => e.outerHTML);
    """
    assert page.run(nameless) == []
    page.press("/", control=True)
    assert page.value("document.querySelector('#shortcuts').open") is True
    page.press("Escape")
    page.wait("!document.querySelector('#shortcuts').open")
    page.press("o", control=True, shift=True)
    assert turns(page) == []
    page.press(",", control=True)
    assert page.value("document.querySelector('#panel').checkVisibility()") is False
    page.press("k", control=True)
    assert page.value("document.activeElement.id") == "search"


CONTRAST = """
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const paint = colors => {
        canvas.clearRect(0, 0, 1, 1);
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = rgb => rgb.map(c => c / 255).map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = node => {
        const colors = [];
        for (let at = node; at; at = at.parentElement) colors.unshift(getComputedStyle(at).backgroundColor);
        return colors;
    };
    const faint = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walk.nextNode(); text; text = walk.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !node.checkVisibility()) continue;
        if (node.closest(".unseen, .skip, :disabled, .katex-mathml, select")) continue;
        const colors = behind(node);
        const one = light(paint(colors)), other = light(paint([...colors, getComputedStyle(node).color]));
        const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (contrast < 4.5) faint.push([text.data.trim().slice(0, 40), contrast]);
    }
    return faint;
"""
EXAMPLE = Path(__file__).with_name("page_example.md")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_can_be_read(chromium: Browser, server: RunningServer, width: int, dark: bool) -> None:
    """Guards against text that is too faint (WCAG AA), and against a page that is wider than a phone."""
    with chromium.page(width=width, dark=dark) as page:
        opened(page, server)
        say(page, "How do I start a server?", answering(EXAMPLE.read_text(encoding="utf-8")))
        page.wait("[...document.querySelectorAll('.formula')].every(node => node.querySelector('.katex'))")
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.run(CONTRAST) == []
        for name in ("conversations", "settings"):
            page.run(f"const b = document.querySelector('#show-{name}'); if (b.ariaExpanded !== 'true') b.click()")
            assert page.run(CONTRAST) == []
            assert page.value("document.documentElement.scrollWidth") <= width
        assert page.complaints() == []


COUNTED = """
    window.counted = [];
    const asIs = window.fetch;
    window.fetch = (path, options) => {
        if (path === "tokenize") counted.push(JSON.parse(options.body).model);
        return asIs(path, options);
    };
"""


def test_several_models(chromium: Browser) -> None:
    """Guards against a page that waits for a model which sleeps until it is asked, and against answers, settings,
    counts of tokens and figures of another model than the one that is chosen."""
    with serving() as (client, pool), chromium.page() as page:
        for model in pool:
            model.adapters = (f"of-{model.name}",)
        page.before(COUNTED)
        page.open(f"{client.base_url}/?model=b")
        page.wait("document.querySelector('#setting-seed')")
        shown = page.text("#model option")
        assert shown == [text for name in "abc" for text in (name, f"of-{name} (adapter of {name})")]
        assert page.value("document.querySelector('#model').value") == "b"
        for name in "bc":
            page.run(f"const box = document.querySelector('#model'); if (box.value !== '{name}') {{ "
                     f"box.value = '{name}'; box.dispatchEvent(new Event('change')); }}")  # fmt: skip
            for question in ("Who?", "Who? " * 60):  # the second so long that its tokens are counted
                say(page, question)
                assert turns(page)[-1] == f"I am {name}."
                page.wait("document.querySelector('#context').innerText === 'context of 512 tokens'")
            assert set(page.value("counted.splice(0)")) == {name}
            asked = page.value("performance.getEntriesByType('resource').map(entry => entry.name)")
            for route in ("status", "page/settings"):
                assert any(url.endswith(f"/{route}?model={name}") for url in asked), route
        assert page.value("location.search") == "?model=c"
        assert [model.num_loads for model in pool] == [0, 1, 1]
        assert page.complaints() == []
