"""The proof of mixed requests, on a sample, and that it would notice what it looks for."""

import asyncio
import json
import random
from collections import Counter
from unittest.mock import patch

import pytest

from penstock_lab.prove import mixed
from penstock_lab.prove.mixed import KEYS, MixedRequests, RequestMaker, Sent
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.scripted import Response, ScriptedServer


def run(goal: int) -> Outcome:
    proof = MixedRequests()
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject("demo"), outcome, goal=goal, seed=1))
    return outcome


def test_mixed_requests() -> None:
    """Guards against an answer of 5xx without a reason of its own, and against stored answers beyond their limit."""
    outcome = run(800)
    assert outcome.wrong == []
    assert outcome.tried == 800
    assert outcome.figures.keys() >= {"answers_200", "answers_400", "answers_401", "answers_403", "answers_404"}
    assert outcome.figures.keys() >= {"answers_429", "stored_most_mib"}


def test_requests_are_of_all_kinds() -> None:
    """Guards against kinds of requests that never follow, because the ids of the answers before are not found."""
    maker, found = RequestMaker(random.Random(0)), Counter[str]()
    maker.note(Sent("POST", mixed.RESPONSES, key=KEYS["free"]), Response(200, b'{"id":"resp_1","object":"response"}'))
    stream = Sent("POST", mixed.CHATS, b"{}", key=KEYS["free"])
    maker.note(stream, Response(200, b"id: chatcmpl-1:1\ndata: {}\n\nid: chatcmpl-1:2\ndata: {}\n\n"))
    for _ in range(800):
        sent = maker.make()
        found["an answer"] += sent.path.startswith(f"{mixed.RESPONSES}/resp_1")
        found["a stream"] += sent.last_event_id == "chatcmpl-1:2" and sent.path == mixed.CHATS
        found["a form"] += b"structured_outputs" in sent.body
        found["no key"] += sent.key is None
        found["a client that leaves"] += sent.leave_after is not None
    assert len(found) == 5
    assert min(found.values()) > 5


def test_what_is_wrong_is_reported() -> None:
    """Guards against a proof that finds nothing: a 500, a 503 without a reason, and memory beyond its limit."""
    sent = Sent("POST", mixed.COMPLETIONS)
    answer = Response(503, json.dumps({"error": {"code": "server_busy"}}).encode())
    assert mixed._problem(sent, answer) is None
    for status, code in ((500, "internal_error"), (503, "engine_dead"), (504, "server_busy")):
        assert mixed._problem(sent, Response(status, json.dumps({"error": {"code": code}}).encode())) is not None
    with patch.object(mixed, "GROWTH", -(2**30)):
        outcome = run(30)
    assert any("bytes are held" in what for what in outcome.wrong)


async def test_a_call_that_is_cancelled_ends() -> None:
    """Guards against a proof that SIGTERM does not end, because each of its calls returns and the next one begins."""

    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    server = ScriptedServer("demo")
    server.app = endless  # type: ignore[assignment]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await server.call("GET", "/")


def test_the_seed_repeats_the_requests() -> None:
    def made(seed: int) -> list[Sent]:
        maker = RequestMaker(random.Random(seed))
        return [maker.make() for _ in range(100)]

    assert made(3) == made(3) != made(4)
