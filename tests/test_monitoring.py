"""deploy/: the dashboard, the alerts and the container's files fit the metrics and the options of the server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.fakes import FakeEngineClient
from tests.server.harness import app_client, free_port
from tools.check_monitoring import DASHBOARD, RULES, queries

DEPLOY = RULES.parent.parent
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
METRIC = re.compile(r"\b((?:penstock|process)_\w+)")


def known_metrics() -> set[str]:
    """All names of series that a server shows, without the engine's process, which the fake does not have."""
    client = app_client(FakeEngineClient())
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    lines = client.get("/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def used_metrics(query: str) -> set[str]:
    return {name.replace("penstock_engine_process_", "process_") for name in METRIC.findall(query)}


def test_the_dashboard_and_the_rules_use_metrics_that_exist() -> None:
    """Guards against a panel or an alert that stays empty for ever, because a metric was renamed."""
    known = known_metrics()
    asked = [query for _, query in queries(json.loads(DASHBOARD.read_text()))]
    asked += [rule["expr"] for group in GROUPS for rule in group["rules"]]
    assert len(asked) > 40
    for query in asked:
        assert used_metrics(query) <= known, query


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    """Guards against panels that overlap, share an id or a query's letter, or have no source."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= set(dashboard)
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "model_name", "instance"]
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["fieldConfig"]["defaults"]["unit"]
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) > 0
        assert all(target["datasource"]["uid"] == "${datasource}" for target in targets)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="this machine has no promtool")
def test_the_rules_pass_promtool() -> None:
    """Guards against expressions that Prometheus refuses, and an overload alert that fires for one key's limit."""
    for words in (["check", "rules", str(RULES)], ["test", "rules", str(RULES.parent / "rules_test.yml")]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_overload_alert_is_about_the_queue_alone() -> None:
    """The same without promtool, as far as the text of the rule shows it."""
    (rule,) = [rule for group in GROUPS for rule in group["rules"] if rule["alert"] == "PenstockOverloaded"]
    assert 'penstock_http_errors_total{code="engine_overloaded"}' in rule["expr"]
    assert "429" not in rule["expr"]
    series = {line.split(" ")[0] for line in app_client().get("/metrics").text.splitlines()}
    for code in ("engine_overloaded", "rate_limit_exceeded"):  # from the start, so that their first increase is seen
        assert f'penstock_http_errors_total{{code="{code}",model_name="fake"}}' in series


def healthcheck(pid: int) -> int:
    return subprocess.run([sys.executable, str(DEPLOY / "healthcheck.py"), str(pid)], capture_output=True).returncode


@pytest.mark.parametrize("way", ["flag", "variable", "file", "socket"])
def test_the_health_check_follows_the_address(tmp_path: Path, way: str) -> None:
    """Guards against a container that is called unhealthy because its port was changed, or healthy when it is not."""
    port = free_port()
    (tmp_path / "options.yaml").write_text(f"port: {port}\n")
    words = {"flag": ["--port", str(port)], "variable": [], "socket": ["--uds", str(tmp_path / "sock")]}
    more = words.get(way, ["--config", str(tmp_path / "options.yaml")])
    environment = os.environ | ({"PENSTOCK_PORT": str(port)} if way == "variable" else {})
    command = [sys.executable, "-m", "penstock", "serve", "--max-num-seqs", "2", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline()
            assert healthcheck(server.pid) == 0
        finally:
            server.terminate()
    assert healthcheck(server.pid) != 0


def test_the_containers_files_fit_the_server() -> None:
    """Guards against an image that listens without a key, and a compose file whose parts do not find one another."""
    image = (DEPLOY / "Dockerfile").read_text()
    assert "PENSTOCK_REQUIRE_KEY=true" in image
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for place in (volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]):
        assert not place.startswith("./") or (DEPLOY / place).exists(), place
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["penstock:8000"]}]
    (secret,) = compose["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
