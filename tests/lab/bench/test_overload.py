"""The measurement of overload, on a server whose engine is made of letters."""

from collections.abc import Iterator

import pytest

from penstock import EngineError, EngineOverloadedError
from penstock_lab.bench import overload
from penstock_lab.bench.overload import Load
from tests.server.fakes import FakeEngineClient
from tests.server.harness import QUIET, RunningServer

CLIENTS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    started = RunningServer(FakeEngineClient(), QUIET)
    started.start()
    yield started
    started.stop()


def test_what_became_of_each_request_is_known(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against answers that are taken for broken or refused ones, or are missed, on both kinds of connections."""
    monkeypatch.setattr(overload, "WARM_UP", 0.0)  # so that on a busy machine there is something to count
    load = Load(("127.0.0.1", server.port), "fake", 0.2, 3.0)
    server.client.overload = None
    for phase in (load.closed_loop("closed", CLIENTS), load.open_loop("open", 50)):
        assert phase.admitted
        assert (phase.refused, phase.given_up, phase.broken) == (0, 0, 0)
        assert 0 < phase.p50_ttft_ms <= phase.max_ttft_ms
    server.client.overload = EngineOverloadedError("full", retry_after_s=0.01)
    polite, hammer = load.closed_loop("polite", CLIENTS), load.closed_loop("hammer", CLIENTS, 0.01)
    for phase in (polite, hammer, load.open_loop("open", 50)):
        assert phase.refused
        assert (phase.admitted, phase.given_up, phase.broken) == (0, 0, 0)
        assert phase.p50_refusal_ms > 0


def test_a_peak_of_nothing_is_said(server: RunningServer) -> None:
    """Guards against a division by zero where the phases are too short for one answer."""
    server.client.overload = EngineOverloadedError("full", retry_after_s=0.01)
    with pytest.raises(EngineError, match="increase --seconds"):
        overload.measure(Load(("127.0.0.1", server.port), "fake", 0.1, 0.1))
