"""The proofs of hostile input, on small samples, and that they would notice what they look for."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from starlette.routing import Route

from penstock.client import frames
from penstock.server.app import not_built
from penstock.server.openai_requests import ChatRequest, CompletionRequest
from penstock_lab.prove import long_run
from penstock_lab.prove.attacks.attack import BODIES, error_code
from penstock_lab.prove.canary import Reading
from penstock_lab.prove.frame_attacks import FrameAttack
from penstock_lab.prove.hostile import ALLOWED_STATUSES, KINDS, BodyMaker, GeneratedInput
from penstock_lab.prove.levels import Level
from penstock_lab.prove.long_run import LongRun, body, slope
from penstock_lab.prove.mutations import Mutator
from penstock_lab.prove.proof import Outcome, Proof, Subject, Trials
from penstock_lab.prove.scripted import ScriptedServer

JSON_HEADER = ((b"content-type", b"application/json"),)


def trials_of(proof: Proof, goal: int) -> Trials:
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    options = {"threads": 1, "dtype": "float32"}
    return Trials(Subject("demo", options), outcome, goal=goal, seed=0)


def test_generated_input() -> None:
    """Guards against a body that breaks a route, and a frame that breaks, or is not counted by, an engine process."""
    trials = trials_of(GeneratedInput(), goal=1000)
    GeneratedInput().run(trials)
    assert trials.outcome.wrong == []
    assert trials.outcome.tried >= 1000
    assert 0 < trials.outcome.figures["frames_dropped_by_it"] < trials.outcome.figures["frames_to_the_engine"]


def test_generated_input_is_of_all_kinds() -> None:
    """Guards against generated bodies that are all refused at the first look, so that nothing behind it is tried."""

    async def statuses() -> dict[str, int]:
        maker, server, found = BodyMaker(Mutator(random.Random(7))), ScriptedServer("demo"), {}
        for _ in range(900):
            path, content = maker.make()
            answer = await server.call("POST", path, content, JSON_HEADER)
            assert answer.status in ALLOWED_STATUSES
            code = "served" if answer.status == 200 else error_code(answer.body)
            found[code] = found.get(code, 0) + 1
        return found

    found = asyncio.run(statuses())
    assert found.keys() >= {"served", "invalid_json", "invalid_type", "unknown_field", "missing_field", "invalid_value"}
    assert found.keys() >= {"not_implemented", "not_allowed"}


def test_every_route_that_takes_a_body_is_attacked() -> None:
    """Guards against a route that was added, and for which nothing is generated."""
    routes = [route for route in ScriptedServer("demo").app.routes if isinstance(route, Route)]
    taking = {route.path for route in routes if "POST" in (route.methods or ()) and route.endpoint is not not_built}
    without_body = {"/ping", "/status/record", "/v1/responses/{id}/cancel"}
    other_names = {"/v1/score", "/v1/rerank", "/v2/rerank"}
    assert taking - without_body - other_names == KINDS.keys() == BODIES.keys()


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, frames.ToEngine, frames.FromEngine])
def test_valid_values_are_valid(kind: Any) -> None:
    """Guards against a type that the generator does not know, whose right values are then never tried."""
    mutator, described, decoded = Mutator(random.Random(0)), inspect.type_info(kind), 0
    for _ in range(200):
        try:
            msgspec.convert(mutator.valid(described), kind, str_keys=True)
        except msgspec.ValidationError:  # of ranges that the types do not say
            continue
        except UnicodeEncodeError:  # half a character, which is a `str` to Python, but which no frame or body can carry
            continue
        decoded += 1
    assert decoded > 60


def test_the_seed_repeats_the_inputs() -> None:
    def made(seed: int) -> list[tuple[str, bytes]]:
        maker = BodyMaker(Mutator(random.Random(seed)))
        return [maker.make() for _ in range(50)]

    assert made(3) == made(3) != made(4)


def test_an_engine_that_counts_wrongly_is_noticed() -> None:
    """Guards against a comparison of counts that compares nothing."""

    async def run() -> Trials:
        trials = trials_of(GeneratedInput(), goal=1)
        attack = FrameAttack(trials, Mutator(random.Random(0)))
        await attack.start()
        attack._send(b"\xc1", obeyed=True)  # a lie
        await attack._check()
        attack._child.kill()
        await attack._check()  # begins again with a new process
        await attack.aclose()
        return trials

    wrong = asyncio.run(run()).outcome.wrong
    assert "dropped 1 frames of 0" in wrong[0]
    assert "the engine process ended with -9" in wrong[1]
    assert len(wrong) == 2


def test_a_level_that_does_not_come_back() -> None:
    """Guards against an oracle that overlooks a death, a request, a block or a file, or does not say which file."""
    before = Level(1, 0, 0, 0, ("server's pipe:[1]", "server's pipe:[1]"))
    assert before.problem(before) is None
    another = Level(1, 0, 0, 0, ("server's pipe:[1]", "server's pipe:[2]"))  # as many: it took another's place
    assert another.problem(before) is None
    more = Level(1, 0, 0, 0, ("server's /a", *before.open_files))
    assert more.problem(before) == "open files: 3 instead of 2; new are server's /a"
    files = before.open_files
    for after in (Level(2, 1, 0, 0, files), Level(1, 0, 1, 0, files), Level(1, 0, 0, 1, files)):
        assert after.problem(before) is not None


def test_readings_that_differ() -> None:
    """Guards against a canary whose tokens, or last bits, may change."""
    solo = Reading([1, 2], [-0.1, -0.2], [{"a": -0.1}, {"b": -0.2}], "ab")
    assert solo.difference(Reading([1, 2], [-0.1, -0.2], [{"a": -0.1}, {"b": -0.2}], "ab"), bits=True) is None
    last_bit = Reading([1, 2], [-0.1, -0.20000000000000004], solo.top_logprobs, "ab")
    assert solo.difference(last_bit, bits=True) is not None
    assert solo.difference(last_bit, bits=False) is None
    for other in (
        Reading([1], [-0.1], [], "a"),
        Reading([1, 3], solo.logprobs, [], "ab"),
        Reading([1, 2], [], [], "a"),
    ):
        assert solo.difference(other, bits=False) is not None


def test_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests that leave something behind: blocks, files, entries of tables."""
    monkeypatch.setattr(long_run, "PER_ROUND", 250)
    trials = trials_of(LongRun(), goal=500)
    LongRun().run(trials)
    assert trials.outcome.wrong == []
    assert trials.outcome.figures["clients_that_left"] > 0
    assert trials.outcome.figures["kills"] > 0


def test_slope() -> None:
    """Guards against a leak that the fit does not see, or one that it sees where there is none."""
    assert slope([(1000 * i, 5) for i in range(50)]) == 0
    leak = [(1000 * i, 10**8 + 20_000 * i) for i in range(50)]
    assert slope(leak) == pytest.approx(2_000_000)
    assert slope(leak[:5]) is None


def test_long_runs_requests_are_right() -> None:
    """Guards against a long run of refusals."""

    async def statuses() -> set[int]:
        server, source = ScriptedServer("demo"), random.Random(0)
        bodies = [json.dumps(body(source)).encode() for _ in range(60)]
        return {(await server.call("POST", "/v1/completions", content, JSON_HEADER)).status for content in bodies}

    assert asyncio.run(statuses()) == {200}
