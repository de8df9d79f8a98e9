"""A real Ray cluster of processes on this machine: the proof in small."""

import pytest

pytest.importorskip("ray", reason="an extra")

from penstock.kernels.cpu.library import load_library
from penstock.prove import ray_deaths, streams
from penstock.prove.proof import Outcome, Subject, Trials
from penstock.prove.ray_deaths import RayDeaths

pytestmark = [
    pytest.mark.skipif(load_library() is None, reason="the reference kernels do not promise the same bits"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


def test_streams_outlive_a_replica(monkeypatch):
    """Guards against a stream that is lost, repeated or changed when Ray loses the process that computes it."""
    for name, value in {"NUM_NODES": 1, "NUM_REPLICAS": 2, "NUM_STREAMS": 6, "NUM_SHARING": 12}.items():
        monkeypatch.setattr(ray_deaths, name, value)
    monkeypatch.setattr(ray_deaths, "WAYS", {ray_deaths.REPLICA: 1})
    monkeypatch.setattr(streams, "MAX_OUTPUT_TOKENS", 100)
    outcome = Outcome(RayDeaths.name, RayDeaths.promise, RayDeaths.unit)
    RayDeaths().run(Trials(Subject(), outcome, goal=1, seconds=60.0, seed=0))
    assert (outcome.tried, outcome.wrong, outcome.details["ways"]) == (1, [], {ray_deaths.REPLICA: 1})
    assert outcome.figures["streams"] >= 6
    assert outcome.figures["prefix_hits_router"] > 0.7
