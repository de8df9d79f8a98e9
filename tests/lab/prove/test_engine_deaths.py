"""Samples of the proofs about deaths, and that they notice a broken promise."""

from dataclasses import replace
from random import Random

import pytest

from penstock import CompletionOutput, FinishReason, RequestOutput
from penstock.client.open_requests import OpenRequests
from penstock.kernels.cpu.library import load_library
from penstock.ranks import child_main
from penstock_lab.prove import engine_deaths, parent_deaths, streams
from penstock_lab.prove.engine_deaths import EngineDeaths, StandbyDeaths
from penstock_lab.prove.parent_deaths import ParentDeaths
from penstock_lab.prove.proof import Outcome, Subject, Trials
from penstock_lab.prove.streams import FEATURES, ReceivedStream, Stream
from tests.fakes_engine import model_info

same_bits = pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits")


@pytest.fixture(autouse=True)
def few_and_short(monkeypatch):
    monkeypatch.setattr(engine_deaths, "NUM_STREAMS", 6)
    monkeypatch.setattr(streams, "MAX_OUTPUT_TOKENS", 60)


def outcome_of(proof, goal, seed=0):
    outcome = Outcome(proof.name, proof.promise, proof.unit)
    proof.run(Trials(Subject(), outcome, goal=goal, seed=seed))
    return outcome


@same_bits
@pytest.mark.parametrize("proof", [EngineDeaths(), StandbyDeaths()])
def test_streams_outlive_engines(proof):
    outcome = outcome_of(proof, goal=2)
    assert (outcome.tried, outcome.wrong) == (2, [])
    assert outcome.figures["streams"] >= 6
    assert outcome.passed


@same_bits
def test_a_token_that_is_lost_with_the_engine_is_noticed(monkeypatch):
    """Guards against a proof that would pass whatever happened."""
    whole = OpenRequests.resumed
    sent = set()

    def forgetful(requests, request_id):
        resumed = whole(requests, request_id)
        changed = replace(resumed, prompt_token_ids=[*resumed.prompt_token_ids, 5])
        return changed if request_id in sent or sent.add(request_id) else resumed

    monkeypatch.setattr(OpenRequests, "resumed", forgetful)
    monkeypatch.setattr(engine_deaths, "DEATH_WEIGHTS", {"SIGKILL": 1})
    outcome = outcome_of(EngineDeaths(), goal=4)  # one kill may come where no stream is in its middle
    assert outcome.num_wrong > 0
    assert "undisturbed" in outcome.wrong[0]


def test_no_engine_outlives_its_server():
    outcome = outcome_of(ParentDeaths(), goal=2)
    assert (outcome.tried, outcome.wrong) == (2, [])


def output(kind, ids, text, finish_reason=None):
    return RequestOutput("a", None, [1], [CompletionOutput(0, text, ids, finish_reason=finish_reason)])


def test_every_way_of_reading_gives_the_same_answer_and_shows_what_changed():
    """Guards against a proof that compares only the last output of a stream."""
    random = Random(1)
    drawn = [Stream.at_random(random, model_info(997, 900)) for _ in range(400)]
    assert {name for stream in drawn for name in stream.features} == set(FEATURES)
    params = {stream.params.output_kind.value: stream.params for stream in drawn}
    whole, pieces = ReceivedStream(), ReceivedStream()
    for ids, text, reason in [([4], "a", None), ([4, 5], "ab", FinishReason.LENGTH)]:
        whole.add(output("cumulative", ids, text, reason), params["cumulative"])
        pieces.add(output("delta", ids[-1:], text[-1:], reason), params["delta"])
    assert whole.difference(pieces) is None
    with pytest.raises(ValueError, match="became"):
        whole.add(output("cumulative", [4, 6], "ac"), params["cumulative"])
    pieces.add(output("delta", [6], "c"), params["delta"])
    assert "token_ids" in whole.difference(pieces)


def test_an_engine_whose_client_ended_before_it_began_ends_at_once(monkeypatch):
    """Guards against an orphan of a client that died in the instant of the start: no signal would come any more."""
    ended = []
    monkeypatch.setattr(child_main.os, "getppid", lambda: 1)
    monkeypatch.setattr(child_main.os, "_exit", ended.append)
    monkeypatch.setattr(child_main.ctypes, "CDLL", lambda name: parent_deaths)  # prctl would be this process's own
    monkeypatch.setattr(parent_deaths, "prctl", lambda *arguments: 0, raising=False)
    child_main.die_with(4321)
    assert ended == [child_main.EXIT_CLIENT_GONE]
