"""What a request says of its turn: priority, and the time that it may take; from the body to the engine."""

import dataclasses
from typing import Any

import pytest

from penstock.client.input_processor import InputProcessor, PromptRequest
from penstock.client.open_requests import OpenRequests
from penstock.errors import InvalidRequestError
from penstock.interface.messages import EngineOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.server.keys import Account, KeyRules
from tests.fakes_engine import model_info
from tests.server.fakes import Behaviour, FakeEngineClient
from tests.server.harness import QUIET, app_client

BODY = {"prompt": "a", "max_tokens": 5}


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_the_engine_hears_of_both(path: str, policy: str) -> None:
    """Guards against a field that is read and forgotten: whoever goes by deadlines gets the time that is left."""
    fake = FakeEngineClient()
    fake.info = dataclasses.replace(fake.info, scheduling_policy=policy)
    body: dict[str, Any] = {"completions": BODY, "responses": {"input": "a"}}.get(path) or {
        "messages": [{"role": "user", "content": "a"}]
    }
    answer = app_client(fake).post(f"/v1/{path}", json=body | {"priority": 7, "timeout": 90})
    assert answer.status_code == 200, answer.text
    ((priority, timeout),) = fake.turns
    assert priority == 7
    if policy == "deadline":
        assert timeout is not None
        assert 60 < timeout <= 90
    else:
        assert timeout is None


def test_the_time_of_a_request_ends_it() -> None:
    """Guards against a time limit that only sorts: the answer is over when its own time is, or the server's."""
    fake = FakeEngineClient(Behaviour(hang_at=2))
    answer = app_client(fake, QUIET).post("/v1/completions", json=BODY | {"timeout": 0.2})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert not fake.open


@pytest.mark.parametrize(
    ("field", "value"), [("timeout", 0), ("timeout", -1), ("timeout", 1e9), ("timeout", "1"), ("priority", 1.5)]
)
def test_wrong_values_are_named(field: str, value: Any) -> None:
    """Guards against a server error, or a request that waits for ever, because of a number."""
    answer = app_client(FakeEngineClient()).post("/v1/completions", json=BODY | {field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_key_may_ask_for_less_urgency_only() -> None:
    """Guards against a key of batch jobs that calls itself urgent."""
    account = Account("batch", KeyRules("x" * 16, priority=5))
    assert [account.allowed_priority(asked) for asked in (None, -3, 4, 9)] == [5, 5, 5, 9]
    assert Account("free", KeyRules("x" * 16)).allowed_priority(2) == 2


@pytest.mark.parametrize(
    ("policy", "wish", "param"),
    [
        ("fcfs", {"priority": 1}, "priority"),
        ("fair", {"timeout": 3.0}, "timeout"),
        ("priority", {"timeout": 3.0}, "timeout"),
        ("deadline", {"priority": -1}, "priority"),
        ("priority", {"priority": 1001}, "priority"),
        ("priority", {"priority": True}, "priority"),
        ("deadline", {"timeout": 0.0}, "timeout"),
    ],
)
def test_a_wish_that_the_policy_does_not_know_is_refused(policy: str, wish: dict[str, Any], param: str) -> None:
    """Guards against a priority that is accepted and ignored."""
    inputs = InputProcessor(None, dataclasses.replace(model_info(64, 99), scheduling_policy=policy))
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process(PromptRequest([1], params=SamplingParams(), **wish))
    assert caught.value.param == param


def test_the_next_engine_hears_of_the_turn_too() -> None:
    """Guards against a request that loses its place, its key or its deadline when the engine dies: it comes back with
    its tokens, and everything else as it was."""
    inputs = InputProcessor(None, dataclasses.replace(model_info(64, 99), scheduling_policy="deadline"))
    requests, params = OpenRequests(), SamplingParams(n=2, seed=1)
    request = inputs.process(PromptRequest([1, 2], params=params, flow="key alice", timeout=5.0))
    requests.open(request)
    first, second = request.engine_requests
    assert first.flow == "key alice"
    assert first.deadline is not None
    assert first.arrived_at is not None
    assert first.deadline - first.arrived_at == pytest.approx(5.0, abs=1.0)
    assert len([*requests.add([EngineOutput(second.request_id, 0, [7])])]) == 1
    assert requests.resumed(first.request_id) == first
    assert requests.resumed(second.request_id) == dataclasses.replace(second, output_token_ids=[7])
