"""The pictures of docs/page.md: `python -m tests.page_pictures [MODEL]`, or `make pictures`.

The server is `penstock serve MODEL`, by default with the bundled demo model. Its page is opened in Chromium, asked for
a story, and shown an answer that has everything that Markdown has.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import browser
from tests.browser import Page

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
EXAMPLE = Path(__file__).parent / "server" / "page_example.md"
QUESTION = "How do I start a server?"
# The next chat request is answered by EXAMPLE, with the figures that a server would send.
EXAMPLE_ANSWER = """
    const real = window.fetch;
    window.fetch = async (path, options) => {
        if (path !== "v1/chat/completions" || !options.body.includes(QUESTION)) return real(path, options);
        const event = value => "data: " + JSON.stringify(value) + "\\n\\n";
        const delta = { delta: { content: TEXT }, finish_reason: "stop" };
        return new Response(event({ choices: [delta], seed: 7 }) + event({ choices: [], ...FIGURES }));
    };
"""
PARTS = [
    {"kind": "prefill", "at_s": 0.0, "duration_s": 0.021, "generated_tokens": 1},
    {"kind": "decode", "at_s": 0.021, "duration_s": 9.1, "generated_tokens": 310},
]
FIGURES = {
    "usage": {"prompt_tokens": 14, "completion_tokens": 311, "total_tokens": 325, "prompt_tokens_details": {}},
    "timeline": {"choices": [{"parts": PARTS}]},
}


@contextmanager
def serving(model: str, **environment: str) -> Iterator[str]:
    """Serve a model and yield the server's address."""
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"serving .* at (http://\S+)", line):
                yield found[1]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def say(page: Page, text: str) -> None:
    page.run("document.querySelector('#input').focus()")
    page.type(text)
    page.press("Enter")
    page.wait("document.querySelector('#send').innerText === 'Send' && document.querySelector('.assistant .text')")
    page.wait("[...document.querySelectorAll('.formula')].every(node => node.querySelector('.katex'))")
    page.wait("document.fonts.status === 'loaded'")


def opened(page: Page, url: str) -> None:
    values = {"QUESTION": QUESTION, "TEXT": EXAMPLE.read_text(encoding="utf-8"), "FIGURES": FIGURES}
    named = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
    page.before(f"{{ {named} {EXAMPLE_ANSWER} }}")
    page.open(url)
    page.wait("document.querySelector('#state').innerText === 'ready' && document.querySelector('#setting-seed')")


def save(page: Page, name: str) -> None:
    page.run("await new Promise(requestAnimationFrame)")
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.png").write_bytes(page.picture())


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with browser.started() as chromium:
        with serving(model) as url:
            for name, size, dark in (("page-light", (1280, 900), False), ("page-phone", (390, 780), True)):
                with chromium.page(width=size[0], height=size[1], dark=dark) as page:
                    opened(page, url)
                    say(page, "Tell me a story about a cat.")
                    page.run("document.querySelector('#new').click()")
                    say(page, QUESTION)
                    page.run("document.querySelector('#talk').scrollTop = 0")
                    save(page, name)
        with serving(model, PENSTOCK_API_KEY="sk-for-the-picture") as url, chromium.page(height=420) as page:
            page.open(url)
            page.wait("document.querySelector('#login').open")
            save(page, "page-login")


if __name__ == "__main__":
    main()
