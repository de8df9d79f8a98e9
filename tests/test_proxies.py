"""The configurations of docs/proxies.md, as they stand there (names, files and ports aside), run by nginx and Caddy."""

import contextlib
import dataclasses
import getpass
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, WAIT_S, free_port, running_anywhere, wait_until
from tests.server.test_addresses import certificate

PAGE = (Path(__file__).parent.parent / "docs" / "proxies.md").read_text(encoding="utf-8")
NGINX = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CADDY = re.findall(r"^```caddy\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SOCKET = "/run/penstock/penstock.sock"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
BODY = {"prompt": "a", "max_tokens": 40, "stream": True}


def nginx(directory: Path, port: int, files: dict[str, str]) -> list[str]:
    site = NGINX[0].replace(SOCKET, f"{directory}/sock").replace("listen 443", f"listen 127.0.0.1:{port}")
    site = site.replace("/etc/ssl/llm.example.pem", files["ssl_certfile"])
    site = site.replace("/etc/ssl/llm.example.key", files["ssl_keyfile"])
    left, removed = NGINX[1].splitlines()
    more = f"{left}\n{removed.replace('/llm/', '/removed/')}\n"
    site = site.rstrip().removesuffix("}") + more + "}\n"
    paths = "".join(f"{name}_temp_path {directory}/{name};\n" for name in TEMPORARY)
    user = f"user {getpass.getuser()};\n" if os.getuid() == 0 else ""  # otherwise its workers would be nobody's
    head = f"{user}pid {directory}/pid;\nerror_log {directory}/error.log;\ndaemon off;\nevents {{}}\n"
    text = f"{head}http {{\naccess_log off;\n{paths}{site}}}\n"
    (directory / "nginx.conf").write_text(text)
    return ["nginx", "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]


def caddy(directory: Path, port: int, files: dict[str, str]) -> list[str]:
    inner = CADDY[0].split("{", 1)[1].rstrip().removesuffix("}")
    removed = CADDY[1].replace("handle_path /llm/", "handle_path /removed/")
    tls = f"tls {files['ssl_certfile']} {files['ssl_keyfile']}"
    site = f"https://localhost:{port} {{\n{tls}\n{removed}\nhandle {{\n{inner}\n}}\n}}\n"
    site = site.replace(SOCKET, f"{directory}/sock")
    (directory / "Caddyfile").write_text(f"{{\nadmin off\nauto_https off\n}}\n{site}")
    return ["caddy", "run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def proxy(command: list[str], directory: Path, port: int) -> Iterator[None]:
    with open(directory / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as started:
        try:
            deadline = time.monotonic() + WAIT_S
            while not listens(port):
                assert started.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield
        finally:
            started.terminate()


@pytest.mark.parametrize("name", ["nginx", "caddy"])
def test_the_configuration_of_the_page(name: str, tmp_path: Path) -> None:
    """Guards against a page whose proxy collects a stream, refuses long prompts, keeps abandoned requests running, or
    does not find the routes below its prefix."""
    if shutil.which(name) is None:
        pytest.skip(f"this machine has no {name}")
    files, port = certificate(tmp_path), free_port()
    command = {"nginx": nginx, "caddy": caddy}[name](tmp_path, port, files)
    fake = FakeEngineClient(Behaviour(hang_at=2))
    options = dataclasses.replace(QUIET, uds=str(tmp_path / "sock"), root_path="/llm")
    context = ssl.create_default_context(cafile=files["ssl_certfile"])
    with (
        running_anywhere(fake, options),
        proxy(command, tmp_path, port),
        httpx.Client(verify=context, timeout=WAIT_S, trust_env=False) as client,
    ):
        base = f"https://localhost:{port}"
        for prefix in ("", "/llm", "/removed"):
            with client.stream("POST", f"{base}{prefix}/v1/completions", json=BODY) as response:
                assert response.status_code == 200, (prefix, response.headers)
                next(response.iter_lines())  # while the rest does not come: it is not collected
            wait_until(lambda: not fake.open)
        for size, status in ((2**20 * 2, 400), (2**20 * 9, 413)):
            answer = client.post(f"{base}/v1/completions", json={"prompt": "a" * size})
            assert (answer.status_code, "error" in answer.json()) == (status, True)
        assert len(fake.aborted) == 3  # the streams, when their reader had left
