"""Run other projects' clients against a server of the demo model, and write the table: `make clients`.

    python -m tools.clients [NAME ...] [--write]

Each client is installed in an environment of its own below ~/.cache/penstock/clients, at the versions that the head of
its file in examples/ names, and runs the functions of that file. Packages come from pip and npm; the clients then need
nothing but the server. A client whose packages cannot be installed fails in all its features.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock_lab.prove.proof import Subject
from penstock_lab.prove.servers import serve
from tools.clients.features import FEATURES

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- make clients -->\n", "<!-- end -->\n"
HEAD = re.compile(r"^(?:#|//) /// script\n(.*?)^(?:#|//) ///$", re.MULTILINE | re.DOTALL)
LIMIT_S = 600.0  # for all features of a client
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


@dataclass(frozen=True)
class Client:
    """A file of examples/.

    Attributes:
        dependencies: what is installed for it, with versions.
        about: the first sentence about it.
        features: those that it has a function for.
    """

    file: Path
    dependencies: tuple[str, ...]
    about: str
    features: tuple[str, ...]

    @classmethod
    def of(cls, file: Path) -> "Client":
        text = file.read_text(encoding="utf-8")
        head = HEAD.search(text)
        assert head is not None, f"{file} has no head with its dependencies"
        listed = tomllib.loads(re.sub(r"^(#|//) ?", "", head[1], flags=re.MULTILINE))["dependencies"]
        if file.suffix == ".py":
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            named = re.findall(r"^def (\w+)", text, re.MULTILINE)
        else:
            about, named = (
                text[head.end() :].strip().partition("\n")[0].lstrip("/ "),
                re.findall(r"async (\w+)\(", text),
            )
        return cls(file, tuple(listed), " ".join(about.split()), tuple(name for name in FEATURES if name in named))

    def install(self, cache: Path) -> Path:
        """Install what it needs, unless that is there. Return its directory. Raise CalledProcessError if that fails."""
        home = cache / self.file.stem
        stamp, wanted = home / "installed.txt", "\n".join(self.dependencies)
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return home
        shutil.rmtree(home, ignore_errors=True)
        if self.file.suffix == ".py":
            venv.create(home)
            pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
            if self.dependencies:
                subprocess.run([*pip, *self.dependencies], check=True, capture_output=True)
        else:
            home.mkdir(parents=True)
            npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(home)]
            subprocess.run([*npm, *self.dependencies], check=True, capture_output=True)
        stamp.write_text(wanted, encoding="utf-8")
        return home

    def run(self, cache: Path, url: str) -> dict[str, str | None]:
        """Run its features. Return the error of each, or None."""
        found: dict[str, str | None] = dict.fromkeys(self.features, "it did not run")
        try:
            home = self.install(cache)
            if self.file.suffix == ".py":
                command = [str(home / "bin" / "python"), str(HERE / "features.py"), str(self.file), url]
            else:  # packages are looked for beside the file
                command = ["node", shutil.copy(self.file, home), url]
            environ = {**os.environ, **OFFLINE, "HOME": str(home)}
            done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            return dict.fromkeys(self.features, f"{type(error).__name__}: {error}"[:300])
        (home / "last_run.log").write_text(done.stderr, encoding="utf-8")
        for line in done.stdout.splitlines():
            if line.startswith('{"feature"'):
                item: dict[str, Any] = json.loads(line)
                found[item["feature"]] = item["error"]
        return found


def table(results: dict[Client, dict[str, str | None]]) -> str:
    """Write the rows of clients, and below them why something failed."""
    rows = [f"| client | versions | {' | '.join(FEATURES)} |", "|---" * (2 + len(FEATURES)) + "|"]
    why = []
    for client, found in results.items():
        marks = ["" if name not in found else "yes" if found[name] is None else "**no**" for name in FEATURES]
        shown = ", ".join(f"`{name}`" for name in client.dependencies) or "none"
        rows.append(f"| {client.about} | {shown} | {' | '.join(marks)} |")
        why += [f"- `{client.file.name}`, {name}: {error}" for name, error in found.items() if error is not None]
    return "\n".join([*rows, "", *why, ""] if why else [*rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files of examples/, without their endings (default: all)")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    args = parser.parse_args()
    files = sorted(file for file in (HERE / "examples").iterdir() if file.suffix in (".py", ".mjs"))
    clients = [Client.of(file) for file in files if not args.names or file.stem in args.names]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "clients"
    results: dict[Client, dict[str, str | None]] = {}
    with serve(Subject("demo", {})) as server:
        for client in clients:
            found = results[client] = client.run(cache, server.url)
            for name, error in found.items():
                print(f"{client.file.name:20} {name:12} {error or 'ok'}", flush=True)
    written = table(results)
    print(written)
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + written + END + rest.partition(END)[2], encoding="utf-8")
    return any(error is not None for found in results.values() for error in found.values())


if __name__ == "__main__":
    sys.exit(main())
