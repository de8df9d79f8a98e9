"""Where a server can be reached: TLS, a Unix socket, a path behind a proxy, connections that are kept."""

import dataclasses
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from penstock.errors import InvalidRequestError
from penstock.server.options import ServerOptions
from penstock.server.serve import open_unix_socket
from tests.server.fakes import FakeEngineClient
from tests.server.harness import QUIET, WAIT_S, app_client, running, running_anywhere

BODY = {"prompt": "a", "max_tokens": 4}


def certificate(directory: Path, name: str = "localhost") -> dict[str, str]:
    """Make a certificate that signs itself, and its key."""
    files = {"ssl_keyfile": str(directory / "key.pem"), "ssl_certfile": str(directory / "cert.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"], "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificate(tmp_path_factory.mktemp("tls"))


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=WAIT_S)


def test_https_answers_streams_and_reads_a_new_certificate(files: dict[str, str], tmp_path: Path) -> None:
    """Guards against TLS that only the start-up line has, against a client without TLS that disturbs the others, and
    against a server that has to be restarted whenever its certificate is renewed, or loses it with a broken file."""
    mine = {name: str(tmp_path / Path(file).name) for name, file in files.items()}
    for name, file in files.items():
        Path(mine[name]).write_bytes(Path(file).read_bytes())
    with running_anywhere(FakeEngineClient(), dataclasses.replace(QUIET, **cast(Any, mine))) as server:
        url = f"https://127.0.0.1:{server.port}"
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain:
            plain.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP/1.1 2")
        with httpx.Client(verify=context, timeout=WAIT_S, trust_env=False) as client:
            assert client.post(f"{url}/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 4
            with client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
                assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        before = served_certificate(server.port)
        certificate(tmp_path)
        server._loop.call_soon_threadsafe(server._serving.reload)
        deadline = time.monotonic() + WAIT_S
        while (renewed := served_certificate(server.port)) == before:
            assert time.monotonic() < deadline
        file = Path(mine["ssl_certfile"])
        for damage in (lambda: file.write_text("no certificate"), lambda: (file.unlink(), os.mkfifo(file))):
            damage()  # the second would hold up the event loop until somebody writes
            server._loop.call_soon_threadsafe(server._serving.reload)
            assert [served_certificate(server.port) for _ in range(3)] == [renewed] * 3


def test_a_certificate_that_cannot_be_used_is_named(files: dict[str, str], tmp_path: Path) -> None:
    """Guards against a traceback of the ssl module, and against a prompt for a password in a service's log."""
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    command += ["-in", files["ssl_keyfile"], "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    os.mkfifo(tmp_path / "fifo")
    wrong: list[dict[str, Any]] = [{"ssl_certfile": "/nowhere.pem"}, {"ssl_certfile": str(tmp_path / "fifo")}]
    wrong.append({**files, "ssl_keyfile": str(locked)})
    for one in wrong:
        with pytest.raises(InvalidRequestError, match=r"ssl_certfile: .* cannot be used"):
            ServerOptions(**one).ssl_context()
    with pytest.raises(InvalidRequestError, match=r"ssl_keyfile: .* there is no ssl_certfile"):
        ServerOptions(ssl_keyfile=files["ssl_keyfile"])


def test_a_unix_socket(tmp_path: Path) -> None:
    """Guards against a socket that its proxy may not open, against one of a killed server that keeps the next from
    starting, and against one that is taken from a server that runs."""
    path = str(tmp_path / "penstock.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    with running_anywhere(FakeEngineClient(), dataclasses.replace(QUIET, uds=path)):
        assert os.stat(path).st_mode & 0o777 == 0o666
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=WAIT_S) as client:
            url = "http://any.name/v1/completions"  # the proxy in front decides about names
            assert client.post(url, json=BODY).json()["usage"]["completion_tokens"] == 4
            with client.stream("POST", url, json={**BODY, "stream": True}) as response:
                assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(OSError, match="in use"):
            open_unix_socket(path)
    assert not os.path.exists(path)
    (tmp_path / "a_file").write_text("kept")
    with pytest.raises(OSError, match="in use"):
        open_unix_socket(str(tmp_path / "a_file"))


def test_a_prefix_in_the_path() -> None:
    """Guards against a proxy's prefix that hides the routes, and against one that passes a layer which looks at the
    path: the key check, the body's limits."""
    options = dataclasses.replace(QUIET, root_path="/llm", api_key="secret-key-of-sixteen")
    client, key = app_client(options=options), {"Authorization": "Bearer secret-key-of-sixteen"}
    for prefix in ("", "/llm"):
        assert client.get(f"{prefix}/health").status_code == 200
        assert client.get(f"{prefix}/v1/models").status_code == 401
        assert client.get(f"{prefix}/v1/models", headers=key).status_code == 200
        assert client.post(f"{prefix}/v1/completions", json=BODY, headers=key).status_code == 200
    for path in ("/llmx/health", "/llm/llm/health", "/other/health"):
        assert client.get(path, headers=key).status_code == 404
    for wrong in ("llm", "/llm/", "/"):
        with pytest.raises(InvalidRequestError, match="root_path"):
            ServerOptions(root_path=wrong)


def test_idle_connections_are_kept_for_the_time_that_is_set() -> None:
    """Guards against a server that closes connections before the proxy does, which then sends requests into them."""
    request = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    options = dataclasses.replace(QUIET, timeout_keep_alive=0.3)
    with (
        running(FakeEngineClient(), options) as server,
        socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock,
    ):
        sock.sendall(request)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        assert sock.recv(4096) == b""  # closed long before the default
    assert ServerOptions().timeout_keep_alive > 120  # nginx and Caddy keep connections for 60 and 120 s


def test_a_required_key() -> None:
    """Guards against a container that is open to everybody who can reach its port."""
    with pytest.raises(InvalidRequestError, match=r"require_key: .* there is no key"):
        ServerOptions(host="0.0.0.0", require_key=True)
    for fine in ({"api_key": "k"}, {"host": "127.0.0.1"}, {"uds": "/run/penstock.sock"}):
        ServerOptions(**{"host": "0.0.0.0", "require_key": True, **fine})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.1", "127.0.0.2", "LOCALHOST", "::1", "0x7f000001"])
def test_loopback_is_known_however_it_is_written(host: str) -> None:
    """Guards against a spelling of loopback with which any web page may reach the server."""
    options = ServerOptions(host=host)
    hosts = options.hosts()
    assert hosts is not None
    assert "localhost" in hosts
    assert (f"[{host}]" if ":" in host else host.lower()) in hosts
    assert not options.is_open_to_all
    assert ServerOptions(host="0.0.0.0").hosts() is None
