"""`penstock run-batch`: OpenAI's files, errors per line, and a run that goes on after a kill."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.client.engine_client import EngineState
from penstock.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from penstock.server import batch
from penstock.server.batch import Output, read_input, run_batch
from tests.server.fakes import Behaviour, FakeEngineClient


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"/v1/completions": {"prompt": "Once"}, "/v1/responses": {"input": "Hi"}}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**given.get(url, chat), **body}}


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def run(folder: Path, lines: list[Any], client: FakeEngineClient | None = None, concurrency: int = 4) -> Any:
    """Run the lines into folder/out; return the counts and the answers by id."""
    read = read_input(write(folder / "in", lines))
    output = Output(str(folder / "out"))
    shown: list[int] = []
    try:
        counts = asyncio.run(
            run_batch(
                client or FakeEngineClient(), read, output, seed=3, max_concurrency=concurrency, advance=shown.append
            )
        )
    finally:
        output.close()
    assert sum(shown) == len(lines)
    return counts, answers(folder)


def answers(folder: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def without_names(answer: dict[str, Any]) -> Any:
    """An answer without what is new in each run."""
    body = answer["response"]["body"]
    return [body.get("choices"), body.get("usage"), body.get("seed")]


def test_each_api_and_errors(tmp_path: Path) -> None:
    """Guards against an answer that differs from the server's, and a bad line that ends the others."""
    lines = [
        request("a"),
        request("b", "/v1/chat/completions", max_tokens=5),
        request("c", "/v1/responses", max_output_tokens=5),
        request("d", tempreature=1),
        request("e", "/v1/messages"),
        request("f", stream=True),
        request("g", model="other"),
    ]
    counts, found = run(tmp_path, lines)
    assert (counts.total, counts.done, counts.failed) == (7, 7, 4)
    statuses = [found[name]["response"]["status_code"] for name in "abcdefg"]
    assert statuses == [200, 200, 200, 400, 400, 400, 404]
    assert found["a"]["response"]["body"]["object"] == "text_completion"
    assert len(found["b"]["response"]["body"]["choices"][0]["message"]["content"]) == 5
    assert found["c"]["response"]["body"]["status"] == "incomplete"
    assert found["d"]["response"]["body"]["error"]["param"] == "tempreature"
    assert all(line["error"] is None and line["id"].startswith("batch_req_") for line in found.values())


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Guards against requests that are computed twice or never, and answers that depend on where a run was killed."""
    lines = [request(f"r{k}", max_tokens=4) for k in range(12)]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    _, whole = run(tmp_path / "whole", lines)
    data = (tmp_path / "whole" / "out").read_bytes()
    for cut in (0, len(data) // 2, len(data) - 1, len(data)):
        (tmp_path / "parts" / "out").write_bytes(data[:cut])
        client = FakeEngineClient()
        counts, found = run(tmp_path / "parts", lines, client)
        assert counts.skipped == data[:cut].count(b"\n")
        assert len(client.seen) == 12 - counts.skipped
        assert {name: without_names(answer) for name, answer in found.items()} == {
            name: without_names(answer) for name, answer in whole.items()
        }


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    client = FakeEngineClient(Behaviour(failure=EngineOverloadedError("full", retry_after_s=0.01)))
    output = Output(str(tmp_path / "out"))
    lines = read_input(write(tmp_path / "in", [request("a")]))
    task = asyncio.create_task(run_batch(client, lines, output, seed=0, max_concurrency=1, advance=lambda count: None))
    while not client.seen:
        await asyncio.sleep(0.001)
    client.behaviour = Behaviour()
    counts = await task
    output.close()
    assert (counts.done, counts.failed) == (1, 0)


def test_an_engine_that_has_failed_ends_the_run(tmp_path: Path) -> None:
    """Guards against a file of thousands of errors because the engine is gone: the rest is for the next run."""
    client = FakeEngineClient(Behaviour(failure=EngineDeadError("gone")))
    client.info = client.model_info
    client.state = EngineState.FAILED
    with pytest.raises(EngineDeadError, match="run the command again"):
        run(tmp_path, [request("a"), request("b")], client)
    assert answers(tmp_path) == {}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: "),
        ([request("a"), request("b"), request("a")], "line 3: the custom_id 'a' is used twice"),
        ([{"url": "/v1/completions", "body": {}}], "line 1: .*custom_id"),
        ([{**request("a"), "body": []}], "line 1: "),
        ([""], "has no requests"),
    ],
)
def test_a_malformed_file_is_refused_before_anything_is_computed(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_input(write(tmp_path / "in", lines))


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Guards against an output that overwrites a file of the user's, or two runs that write one file."""
    for text in ("my notes\n", "my notes", '{"mine": 1}', "[" * 100_000 + "\n"):
        (tmp_path / "notes").write_text(text)
        with pytest.raises(InvalidRequestError, match="not the output of a batch"):
            Output(str(tmp_path / "notes"))
        assert (tmp_path / "notes").read_text() == text
    output = Output(str(tmp_path / "out"))
    with pytest.raises(InvalidRequestError, match="another run"):
        Output(str(tmp_path / "out"))
    output.close()
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_input(str(tmp_path / "nothing"))


@pytest.mark.parametrize("option", [read_input, Output])
def test_a_file_without_end_is_refused(option: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a device or a pipe without line breaks that fills the memory."""
    monkeypatch.setattr(batch, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "out").write_bytes(bytes((1 << 20) + 1))
    path = "/dev/zero" if option is read_input else str(tmp_path / "out")
    with pytest.raises(InvalidRequestError, match=f"{path} has a line of more than 1 MiB"):
        option(path)


def test_wrong_lines_without_end_are_refused(tmp_path: Path) -> None:
    """Guards against `yes | penstock run-batch -i /dev/stdin`, which remembered every wrong line."""
    os.mkfifo(tmp_path / "lines")
    with subprocess.Popen(["sh", "-c", 'exec yes > "$0"', str(tmp_path / "lines")]) as endless:
        with pytest.raises(InvalidRequestError, match=r"line 3: .*; \.\.\.$"):
            read_input(str(tmp_path / "lines"))
        endless.kill()


def test_answers_may_go_to_a_pipe_or_nowhere(tmp_path: Path) -> None:
    """Guards against `-o /dev/stdout | jq` and `-o /dev/null`, which were refused without a reason."""
    os.mkfifo(tmp_path / "out")
    with subprocess.Popen(["cat", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True) as reader:
        for path in (tmp_path / "out", "/dev/null"):
            output = Output(str(path))
            output.write({"custom_id": "a"})
            output.close()
        assert reader.communicate()[0] == '{"custom_id":"a"}\n'
