"""A browser for tests: Chromium without a window, driven over a pair of pipes with its DevTools protocol.

Only the standard library is needed. A machine without Chromium skips these tests.
"""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WAIT_S = 200  # only ends a test that has gone wrong
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """A running browser. A page is a tab with a storage of its own."""

    def __init__(self, command: str, folder: str) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # the browser reads commands from descriptor 3 and writes answers to 4
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [command, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._unread = b""
        self.events: deque[dict[str, Any]] = deque(maxlen=10_000)

    def close(self) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and return its result; the events that come before it are kept in `events`."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") != number:
                self.events.append(found)
            elif "error" in found:
                raise BrowserError(f"{method}: {found['error']['message']}")
            else:
                return found["result"]

    def _read(self) -> Any:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], WAIT_S)
            received = os.read(self._from, 1 << 20) if ready else b""
            if not received:
                raise BrowserError("the browser has gone" if ready else "the browser does not answer")
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    @contextlib.contextmanager
    def page(self, *, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator["Page"]:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        try:
            yield self.tab(context, width=width, height=height, dark=dark)
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def tab(self, context: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        return page


class BrowserError(Exception):
    """The browser, or a script on its page, has failed."""


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self.context = context

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def before(self, script: str) -> None:
        """Run a script on every document that is opened from now on, before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.body?.dataset.ready === 'true'")

    def run(self, script: str) -> Any:
        """Run the body of an async function and return what it returns."""
        wrapped = f"(async () => {{ {script} }})()"
        done = self.call(
            "Runtime.evaluate", expression=wrapped, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return done["result"].get("value")

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(BrowserError):  # a document that is being replaced cannot be asked
                if self.value(f"Boolean({condition})"):
                    return
            assert time.monotonic() < end, f"did not happen: {condition}"
            time.sleep(0.01)

    def text(self, selector: str) -> list[str]:
        """List the visible texts of all elements that a selector finds."""
        found: list[str] = self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        return found

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False, shift: bool = False) -> None:
        """Press a key, like "Enter" or "k"."""
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
        event["modifiers"] = 2 * control + 8 * shift
        if key == "Enter" and not control:
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, text: str, selector: str = "button") -> None:
        """Click the last visible element of the selector that has this text."""
        look = f"""
            const found = [...document.querySelectorAll({json.dumps(selector)})]
                .filter(e => e.innerText.trim() === {json.dumps(text)} && e.checkVisibility()).at(-1);
            if (!found) throw new Error('there is no ' + {json.dumps(text)});
            found.click();
        """
        self.run(look)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """List what the browser has logged as an error: exceptions, blocked styles and scripts, failed requests."""
        found = []
        self.value("0")  # whatever came before has arrived then
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                entry = event["params"]["entry"]
                found.append(f"{entry['text']} {entry.get('url', '')}".strip())
        return found


def command() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    found = command()
    if found is None:
        pytest.skip("this machine has no Chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(found, folder)
        try:
            yield browser
        finally:
            browser.close()
