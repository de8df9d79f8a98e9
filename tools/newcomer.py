"""Do what a newcomer does with the wheel, and time each step: `make newcomer`. It ends at the first that fails.

    python -m tools.newcomer [--gguf FILE] [--python PYTHON] [--write]

The newcomer has an empty home, a new virtual environment, the wheel of `make wheel`, no compiler, and README.md. The
steps are those that it names: install, a story, the demo model and a GGUF file in a conversation, the server with its
page, an agent, and an engine that is killed during a stream. --write puts the table into docs/getting_started.md.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tools import wheel

ROOT = wheel.ROOT
PAGE = ROOT / "docs" / "getting_started.md"
BEGIN, END = "<!-- tools/newcomer.py -->\n", "<!-- end -->\n"
FIRST_TEXT_S = 120.0  # from the first command to the first sensible text
SUM = {"role": "user", "content": "What is 3 + 4?"}
SCRIPT = '/set temperature 0\nWhat is 3 + 4?\n"""\nTell me\na story.\n"""\n/save talk.json\n/load talk.json\n/bye\n'


class Newcomer:
    """A home, an environment and a table of what was done there."""

    def __init__(self, home: Path, python: str) -> None:
        self.home, self._began = home, time.monotonic()
        self.rows: list[tuple[str, float, str]] = []
        self.environ = wheel.bare_environ(home) | {"HOME": str(home)}
        self.step("`python3 -m venv venv`", python, "-m", "venv", "venv")
        self.step("`python3 -V`", "python3", "-V", wanted="Python.*")

    def step(self, shown: str, *command: object, text: str = "", wanted: str = "") -> str:
        """Run a command, note its time, and return its output. `wanted` is a pattern that the output has."""
        began = time.monotonic()
        home = {"HOME": os.environ["HOME"]} if command[0] == "pip" else {}  # whose settings say where packages are
        said = wheel.call(*command, env=self.environ | home, cwd=self.home, input=text)
        self.note(shown, time.monotonic() - began, said, wanted)
        return said

    def note(self, shown: str, seconds: float, said: str = "", wanted: str = "") -> None:
        """Note a step, whose output must have the pattern."""
        found = re.search(wanted, said)
        if not found:
            raise SystemExit(f"newcomer: {shown}: {wanted!r} is not in: {said[:2000]}")
        self.rows.append((shown, seconds, found[0].replace("\n", " ")))
        print(f"{time.monotonic() - self._began:6.1f} s  {seconds:6.2f} s  {shown}  {found[0]}", flush=True)

    def penstock(self, shown: str, *words: object, **more: str) -> str:
        return self.step(f"`penstock {shown}`", "penstock", *words, **more)

    def elapsed(self) -> float:
        return time.monotonic() - self._began


def table(rows: list[tuple[str, float, str]]) -> str:
    """Write the steps as a table, with the time since the first command."""
    lines, total = ["| step | seconds | in all | |", "|---|---|---|---|"], 0.0
    for shown, seconds, found in rows:
        total += seconds
        lines.append(f"| {shown} | {seconds:.1f} | {total:.1f} | {found} |")
    return "\n".join(lines) + "\n"


def demo_as_gguf(file: Path) -> Path:
    """Write the demo model as a GGUF file, with the writer of the tests."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from tests.weights.gguf_files import write_gguf

    folder = ROOT / "penstock" / "demo" / "model"
    template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.eos_token_id = model.config.eos_token_id[-1]  # a GGUF file has one; this ends a turn
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return write_gguf(model, file, "F32", tokenizer=tokenizer, template=template)


def serve(new: Newcomer) -> None:
    """Take the steps that need a server."""
    began = time.monotonic()
    command = ["penstock", "serve", "demo", "--port", "0"]
    server = subprocess.Popen(command, cwd=new.home, env=new.environ, text=True, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        new.note("`penstock serve demo`", time.monotonic() - began, line, "ready in .* s")
        url = next(word for word in line.split() if word.startswith("http"))
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
            ask(new, http, url)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        code = f"exit code {server.wait(60)}"
        new.note("SIGTERM ends the server", time.monotonic() - began, code, "exit code 0")
    finally:
        server.kill()
        server.wait()


def ask(new: Newcomer, http: httpx.Client, url: str) -> None:
    def call(shown: str, wanted: str, path: str, **body: Any) -> str:
        began = time.monotonic()
        answer = http.post(path, json=body) if body else http.get(path)
        new.note(shown, time.monotonic() - began, answer.raise_for_status().text, wanted)
        return answer.text

    question = {"messages": [SUM], "model": "demo", "temperature": 0}
    call("`GET /health`", "", "/health")
    call("`POST /v1/chat/completions`", r"3 \+ 4 = 7\.", "/v1/chat/completions", **question)
    began, page = time.monotonic(), http.get("/").text
    files = [file for file in re.findall(r'(?:src|href)="([^"#:]+)"', page) if http.get(f"/{file}").is_success]
    new.note("the page, and the files that it names", time.monotonic() - began, f"{len(files)} files", "[3-9] files")
    new.penstock("chat --url URL", "chat", "--url", url, text=f"{SUM['content']}\n/bye\n", wanted=r"3 \+ 4 = 7")
    new.step("`pip install openai`", "pip", "install", "--quiet", "--disable-pip-version-check", "openai")
    new.environ["PENSTOCK_URL"] = url
    new.step("`python examples/agent.py`", "python", ROOT / "examples" / "agent.py", wanted=r"assistant 3 \+ 4 = 7")
    story = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "seed": 1}
    whole = json.loads(call("900 tokens", "", "/v1/completions", **story))["choices"][0]["text"]
    began = time.monotonic()
    with http.stream("POST", "/v1/completions", json=story | {"stream": True}) as stream:
        lines = stream.iter_lines()
        parts = [next(lines)]
        killed = http.get("/status").json()["engine"]["pid"]
        os.kill(killed, signal.SIGKILL)
        parts += lines
    chunks = [json.loads(line[6:]) for line in parts if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    same = "the same text" if text == whole else f"{len(text)} of {len(whole)} characters"
    new.note("the same as a stream, with `kill -9` of the engine", time.monotonic() - began, same, "the same text")
    began, running = time.monotonic(), http.get("/status").json()["engine"]["pid"]
    engine = "the same engine" if running == killed else "another engine"
    new.note("`GET /status`", time.monotonic() - began, engine, "another engine")


def carry_out(home: Path, python: str, gguf: Path) -> list[tuple[str, float, str]]:
    """Take all steps in an empty home. Raise SystemExit at the first that fails."""
    (file,) = wheel.DIST.glob("penstock-*.whl")
    new = Newcomer(home, python)
    new.step("`pip install penstock-*.whl`", "pip", "install", "--quiet", "--disable-pip-version-check", file)
    new.penstock("--version", "--version", wanted="native kernels: .*(?=\\))")
    words = ("generate", "demo", "-p", "Once upon a time", "--max-tokens", "40", "--temperature", "0")
    new.penstock('generate demo -p "Once upon a time"', *words, wanted=r"Once upon a time[^.]*\.")
    if new.elapsed() > FIRST_TEXT_S:
        raise SystemExit(f"newcomer: the first text came after {new.elapsed():.0f} s")
    new.penstock('run demo "What is 3 + 4?"', "run", "demo", SUM["content"], wanted=r"3 \+ 4 = 7\.")
    new.penstock(f'run {gguf.name} "What is 3 + 4?"', "run", gguf, SUM["content"], wanted=r"\S.*")
    new.penstock("chat demo", "chat", "demo", text=SCRIPT, wanted=r"3 \+ 4 = 7\.")
    serve(new)
    return new.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: the demo model, written as a GGUF file")
    parser.add_argument("--python", default=sys.executable, help="the newcomer's Python (default: this one)")
    parser.add_argument("--write", action="store_true", help="write the table into docs/getting_started.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        gguf = args.gguf or demo_as_gguf(Path(folder) / "demo-f32.gguf")
        rows = carry_out(home, args.python, gguf.absolute())
    print(table(rows))
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
