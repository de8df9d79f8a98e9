"""Measure a real server under ten times the load that it can bear: does it finish as much, and who waits how long?

python -m penstock.bench.overload [MODEL] [--seconds S] [--max-queue-wait S] [--json FILE]

First clients that send their next request when the last one has ended show what the server can bear, its peak. Then
requests arrive at random moments, at this rate and at ten times it. Clients and server share the machine, so what ten
times as many clients take of it is missing to the server: the engine is given one core less than there are.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import uvloop

from penstock.bench.startup import python_process
from penstock.config import available_threads

INPUT_LEN, OUTPUT_LEN = 32, 64
NUM_ROWS = 32
FACTORS = (1, 10)
WARM_UP = 0.4  # of each phase: the queue has to fill first
AFTER_REFUSAL_S = 0.1
DONE = b"data: [DONE]"


@dataclass(slots=True)
class Request:
    """A request as its client saw it; times in seconds since the phase began."""

    sent_at: float
    status: int = 0
    answered_at: float = 0.0  # the status line
    first_token_at: float | None = None
    ended_at: float | None = None  # with the whole answer


@dataclass(slots=True)
class Phase:
    """What one load gave. Latencies in milliseconds."""

    load: str
    seconds: float
    sent_per_s: float = 0.0
    finished_tokens_per_s: float = 0.0
    refused: int = 0
    given_up: int = 0  # refused after they were let in: the forecast was wrong
    broken: int = 0  # neither refused nor whole
    p50_ttft_ms: float = 0.0
    p99_ttft_ms: float = 0.0
    max_ttft_ms: float = 0.0
    p50_refusal_ms: float = 0.0
    p99_refusal_ms: float = 0.0


class Client:
    """Sends requests and notes what becomes of them; one connection each."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._address = (host, port)
        self._model = model
        self._random = random.Random(0)
        self.began = time.perf_counter()
        self.requests: list[Request] = []

    def restart(self) -> None:
        """Begin a new phase."""
        self.began, self.requests = time.perf_counter(), []

    def now(self) -> float:
        return time.perf_counter() - self.began

    def _body(self) -> bytes:
        prompt = [self._random.randrange(10, 200) for _ in range(INPUT_LEN)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
        return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data

    async def send(self) -> Request:
        """Send a request and read its answer."""
        data = self._body()
        request = Request(self.now())
        self.requests.append(request)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                writer.write(data)
                await self._read(request, reader)
            finally:
                writer.close()
        return request

    async def _read(self, request: Request, reader: asyncio.StreamReader) -> None:
        head = await reader.readline()
        request.answered_at = self.now()
        request.status = int(head.split()[1]) if head else 0
        tail = b""
        while part := await reader.read(65536):
            if request.first_token_at is None and b"data: {" in part:
                request.first_token_at = self.now()
            tail = (tail + part)[-64:]
        if request.status == 200 and DONE in tail:
            request.ended_at = self.now()


async def closed_loop(client: Client, seconds: float, concurrency: int) -> None:
    """Keep so many requests under way."""

    async def one_after_the_other() -> None:
        while client.now() < seconds:
            if (await client.send()).status != 200:
                await asyncio.sleep(AFTER_REFUSAL_S)

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))


async def open_loop(client: Client, seconds: float, rate: float) -> None:
    """Send requests at random moments, so many per second on average, whatever becomes of them."""
    arrivals = random.Random(1)
    at, tasks = 0.0, []
    while (at := at + arrivals.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, at - client.now()))
        tasks.append(asyncio.create_task(client.send()))
    await asyncio.gather(*tasks)


def summary(load: str, seconds: float, max_queue_wait: float, requests: list[Request]) -> Phase:
    """Return the figures of a phase, without its warm-up."""
    begin = WARM_UP * seconds
    sent = [request for request in requests if request.sent_at >= begin]
    finished = sum(begin <= request.ended_at < seconds for request in requests if request.ended_at is not None)
    waits = [request.answered_at - request.sent_at for request in sent if request.status == 429]
    refusals = [1e3 * wait_s for wait_s in waits if wait_s < max_queue_wait]
    admitted = [request for request in sent if request.status == 200]
    ttft = [1e3 * (request.first_token_at - request.sent_at) for request in admitted if request.first_token_at]
    phase = Phase(load, seconds)
    phase.sent_per_s = len(sent) / (seconds - begin)
    phase.finished_tokens_per_s = OUTPUT_LEN * finished / (seconds - begin)
    phase.refused, phase.given_up = len(refusals), len(waits) - len(refusals)
    phase.broken = len(sent) - len(waits) - sum(request.ended_at is not None for request in admitted)
    phase.p50_ttft_ms, phase.p99_ttft_ms, phase.max_ttft_ms = (quantile(ttft, share) for share in (0.5, 0.99, 1.0))
    phase.p50_refusal_ms, phase.p99_refusal_ms = (quantile(refusals, share) for share in (0.5, 0.99))
    return phase


def quantile(values: list[float], share: float) -> float:
    """Return the value below which so large a share lies; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def measure(client: Client, seconds: float, max_queue_wait: float) -> list[Phase]:
    """Measure the peak, and then each of FACTORS times the rate of the peak."""
    await closed_loop(client, seconds, NUM_ROWS + 8)
    phases = [summary("peak", seconds, max_queue_wait, client.requests)]
    rate = phases[0].finished_tokens_per_s / OUTPUT_LEN
    for factor in FACTORS:
        client.restart()
        await open_loop(client, seconds, factor * rate)
        phases.append(summary(f"{factor}x", seconds, max_queue_wait, client.requests))
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a server under ten times the load that it can bear.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each of three phases")
    parser.add_argument("--max-queue-wait", type=float, default=3.0, metavar="S", help="as of `penstock serve`")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    threads = max(1, available_threads() - 1)
    flags = f"--port=0 --threads={threads} --max-num-seqs={NUM_ROWS} --max-queue-wait={args.max_queue_wait}".split()
    with python_process("-m", "penstock", "serve", args.model, *flags, stderr=subprocess.DEVNULL) as output:
        line = output.readline()
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            print(f"the server did not start; the first line it printed was {line!r}", file=sys.stderr)
            return 1
        host, _, port = url.removeprefix("http://").partition(":")
        client = Client(host, int(port), line.split()[3])
        phases = uvloop.run(measure(client, args.seconds, args.max_queue_wait))
    for phase in phases:
        print(
            f"{phase.load:>4}: {phase.sent_per_s:.0f} requests/s sent, {phase.finished_tokens_per_s:.0f} tokens/s "
            f"finished; {phase.refused} refused after {phase.p50_refusal_ms:.0f} ms (p99 {phase.p99_refusal_ms:.0f}), "
            f"{phase.given_up} given up in the queue, {phase.broken} broken; first token after "
            f"{phase.p50_ttft_ms:.0f} ms (p99 {phase.p99_ttft_ms:.0f}, max {phase.max_ttft_ms:.0f})"
        )
    share = phases[-1].finished_tokens_per_s / phases[0].finished_tokens_per_s
    print(f"{phases[-1].load}: {share:.1%} of the peak; the bound of the first token is {args.max_queue_wait:g} s")
    if args.json:
        figures = {"max_queue_wait_s": args.max_queue_wait, "share_of_peak": share}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures | {"phases": [asdict(phase) for phase in phases]}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
