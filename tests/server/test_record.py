"""POST /status/record: a bundle for whoever has the key, never with text."""

import pytest

from penstock.errors import InvalidRequestError
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client


def test_answers_with_the_bundle_and_names_the_file() -> None:
    answer = app_client().post("/status/record")
    assert answer.status_code == 200
    assert answer.content == b"a record"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["penstock-record-file"] == "penstock-1.record"  # the directory is nobody's business
    assert answer.headers["cache-control"] == "no-store"


def test_is_not_fetched_by_following_a_link() -> None:
    assert app_client().get("/status/record").status_code == 405


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (InvalidRequestError("the flight recorder is off", code="recorder_off"), 400, "recorder_off"),
        (OSError(28, "No space left on device"), 500, "record_not_written"),
    ],
)  # fmt: skip
def test_failures_are_answers(failure: Exception, status: int, code: str) -> None:
    client = FakeEngineClient()
    client.record_failure = failure
    answer = app_client(client).post("/status/record")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
