"""Try the dashboard and the alerts of deploy/ with a real server and a real Prometheus (`apt-get install prometheus`).

    python tools/check_monitoring.py [--prometheus PATH] [--seconds 75]

It starts `penstock serve demo` with a short queue and two keys. First, one key passes its own limit; then the other one
sends more than the server can take. After each part it prints which alerts are pending or firing, and at the end what
each query of the dashboard returns; --picture draws the panels over time. Exit code 1: the overload alert fired for the
limit, or did not fire for the overload, or a query has no numbers.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "penstock.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
VARIABLES = {"$instance": ".*", "$model_name": ".*", "$__rate_interval": "1m"}
KEYS = """
[limited]
key = "sk-limited-0123456789"
requests_per_minute = 6
[free]
key = "sk-free-0123456789"
admin = true
"""
LIMITED_S = 12.0  # an overload would be pending by then; it fires a minute later
FREE = {"Authorization": "Bearer sk-free-0123456789"}
LIMITED = {"Authorization": "Bearer sk-limited-0123456789"}
QUIET: list[str] = ["Preemptions", "Errors by code"]  # may have no numbers: nothing was preempted, no errors at the end


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries, with values in place of Grafana's variables."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


@contextlib.contextmanager
def process(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **more) as started:
        try:
            yield started
        finally:
            started.terminate()


def load(url: str, headers: dict[str, str], num_clients: int, seconds: float) -> dict[int, int]:
    """Send requests from several clients for a while, and count the answers by status."""
    end = time.monotonic() + seconds

    def client(number: int) -> list[int]:
        statuses = []
        with httpx.Client(trust_env=False, timeout=60) as http:
            while time.monotonic() < end:
                body = {"prompt": f"Story {number}: ", "max_tokens": 128, "ignore_eos": True}
                statuses.append(http.post(f"{url}/v1/completions", json=body, headers=headers).status_code)
                time.sleep(0.05 if statuses[-1] == 200 else 0.5)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        found = [status for statuses in pool.map(client, range(num_clients)) for status in statuses]
    return {status: found.count(status) for status in sorted(set(found))}


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        return httpx.get(f"{self._url}/api/v1/{path}", params=parameters, trust_env=False).json()["data"]

    def alerts(self) -> dict[str, str]:
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.ask("alerts")["alerts"]}

    def numbers(self, query: str) -> list[float]:
        values = [float(item["value"][1]) for item in self.ask("query", query=query)["result"]]
        return [value for value in values if not math.isnan(value)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="prometheus", metavar="PATH", help="the program (default: on PATH)")
    parser.add_argument("--seconds", type=float, default=75.0, metavar="S", help="length of the overload (default: 75)")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the dashboard's panels into a file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        (directory / "keys.toml").write_text(KEYS)
        words = ["--port", "0", "--api-key-file", str(directory / "keys.toml"), "--max-num-seqs", "2"]
        command = [sys.executable, "-m", "penstock", "serve", "demo", *words, "--max-queued-requests", "2"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment}
        server = stack.enter_context(process(command, **pipes))
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        return check(stack, directory, url, args)


def check(stack: contextlib.ExitStack, directory: Path, url: str, args: argparse.Namespace) -> int:
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["authorization"] = {"credentials": FREE["Authorization"].split()[1]}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    command = [args.prometheus, *words, "--web.listen-address=127.0.0.1:0"]
    started = stack.enter_context(process(command, stderr=subprocess.PIPE))
    assert started.stderr is not None
    address = next(
        found[1] for line in started.stderr if (found := re.search(r"Listening on.* address=(\S+:\d+)", line))
    )
    prometheus, failures = Prometheus(f"http://{address}"), 0
    print("one key passes its limit:", load(url, LIMITED, 4, LIMITED_S), prometheus.alerts() or "no alert")
    failures += "PenstockOverloaded" in prometheus.alerts()
    for _ in range(3):  # a busy machine sees a minute of overload later
        print("the queue is full:", load(url, FREE, 8, args.seconds), prometheus.alerts() or "no alert")
        if prometheus.alerts().get("PenstockOverloaded") == "firing":
            break
    else:
        failures += 1
    for title, query in queries(json.loads(DASHBOARD.read_text())):
        numbers = prometheus.numbers(query)
        failures += not numbers and title not in QUIET
        print(f"{title:36}{' '.join(f'{number:.4g}' for number in numbers[:8]) or 'no numbers':60}{query[:70]}")
    if args.picture:
        draw(prometheus, args.picture, LIMITED_S + args.seconds)
    return int(failures > 0)


def draw(prometheus: Prometheus, file: str, seconds: float) -> None:
    """Draw each panel with the numbers of the last `seconds`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dashboard, end = json.loads(DASHBOARD.read_text()), time.time()
    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    figure, places = pyplot.subplots(math.ceil(len(panels) / 3), 3, figsize=(15, 16), layout="constrained")
    for panel, place in zip(panels, places.flat, strict=True):
        place.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=9)
        for (_, query), target in zip(queries({"panels": [panel]}), panel["targets"], strict=True):
            span = {"start": str(end - seconds), "end": str(end), "step": "2"}
            for item in prometheus.ask("query_range", query=query, **span)["result"]:
                times, values = zip(*((at - end, float(value)) for at, value in item["values"]), strict=True)
                name = target["legendFormat"]
                for label, value in item["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                place.plot(times, values, label=name)
        place.set_ylim(bottom=0)
        place.legend(fontsize=7)
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
