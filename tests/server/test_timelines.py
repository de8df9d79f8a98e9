"""Why was it slow: timelines in answers, in /status/requests and as traces."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.errors import InvalidRequestError
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.server.timelines import MAX_CALLS, Tracing
from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client

BODY = {"prompt": "xyz", "max_tokens": 4, "seed": 1, "timeline": True}


class Collector:
    """An OpenTelemetry collector on loopback that keeps what it gets."""

    def __init__(self, status: int = 200) -> None:
        spans: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.spans = spans
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def total(choice: dict[str, Any]) -> float:
    return sum(part["duration_s"] for part in choice["parts"])


def test_answer_has_it_where_asked_and_status_by_either_id() -> None:
    """Guards against parts that do not sum to the wall time, and against prompts in /status."""
    http = app_client()
    answer = http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"}).json()
    assert "timeline" not in http.post("/v1/completions", json=BODY | {"timeline": False}).json()
    shown = answer["timeline"]
    assert total(shown["choices"][0]) == pytest.approx(shown["wall_s"], rel=1e-9)
    for wanted in ("mine", answer["id"]):
        kept = http.get(f"/status/requests/{wanted}")
        assert kept.json()["state"] == "ended"
        assert total(kept.json()["choices"][0]) == pytest.approx(kept.json()["wall_s"], rel=1e-9)
        assert BODY["prompt"] not in kept.text  # no hexadecimal digits, as ids have
    assert [call["id"] for call in http.get("/status/requests").json()["data"]][-1] == answer["id"]
    assert http.get("/status/requests/none").json()["error"]["code"] == "request_not_found"
    refused = http.post("/v1/completions", json=BODY | {"stream": True, "resumable": True})
    assert refused.json()["error"]["param"] == "timeline"
    events = http.post("/v1/completions", json=BODY | {"stream": True}).text.split("\n\n")
    assert '"choices":[]' in events[-3]
    assert '"timeline":{' in events[-3]


def test_table_is_bounded() -> None:
    """Guards against a table that grows with every request."""
    http = app_client()
    for _ in range(3):
        http.post("/v1/completions", json=BODY)
    table = http.app.state.context.timelines  # type: ignore[attr-defined]
    calls = table.visible_to(None)
    for number in range(MAX_CALLS):
        calls[0].id = f"cmpl-{number}"
        table.add(calls[0])
    assert len(table.visible_to(None)) == MAX_CALLS


def test_spans_are_those_of_the_timeline(collector: Collector) -> None:
    """Guards against traces that begin at another time, lose their parent or have gaps."""
    app = app_client(options=ServerOptions(port=0, access_log=False, otlp_traces_endpoint=collector.url))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    shown = app.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{trace}-{parent}-01"}).json()
    app.app.state.tracing.close()  # type: ignore[attr-defined]
    [root] = [span for span in collector.spans if span.parent_span_id.hex() == parent]
    parts = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert len(parts) + 1 == len(collector.spans)
    assert {span.trace_id.hex() for span in collector.spans} == {trace}
    assert [span.name for span in parts] == [part["kind"] for part in shown["timeline"]["choices"][0]["parts"]]
    assert abs(root.start_time_unix_nano - parts[0].start_time_unix_nano) < 1000
    assert abs(root.end_time_unix_nano - parts[-1].end_time_unix_nano) < 1000
    attributes = {item.key: item.value for item in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == shown["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4


def test_a_collector_that_fails_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against requests that fail, or a log that fills, because traces cannot be sent."""
    collector = Collector(status=400)
    tracing = Tracing(collector.url)
    http = app_client()
    http.app.state.context.timelines.listeners.append(tracing.export)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert http.post("/v1/completions", json=BODY).status_code == 200
            tracing._provider.force_flush()
    tracing.close()
    collector.close()
    assert [record.name for record in caplog.records] == ["penstock"]
    assert "are dropped" in caplog.text


def test_wrong_endpoint_names_the_option() -> None:
    with pytest.raises(InvalidRequestError, match="otlp_traces_endpoint"):
        create_app(FakeEngineClient(), ServerOptions(otlp_traces_endpoint="localhost:4318"))
