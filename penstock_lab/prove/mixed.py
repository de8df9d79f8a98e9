"""Proof that no mixture of requests is answered with an error of the server's own, or takes more than it may have.

Requests of all kinds come from several keys, whose limits differ: generated bodies, forms of answers, stored responses,
responses in the background and streams that are fetched, continued, cancelled and deleted by their owners and by
others, the routes that only report, and clients that leave. The application is called in this process, with the real
scheduler; forms are compiled in a real text process.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import uvloop

from penstock.errors import PenstockError
from penstock_lab.prove.attacks.attack import BODIES, error_code, judge
from penstock_lab.prove.hostile import ALLOWED_STATUSES, JSON_HEADER, BodyMaker
from penstock_lab.prove.levels import memory_bytes
from penstock_lab.prove.long_run import MAX_MIXED_SLOPE, judge_slope
from penstock_lab.prove.mutations import BAD_VALUES, Mutator
from penstock_lab.prove.proof import Trials
from penstock_lab.prove.scripted import OPTIONS, Response, ScriptedServer

MIB = 2**20
KEPT_BYTES, BODY_BYTES = 8 * MIB, 2 * MIB  # of the server, so small that requests run into both limits
GROWTH = 48 * MIB  # of this process beyond both, after the first round
RULES: dict[str, str] = {
    "admin": "admin = true",
    "free": "",
    "tokens": "tokens_per_minute = 3000",
    "requests": "requests_per_minute = 600",
    "concurrent": "max_concurrent_requests = 2",
    "small": "max_choices = 2\nmax_tokens = 3",
}
KEYS = {name: f"sk-{name}-0123456789abcdef" for name in RULES}
OWN_REASONS = {503: ("server_busy",), 504: ("request_timeout",)}  # statuses of 5xx, and the codes that explain them
PER_ROUND, AT_ONCE = 1000, 24
MAX_IDS = 400  # of stored answers that are asked for again
SETTLE_S = 60.0
ANSWER_S = 60.0
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
GETS = (
    "/", "/health", "/live", "/ready", "/ping", "/version", "/status", "/status/requests", "/metrics", "/openapi.json",
    "/docs", "/v1/models", "/v1/models/demo", "/v1/cache/pin", "/page/settings", "/v1/files", "/x" * 50,
)  # fmt: skip
TEXT_FORMS: tuple[dict[str, Any], ...] = (  # of custom tools: of responses, of chats
    {"syntax": "regex", "definition": "[a-z]{1,9}"}, {"syntax": "lark", "definition": 'start: "a"'},
    {"grammar": {"syntax": "regex", "definition": "[a-z]{1,9}"}}, {"grammar": {"syntax": "regex", "definition": "("}},
)  # fmt: skip
WORDS = ("a", "ab", "one", "two", "Hi", "x" * 40)


@dataclass(slots=True)
class Sent:
    """A request: what is sent, with which key (None: none), and after how many pieces its client leaves."""

    method: str
    path: str
    body: bytes = b""
    key: str | None = None
    leave_after: int | None = None
    last_event_id: str | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        found = list(JSON_HEADER)
        if self.key is not None:
            found.append((b"authorization", b"Bearer " + self.key.encode()))
        if self.last_event_id is not None:
            found.append((b"last-event-id", self.last_event_id.encode(errors="replace")))
        return found


class RequestMaker:
    """Draws requests, and remembers the answers that can be asked for again."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._mutator = Mutator(random)
        self._bodies = BodyMaker(self._mutator)
        self._known: deque[tuple[str, str]] = deque(maxlen=MAX_IDS)  # ids of responses, and their keys
        self._streams: deque[tuple[Sent, str]] = deque(maxlen=MAX_IDS)  # streams, and their last event ids
        self._kinds = {
            self._generated: 45, self._with_form: 12, self._response: 14, self._stream: 8, self._again: 10,
            self._continued: 4, self._report: 7,
        }  # fmt: skip

    def make(self) -> Sent:
        (kind,) = self._random.choices(tuple(self._kinds), tuple(self._kinds.values()))
        sent = kind()
        if sent.key is None and self._random.random() < 0.97:
            sent.key = self._random.choice(tuple(KEYS.values()))
        if sent.leave_after is None and self._random.random() < 0.08:
            sent.leave_after = self._random.randrange(5)
        return sent

    def note(self, sent: Sent, answer: Response) -> None:
        """Remember an answer that can be asked for again."""
        if answer.status != 200 or sent.method != "POST" or sent.key is None:
            return
        if sent.path == RESPONSES and (found := answer.body.find(b'"id":"resp_')) >= 0:
            self._known.append((answer.body[found + 6 :].split(b'"', 1)[0].decode(), sent.key))
        elif b"\nid: " in answer.body or answer.body.startswith(b"id: "):
            last = answer.body.rpartition(b"id: ")[2].split(b"\n", 1)[0]
            self._streams.append((replace(sent, leave_after=None), last.decode(errors="replace")))

    def _generated(self) -> Sent:
        path, body = self._bodies.make()
        return Sent("POST", path, body)

    def _with_form(self) -> Sent:
        random, path = self._random, self._random.choice((COMPLETIONS, CHATS, RESPONSES))
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        more: dict[str, Any]
        if path != COMPLETIONS and random.random() < 0.3:
            function = {"name": "f", "parameters": {"type": "object", **self._schema(1)}, "strict": True}
            text = {"type": "grammar", **random.choice(TEXT_FORMS)} if random.random() < 0.5 else {"type": "text"}
            kind, value = random.choice((("function", function), ("custom", {"name": "f", "format": text})))
            tool = {"type": kind, **(value if path == RESPONSES else {kind: value})}
            more = {"tools": [tool], "tool_choice": random.choice(("auto", "required"))}
        else:
            form: dict[str, Any] = random.choice((
                {"json": self._schema()}, {"json": self._schema()}, {"regex": random.choice((
                    "[a-z]+", "(a|b)*c", "a{1,50}", "(ab){20}", "[unclosed", "(a+)+b", "x" * random.randrange(40)))},
                {"choice": random.sample(WORDS, random.randrange(len(WORDS)))}, {"json_object": True},
                {"grammar": random.choice(('start: "a"', 'start: "a" start | "b"', "start:", "(" * 300))},
            ))  # fmt: skip
            more = {"structured_outputs": form}
        body = {**BODIES[path], limit: random.randrange(1, 4), **more}
        if random.random() < 0.1:
            body = self._mutator.nearly(body)
        return Sent("POST", path, self._mutator.json(body))

    def _schema(self, depth: int = 0) -> dict[str, Any]:
        """Draw a schema. Few are new, because compiling takes milliseconds; some cannot be followed."""
        random = self._random
        kind = random.randrange(8 if depth < 3 else 4)
        if kind < 4:
            return random.choice((
                {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1, None]}, {"const": "x"},
                {"type": "number", "minimum": 3}, {"type": "string", "maxLength": 5}, {"$ref": "#"},
                {"type": "strin"}, {"pattern": "a+"}, {"$ref": "#/properties/a"}, {"not": {}},
            ))  # fmt: skip
        if kind == 4:
            return {"type": "array", "items": self._schema(depth + 1), "maxItems": random.randrange(4)}
        if kind == 5:
            return {"anyOf": [self._schema(depth + 1) for _ in range(2)]}
        fields = {name: self._schema(depth + 1) for name in random.sample("abc", random.randrange(1, 3))}
        return {"type": "object", "properties": fields, "required": list(fields)[:1]}

    def _response(self) -> Sent:
        random = self._random
        body: dict[str, Any] = {"input": "Hi", "max_output_tokens": random.randrange(1, 12)}
        options: dict[str, Any] = {
            "background": True, "stream": True, "store": random.random() < 0.7, "temperature": 0,
            "metadata": {"k" * random.randrange(70): "v" * random.randrange(540)},
            "instructions": "word " * random.randrange(8),
            "input": random.choice(("x" * random.randrange(1, 300), [{"role": "user", "content": "a"}] * 5)),
        }  # fmt: skip
        body |= {name: value for name, value in options.items() if random.random() < 0.4}
        return Sent("POST", RESPONSES, self._mutator.json(body))

    def _stream(self) -> Sent:
        random = self._random
        path = random.choice((COMPLETIONS, CHATS))
        options = {"resumable": True, "n": random.randrange(1, 4), "stop": ["e"], "logprobs": path == CHATS or 2}
        chosen = {name: value for name, value in options.items() if random.random() < 0.6}
        body = {**BODIES[path], "stream": True, "max_tokens": random.randrange(1, 30), **chosen}
        return Sent("POST", path, self._mutator.json(body), leave_after=random.choice((None, 0, 1, 2, 5)))

    def _again(self) -> Sent:
        """Fetch, continue, cancel or delete a response: mostly one's own, sometimes another's or none."""
        random = self._random
        answer_id, key = random.choice(self._known) if self._known else ("resp_x", KEYS["free"])
        if random.random() < 0.2:
            key = random.choice(tuple(KEYS.values()))
        if random.random() < 0.1:
            answer_id = random.choice(("resp_", "x" * 300, "%00", "..%2f", "resp_" + "0" * 32))
        path = f"{RESPONSES}/{answer_id}"
        after = random.choice(("", "&starting_after=0", "&starting_after=3", "&starting_after=-1", "&starting_after=x"))
        listed = random.choice(("", "?limit=1", "?order=asc&limit=2", "?after=x", "?include[]=a"))
        return random.choice((
            Sent("GET", path, key=key), Sent("GET", f"{path}?stream=true{after}", key=key),
            Sent("GET", f"{path}/input_items{listed}", key=key),
            Sent("POST", f"{path}/cancel", b"{}", key), Sent("DELETE", path, key=key),
        ))  # fmt: skip

    def _continued(self) -> Sent:
        """Continue a stream, with the id of its last event or a damaged one."""
        if not self._streams:
            return self._stream()
        random = self._random
        (sent, last), pick = random.choice(self._streams), random.random()
        if pick < 0.3:
            last = random.choice((last + ".5", last[:-3], ":", f"{last.partition(':')[0]}:0", "x" * 200))
        elif pick < 0.5:
            return Sent("GET", f"{sent.path}/{last.partition(':')[0]}?stream=true", key=sent.key, last_event_id=last)
        return replace(sent, last_event_id=last)

    def _report(self) -> Sent:
        random = self._random
        key = random.choice((None, "", "sk-wrong", *KEYS.values()))
        if random.random() < 0.15:
            wrong = str(random.choice(BAD_VALUES))[:80].encode("ascii", "replace").decode()
            return Sent(random.choice(("GET", "DELETE", "POST")), f"/{random.choice(('v1/', ''))}{wrong}", key=key)
        return Sent(random.choice(("GET", "GET", "GET", "HEAD", "POST")), random.choice(GETS), key=key)


class MixedRequests:
    """Sends mixed requests of several keys to the application, and watches its memory every second."""

    name: ClassVar[str] = "mixed-requests"
    promise: ClassVar[str] = (
        "Whatever clients mix, only their own time and a full server end in a 5xx; memory keeps its limits"
    )
    unit: ClassVar[str] = "requests"
    goal: ClassVar[int] = 1_000_000
    weight: ClassVar[float] = 2.0

    def run(self, trials: Trials) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the command serves
            runner.run(self._run(trials))

    async def _run(self, trials: Trials) -> None:
        maker = RequestMaker(trials.random)
        statuses: Counter[int] = Counter()
        with _files() as (keys, journal):
            options = replace(
                OPTIONS, api_key_file=keys, journal=journal, max_kept_bytes=KEPT_BYTES,
                max_inflight_body_bytes=BODY_BYTES, resume_grace_s=5.0, response_retention_s=30.0,
            )  # fmt: skip
            server = ScriptedServer(trials.subject.model, options, compiles_forms=True)
            server.app.state.context.kept.start()
            memory = _Memory(trials, server)
            while trials.go_on():
                await self._round(trials, server, maker, statuses)
                memory.note_round()
            await memory.report()
            await _settle(trials, server)
            await server.app.state.context.kept.close()
            await server.client.shutdown()
        for status, count in sorted(statuses.items()):
            trials.figure(f"answers_{status}", count)

    async def _round(
        self, trials: Trials, server: ScriptedServer, maker: RequestMaker, statuses: "Counter[int]"
    ) -> None:
        left = min(PER_ROUND, trials.goal - trials.outcome.tried)

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                sent = maker.make()
                problem = None
                try:
                    async with asyncio.timeout(ANSWER_S):
                        answer = await server.call(
                            sent.method, sent.path, sent.body, sent.headers, leave_after=sent.leave_after
                        )
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                else:
                    statuses[answer.status] += 1
                    maker.note(sent, answer)
                    if sent.leave_after is None or answer.status >= 500:
                        problem = _problem(sent, answer)
                if problem is not None:
                    trials.wrong(f"{sent.method} {sent.path} {sent.body[:500]!r} of {sent.key}: {problem}")
                trials.tried()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        try:
            server.client.engine.check_integrity()
        except PenstockError as error:
            trials.wrong(str(error))


def _problem(sent: Sent, answer: Response) -> str | None:
    if (codes := OWN_REASONS.get(answer.status)) is not None:
        code = error_code(answer.body) if answer.body else None
        return None if code in codes else f"{answer.status} with the code {code}"
    if sent.method == "HEAD" or (answer.status >= 400 and not answer.body):
        return None if answer.status < 500 else f"{answer.status}"
    if b'code":"internal_error"' in answer.body:
        return f"an error of the server's own in a stream: {answer.body[-300:]!r}"
    return judge(answer.status, answer.body, (*ALLOWED_STATUSES, 401, 403))


class _Memory:
    """Reads every second what the server holds, and complains of a limit that it passes."""

    def __init__(self, trials: Trials, server: ScriptedServer) -> None:
        self._trials = trials
        self._context = server.app.state.context
        self._task: asyncio.Task[None] | None = None
        self._first = self._most = self._most_kept = self._readings = 0
        self._points: list[tuple[int, int]] = []  # requests and bytes after each round

    def note_round(self) -> None:
        """Note the memory after a round. That after the first is the level from which it grows."""
        self._points.append((self._trials.outcome.tried, memory_bytes(os.getpid())))
        if self._task is None:
            self._first = memory_bytes(os.getpid())
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self._read()
            await asyncio.sleep(1.0)

    def _read(self) -> None:
        now, kept = memory_bytes(os.getpid()), self._context.kept.held_bytes
        limit = self._first + KEPT_BYTES + BODY_BYTES + GROWTH
        for what, most, before in ((now, limit, self._most), (kept, KEPT_BYTES, self._most_kept)):
            if what > most and what > before:
                self._trials.wrong(f"after {self._trials.outcome.tried} requests: {what} bytes are held, of {most}")
        self._most, self._most_kept = max(now, self._most), max(kept, self._most_kept)
        self._readings += 1

    async def report(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._read()
        judge_slope(self._trials, "memory", self._points, MAX_MIXED_SLOPE)
        self._trials.figure("memory_readings", self._readings)
        self._trials.figure("memory_first_mib", self._first / MIB)
        self._trials.figure("memory_most_mib", self._most / MIB)
        self._trials.figure("stored_most_mib", self._most_kept / MIB)


async def _settle(trials: Trials, server: ScriptedServer) -> None:
    """Check that everything is given back once all calls have ended."""
    context, end = server.app.state.context, time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        open_calls = {name: context.keys.named(name).num_open for name in RULES}
        left = server.client.leftovers()
        if left is None and not any(open_calls.values()) and not context.kept.unfinished:
            return
        await asyncio.sleep(0.05)
    trials.wrong(f"{SETTLE_S:.0f} s after the last request: {left}; requests of keys: {open_calls}")


@contextlib.contextmanager
def _files() -> Iterator[tuple[str, str]]:
    """Name a file of keys and one for the journal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_text("".join(f'[{name}]\nkey = "{KEYS[name]}"\n{rules}\n' for name, rules in RULES.items()))
        yield str(path), f"{folder}/journal"
