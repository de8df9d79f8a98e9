"""Runs a file of OpenAI's batch requests through the application, as if each line were an HTTP request to the server.

Each line of the output file is a finished request, so a run that was killed can continue from that file alone: requests
whose ids are in it are not computed again, and a last line that the kill cut off is removed. A request without a seed
gets one derived from the engine's seed and its line number, so that it has the same answer in every run.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any
from uuid import uuid4

import httpx
import msgspec

from penstock.client.engine_client import EngineClient, EngineState
from penstock.client.input_processor import assigned_seed
from penstock.errors import EngineDeadError, invalid
from penstock.server.app import create_app
from penstock.server.options import ServerOptions

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")
MAX_SHOWN = 3  # number of wrong lines that an error names
MAX_LINE_BYTES = 2**28  # of a line of the input or output file; a device or a pipe may have no end


class Line(msgspec.Struct, frozen=True):
    """A line of the input file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


FIRST_BYTES = b'{"id":"batch_req_'  # of each line of an output


@dataclass(slots=True)
class Counts:
    """The progress of a run, in requests.

    Attributes:
        skipped: requests that were already in the output file.
        failed: requests whose answer is an error.
    """

    total: int = 0
    skipped: int = 0
    done: int = 0
    failed: int = 0


def read_input(path: str) -> list[Line]:
    """Read the lines of an input file. Raise InvalidRequestError if a line is malformed or an id occurs twice.

    Reading ends with the first wrong lines, so that no wrong file is read without end.
    """
    lines: list[Line] = []
    wrong: list[str] = []
    seen: set[str] = set()
    decoder = msgspec.json.Decoder(Line)
    with _reading(path, "input_file") as file:
        for number, text in enumerate(_lines(file, path, "input_file"), 1):
            if len(wrong) > MAX_SHOWN:
                break
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                wrong.append(f"line {number}: {error}")
                continue
            if line.custom_id in seen:
                wrong.append(f"line {number}: the custom_id {ascii(line.custom_id)[:60]} is used twice")
            seen.add(line.custom_id)
            lines.append(line)
    if wrong:
        shown = "; ".join(wrong[:MAX_SHOWN]) + ("; ..." if len(wrong) > MAX_SHOWN else "")
        raise invalid("input_file", f"{path}: {shown}")
    if not lines:
        raise invalid("input_file", f"{path} has no requests")
    return lines


@contextlib.contextmanager
def _reading(path: str, param: str) -> Iterator[IO[bytes]]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise invalid(param, f"{path}: {error.strerror}") from error


def _lines(file: IO[bytes], path: str, param: str) -> Iterator[bytes]:
    """Yield the lines of a file. Raise InvalidRequestError for a line that is too long to be a request or an answer."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise invalid(param, f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB")
        yield line


class Output:
    """The output file. Raises InvalidRequestError if the file exists and is not the output of a batch.

    What is no regular file, such as /dev/stdout, is only written to: a run that continues cannot read it.

    Attributes:
        done: the answers found when the file was opened: custom_id -> whether the request succeeded.
    """

    def __init__(self, path: str) -> None:
        self.done: dict[str, bool] = {}
        try:
            self._is_regular = not os.path.exists(path) or os.path.isfile(path)
            mode = "a+b" if self._is_regular else "wb"
            self._file: IO[bytes] = open(path, mode)  # noqa: SIM115  # open during the run
        except OSError as error:
            raise invalid("output_file", f"{path}: {error.strerror}") from error
        if not self._is_regular:
            return
        try:
            self._lock(path)
            end = self._read(path)
            self._file.truncate(end)  # remove a line that a kill has cut off
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: str) -> None:
        import fcntl  # not on Windows

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise invalid("output_file", f"{path}: another run is writing it") from None

    def _read(self, path: str) -> int:
        """Record the ids of the complete lines, and return the offset at which the last of them ends."""
        end = 0
        self._file.seek(0)
        for text in _lines(self._file, path, "output_file"):
            is_cut = not text.endswith(b"\n")
            if is_cut and text.startswith(FIRST_BYTES[: len(text)]):
                break
            try:
                line = json.loads(text)
                self.done[line["custom_id"]] = line["response"]["status_code"] == 200
            except (ValueError, KeyError, TypeError, RecursionError):
                message = f"{path} exists, and is not the output of a batch; give another name"
                raise invalid("output_file", message) from None
            end += len(text)
        return end

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and flush it to the operating system."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Sync the file to disk and close it."""
        with self._file:
            if self._is_regular:
                os.fsync(self._file.fileno())


async def run_batch(
    client: EngineClient, lines: list[Line], output: Output, *, seed: int, max_concurrency: int,
    advance: Callable[[int], None],
) -> Counts:  # fmt: skip
    """Compute the requests that are not in the output yet, and write their answers as they come.

    Args:
        seed: the engine's seed, for requests without one.
        max_concurrency: number of requests that are open at the same time.
        advance: called with the number of requests finished since the last call.

    Raises:
        EngineDeadError: the engine cannot be restarted; the finished requests are in the output.
        OSError: the output cannot be written.
    """
    todo = [(number, line) for number, line in enumerate(lines) if line.custom_id not in output.done]
    failed = [line for line in lines if output.done.get(line.custom_id) is False]
    counts = Counts(total=len(lines), skipped=len(lines) - len(todo), failed=len(failed))
    advance(counts.skipped)
    app = create_app(client, ServerOptions(access_log=False, max_body_bytes=2**30, max_inflight_body_bytes=2**40))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http:
        queue = iter(todo)

        async def work() -> None:
            for number, line in queue:  # all tasks share `queue`, and each takes the next line
                status, answer = await _answer(http, client, line, assigned_seed(seed, number))
                output.write({"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, **answer})
                counts.done += 1
                counts.failed += status != 200
                advance(1)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_concurrency, len(todo))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:  # the first failure has cancelled the other tasks
            raise errors.exceptions[0] from None
    return counts


async def _answer(http: httpx.AsyncClient, client: EngineClient, line: Line, seed: int) -> tuple[int, dict[str, Any]]:
    """Send a request. Return its status, and the fields that its answer adds to the output line."""
    problem = _problem(line)
    if problem is not None:
        error = {"message": problem, "type": "invalid_request_error", "param": None, "code": "invalid_batch_line"}
        return 400, _response(400, "", {"error": error})
    body = msgspec.json.encode(_settled(line, seed))
    while True:
        answer = await http.post(line.url, content=body, headers={"Content-Type": "application/json"})
        if answer.status_code == 503 and client.status().state is EngineState.FAILED:
            raise EngineDeadError("the engine has failed; run the command again to go on with the rest")
        if answer.status_code not in (429, 503):
            return answer.status_code, _response(answer.status_code, answer.headers["x-request-id"], answer.json())
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


def _problem(line: Line) -> str | None:
    if line.method != "POST" or line.url not in URLS:
        return f"{ascii(line.method)[:20]} {ascii(line.url)[:100]}: a batch may contain only POST to {', '.join(URLS)}"
    for name in ("stream", "background"):
        if line.body.get(name):
            return f"{name}: not allowed in a batch"
    return None


def _settled(line: Line, seed: int) -> dict[str, Any]:
    """Add a seed to the body; responses are not stored. A list of prompts gets its seeds from the engine."""
    prompt = line.body.get("prompt")
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    body = line.body if line.body.get("seed") is not None or is_list else {**line.body, "seed": seed}
    return {"store": False, **body} if line.url == "/v1/responses" else body


def _response(status: int, request_id: str, body: Any) -> dict[str, Any]:
    return {"response": {"status_code": status, "request_id": request_id, "body": body}, "error": None}
