"""Requests generated from the schemas of the bodies by Schemathesis: right ones are served, wrong ones refused.

Its phase of coverage, thousands of single wrong values, is left out: the tables of attacks and `penstock prove`'s own
generator send those, to the same routes.
"""

from typing import Any

import msgspec
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.tokenizer.fill_in import MARKS
from penstock_lab.prove.attacks.attack import judge
from penstock_lab.prove.hostile import ALLOWED_STATUSES, KINDS
from tests.server.fakes import FakeEngineClient


def openapi() -> dict[str, Any]:
    """The document that a server with these routes would give of itself."""
    (_, components) = msgspec.json.schema_components(KINDS.values(), ref_template="#/components/schemas/{name}")
    paths = {}
    for path, kind in KINDS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": {"default": {"description": "an answer"}}}}
    head = {"openapi": "3.1.0", "info": {"title": "Penstock", "version": "1"}}
    return {**head, "paths": paths, "components": {"schemas": components}}


schema = schemathesis.openapi.from_dict(openapi())
schema.config.phases.coverage.enabled = False
schema.app = create_app(
    FakeEngineClient(max_model_len=64, marks=MARKS[0]), ServerOptions(allowed_hosts=("testserver",), access_log=False)
)


@schema.parametrize()
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_generated_bodies(case: Any) -> None:
    """Guards against a body that the schema allows, or nearly, and that is answered with a 5xx or without JSON."""
    answer = case.call()
    if answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout":
        return  # which a body may ask for
    case.validate_response(answer, checks=(not_a_server_error,))
    assert judge(answer.status_code, answer.content, ALLOWED_STATUSES) is None
