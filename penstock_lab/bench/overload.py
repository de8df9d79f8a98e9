"""Measure a real server under ten times the load that it can bear: how much it finishes, and how long requests wait.

python -m penstock_lab.bench.overload [MODEL] [--seconds S] [--max-queue-wait S] [--load-format FORMAT] [--json FILE]

First, clients that send their next request when the last one has ended measure the peak, the load that the server can
bear. Then follow this rate and ten times this rate, in several ways:

    1x, 10x        requests at random moments, each on its own connection, whatever becomes of them
    10x, polite    ten times as many clients as at the peak, which wait as long as a refusal tells them to
    10x, hammer    as many clients, which ask again soon after a refusal, whatever it says

Clients and server share the machine, so the server lacks what ten times as many clients use. The engine therefore gets
one core less than the machine has. The delay of the clients' process and its share of a core are printed, so that they
are not mistaken for the server's. They take little processor time: one epoll loop over plain sockets, with requests
made beforehand, and answers that are searched instead of parsed. Each request notes how late it was sent.
"""

import argparse
import contextlib
import heapq
import json
import random
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from penstock import EngineError
from penstock_lab.bench import available_threads
from penstock_lab.bench.startup import python_process

END_OF_STREAM, END_OF_CHUNKS = b"data: [DONE]", b"0\r\n\r\n"
FIRST_TOKEN = b"data: {"
RETRY_AFTER_MS = re.compile(rb"retry-after-ms: (\d+)", re.IGNORECASE)
CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
TAIL = 32  # bytes of a stream that are kept to find its end in
INPUT_LEN, OUTPUT_LENS = 32, range(32, 97)  # lengths differ, or all rows would begin and end together
NUM_ROWS = 32
NUM_CLIENTS = NUM_ROWS + 8  # at the peak
NUM_BODIES = 1000
FACTOR = 10
WARM_UP = 0.4  # share of each phase that is not counted, because the queue has to fill first
HAMMER_S = NUM_CLIENTS * FACTOR / 600  # pause of a client that hammers, between a refusal and its next request
MAX_WAITS = 2  # a request that has not ended after this many times max_queue_wait, plus ANSWER_S, is broken
ANSWER_S = 10.0


@dataclass(slots=True)
class Request:
    """A request as its client saw it. Times are in seconds since the phase began.

    Attributes:
        due_at: when it was to be sent; sent_at: when it was sent.
        body: the index of the body that was sent.
        status: 0 if no answer came.
        answered_at: when the status line came.
        ended_at: when the answer was complete.
        retry_after_s: the pause that a refusal asked for.
    """

    due_at: float
    sent_at: float = 0.0
    body: int = 0
    status: int = 0
    answered_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    retry_after_s: float = 0.0


class Senders:
    """Sends requests when they are due, and notes what becomes of them.

    Args:
        bodies: requests with their heads, sent in turn; with "Connection: close" unless `keep_alive`.
        again: called with each request that has ended, whole or not; returns when its client sends the next one, in
            seconds since the phase began, or None. The client then keeps its connection if `keep_alive`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        bodies: list[bytes],
        again: Callable[[Request], float | None] = lambda request: None,
        *,
        keep_alive: bool = False,
    ) -> None:
        self._address, self._bodies, self._again, self._keep_alive = address, bodies, again, keep_alive
        self._epoll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._due: list[tuple[float, int, _Connection | None]] = []
        self._began = time.perf_counter()
        self._next_body = 0
        self.requests: list[Request] = []

    def now(self) -> float:
        return time.perf_counter() - self._began

    def send_at(self, due_at: float, connection: "_Connection | None" = None) -> None:
        """Plan a request."""
        heapq.heappush(self._due, (due_at, len(self.requests), connection))
        self.requests.append(Request(due_at))

    def run(self, until: float) -> None:
        """Send and receive until nothing is planned or open, or until this time."""
        self._began = time.perf_counter()
        while (self._due or self._open) and (now := self.now()) < until:
            while self._due and self._due[0][0] <= now:
                _, index, connection = heapq.heappop(self._due)
                self._send(self.requests[index], connection)
            wait_s = max(0.0, self._due[0][0] - self.now()) if self._due else until - now
            for number, _ in self._epoll.poll(min(wait_s, until - now)):
                self._receive(self._open[number])
        for connection in list(self._open.values()):
            self._close(connection)
        for _, _, waiting in self._due:
            if waiting is not None:
                waiting.sock.close()
        self._epoll.close()

    def _send(self, request: Request, connection: "_Connection | None") -> None:
        request.sent_at = self.now()
        request.body, self._next_body = self._next_body, (self._next_body + 1) % len(self._bodies)
        data = self._bodies[request.body]
        if connection is None:
            connection = _Connection(socket.socket(), request)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.setblocking(False)
            connection.sock.connect_ex(self._address)
        connection.restart(request, data)
        self._open[connection.sock.fileno()] = connection
        if self._flush(connection):
            self._epoll.register(connection.sock, select.EPOLLIN)
        else:
            self._epoll.register(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: "_Connection") -> bool:
        """Send the rest of a request. Return whether all of it is sent."""
        with contextlib.suppress(BlockingIOError, OSError):
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        return not connection.unsent

    def _receive(self, connection: "_Connection") -> None:
        if connection.unsent and self._flush(connection):
            self._epoll.modify(connection.sock, select.EPOLLIN)
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.receive(data, self.now()):
            self._end(connection, is_open=bool(data) and self._keep_alive)
        elif not data and connection.is_stale:
            self._close(connection)
            self._send(connection.request, None)
        elif not data:
            self._end(connection, is_open=False)

    def _end(self, connection: "_Connection", *, is_open: bool) -> None:
        due_at = self._again(connection.request)
        if is_open and due_at is not None:
            del self._open[connection.sock.fileno()]
            self._epoll.unregister(connection.sock)
            self.send_at(due_at, connection)
            return
        self._close(connection)
        if due_at is not None:
            self.send_at(due_at)

    def _close(self, connection: "_Connection") -> None:
        del self._open[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.sock.close()


@dataclass(slots=True)
class _Connection:
    """A connection and the request on it."""

    sock: socket.socket
    request: Request
    unsent: bytes = b""
    received: bytes = b""  # the whole of a refusal; the end of a stream
    num_sent: int = 0  # number of requests on this connection

    @property
    def is_stale(self) -> bool:
        """True if the server closed the connection between two requests. A client then sends the second one again."""
        return self.num_sent > 1 and not self.received

    def restart(self, request: Request, data: bytes) -> None:
        self.request, self.unsent, self.received = request, data, b""
        self.num_sent += 1

    def receive(self, data: bytes, now: float) -> bool:
        """Note what came. Return whether the answer is complete."""
        request = self.request
        received = self.received + data
        if not request.status and len(received) > 12:
            request.status, request.answered_at = int(received[9:12]), now
        if request.status != 200:
            self.received = received
            return self._receive_refusal(now)
        if request.first_token_at is None and FIRST_TOKEN in received:
            request.first_token_at = now
        if END_OF_STREAM in received[-2 * TAIL :] and received.endswith(END_OF_CHUNKS):
            request.ended_at = now
            return True
        self.received = received[-TAIL:]
        return False

    def _receive_refusal(self, now: float) -> bool:
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = CONTENT_LENGTH.search(head)
        if length is None or len(body) < int(length[1]):
            return False
        retry = RETRY_AFTER_MS.search(head)
        self.request.retry_after_s = int(retry[1]) / 1000 if retry else 0.0
        self.request.ended_at = now
        return True


@dataclass(slots=True)
class Phase:
    """The results of one load. Latencies are in milliseconds."""

    load: str
    seconds: float
    sent_per_s: float = 0.0
    finished_tokens_per_s: float = 0.0
    admitted: int = 0
    refused: int = 0
    given_up: int = 0  # refused after they were admitted, because the forecast was wrong
    broken: int = 0  # neither refused nor complete
    p50_ttft_ms: float = 0.0
    p99_ttft_ms: float = 0.0
    max_ttft_ms: float = 0.0
    p50_refusal_ms: float = 0.0
    p99_refusal_ms: float = 0.0
    p99_client_late_ms: float = 0.0
    client_cores: float = 0.0


class Load:
    """Sends one load after the other to a server, and sums up the results of each."""

    def __init__(self, address: tuple[str, int], model: str, seconds: float, max_queue_wait: float) -> None:
        self._address, self._seconds, self._max_queue_wait = address, seconds, max_queue_wait
        numbers = random.Random(0)
        self._lengths = [numbers.choice(OUTPUT_LENS) for _ in range(NUM_BODIES)]
        self._bodies = [_request(model, address[0], numbers, length, "close") for length in self._lengths]
        self._kept = [_request(model, address[0], numbers, length, "keep-alive") for length in self._lengths]

    def closed_loop(self, name: str, num_clients: int, after_refusal_s: float | None = None) -> Phase:
        """Keep num_clients clients busy. after_refusal_s: pause after a refusal; None: as the refusal says."""

        def again(request: Request) -> float | None:
            pause_s = 0.0 if request.status == 200 else after_refusal_s or request.retry_after_s or HAMMER_S
            due_at = (request.ended_at or senders.now()) + pause_s
            return due_at if due_at < self._seconds else None

        senders = Senders(self._address, self._kept, again, keep_alive=True)
        for index in range(num_clients):
            senders.send_at(index / num_clients * min(1.0, WARM_UP * self._seconds))
        return self._run(name, senders)

    def open_loop(self, name: str, rate: float) -> Phase:
        """Send `rate` requests per second on average, at random moments, whatever becomes of them."""
        senders, arrivals, at = Senders(self._address, self._bodies), random.Random(1), 0.0
        while (at := at + arrivals.expovariate(rate)) < self._seconds:
            senders.send_at(at)
        return self._run(name, senders)

    def _run(self, name: str, senders: Senders) -> Phase:
        began, cpu_s = time.perf_counter(), time.process_time()
        senders.run(self._seconds + MAX_WAITS * self._max_queue_wait + ANSWER_S)
        phase = self._sum_up(name, senders.requests)
        phase.client_cores = (time.process_time() - cpu_s) / (time.perf_counter() - began)
        print(line(phase), flush=True)
        return phase

    def _sum_up(self, load: str, requests: list[Request]) -> Phase:
        """Sum up a phase, without its warm-up."""
        begin = WARM_UP * self._seconds
        sent = [request for request in requests if request.sent_at >= begin]
        whole = [request for request in requests if request.status == 200 and request.ended_at is not None]
        waits = [request.answered_at - request.sent_at for request in sent if request.status == 429]
        refusals = [1e3 * wait_s for wait_s in waits if wait_s < self._max_queue_wait]
        admitted = [request for request in sent if request.status == 200]
        ttft = [1e3 * (request.first_token_at - request.sent_at) for request in admitted if request.first_token_at]
        phase = Phase(load, self._seconds)
        phase.sent_per_s = len(sent) / (self._seconds - begin)
        num_tokens = sum(
            self._lengths[request.body] * _share_within(request, begin, self._seconds) for request in whole
        )
        phase.finished_tokens_per_s = num_tokens / (self._seconds - begin)
        phase.admitted, phase.refused, phase.given_up = len(admitted), len(refusals), len(waits) - len(refusals)
        phase.broken = len(sent) - len(waits) - sum(request.ended_at is not None for request in admitted)
        phase.p50_ttft_ms, phase.p99_ttft_ms, phase.max_ttft_ms = (quantile(ttft, share) for share in (0.5, 0.99, 1.0))
        phase.p50_refusal_ms, phase.p99_refusal_ms = (quantile(refusals, share) for share in (0.5, 0.99))
        phase.p99_client_late_ms = quantile([1e3 * (request.sent_at - request.due_at) for request in sent], 0.99)
        return phase


def _share_within(request: Request, begin: float, end: float) -> float:
    """Compute the share of a whole answer's tokens that came between begin and end, as if they came evenly."""
    first, last = request.first_token_at, request.ended_at
    if first is None or last is None:
        return 0.0
    return max(0.0, min(last, end) - max(first, begin)) / max(last - first, 1e-9)


def _request(model: str, host: str, numbers: random.Random, output_len: int, connection: str) -> bytes:
    prompt = [numbers.randrange(10, 200) for _ in range(INPUT_LEN)]
    body = {"model": model, "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True  # so that a first token without text is seen as well
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Connection: {connection}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def line(phase: Phase) -> str:
    return (
        f"{phase.load:>11}: {phase.sent_per_s:.0f} requests/s sent, {phase.finished_tokens_per_s:.0f} tokens/s "
        f"finished; {phase.admitted} admitted, first token after {phase.p50_ttft_ms:.0f} ms (p99 "
        f"{phase.p99_ttft_ms:.0f}, max {phase.max_ttft_ms:.0f}); {phase.refused} refused after "
        f"{phase.p50_refusal_ms:.0f} ms (p99 {phase.p99_refusal_ms:.0f}); {phase.given_up} given up in the queue, "
        f"{phase.broken} broken; clients {phase.p99_client_late_ms:.0f} ms late (p99), "
        f"{phase.client_cores:.0%} of a core"
    )


def quantile(values: list[float], share: float) -> float:
    """Find the value below which this share of the values lies; 0 if there are no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def measure(load: Load) -> list[Phase]:
    """Measure the peak, and then the loads that follow from it.

    Raises:
        EngineError: no answer was finished at the peak.
    """
    phases = [load.closed_loop("peak", NUM_CLIENTS)]
    rate = phases[0].finished_tokens_per_s * len(OUTPUT_LENS) / sum(OUTPUT_LENS)
    if rate == 0.0:
        raise EngineError("no answer was finished at the peak: the phases are too short; increase --seconds")
    phases.append(load.open_loop("1x", rate))
    phases.append(load.open_loop(f"{FACTOR}x", FACTOR * rate))
    phases.append(load.closed_loop(f"{FACTOR}x, polite", FACTOR * NUM_CLIENTS))
    phases.append(load.closed_loop(f"{FACTOR}x, hammer", FACTOR * NUM_CLIENTS, HAMMER_S))
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a server under ten times the load that it can bear.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="length of each of the five phases")
    parser.add_argument("--max-queue-wait", type=float, default=3.0, metavar="S", help="see `penstock serve`")
    parser.add_argument("--load-format", default="auto", metavar="FORMAT", help="see `penstock serve`")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    flags = f"--port=0 --threads={max(1, available_threads() - 1)} --max-num-seqs={NUM_ROWS}".split()
    flags += [f"--max-queue-wait={args.max_queue_wait}", f"--load-format={args.load_format}"]
    with python_process("-m", "penstock", "serve", args.model, *flags, stderr=subprocess.DEVNULL) as output:
        first = output.readline()
        url = next((word for word in first.split() if word.startswith("http://")), None)
        if url is None:
            print(f"the server did not start; the first line it printed was {first!r}", file=sys.stderr)
            return 1
        host, _, port = url.removeprefix("http://").partition(":")
        try:
            phases = measure(Load((host, int(port)), first.split()[3], args.seconds, args.max_queue_wait))
        except EngineError as error:
            print(error, file=sys.stderr)
            return 1
    shares = {phase.load: phase.finished_tokens_per_s / phases[0].finished_tokens_per_s for phase in phases[2:]}
    text = ", ".join(f"{load}: {share:.1%}" for load, share in shares.items())
    print(f"of the peak, {text}; the bound of the first token is {args.max_queue_wait:g} s")
    if args.json:
        figures = {"max_queue_wait_s": args.max_queue_wait, "share_of_peak": shares}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures | {"phases": [asdict(phase) for phase in phases]}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
