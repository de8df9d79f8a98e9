"""Compare the simulator with this machine, which should be idle: `python -m penstock_lab.simulator.check MODEL`.

A server answers Poisson loads at 50, 80 and 100 % of the capacity that the simulator predicts, and all requests at
once, as in `bench offline`; each load is compared with its simulation. The costs of the model's steps are fitted to
steps measured before and after these loads (`--costs`), because the speed of a shared machine changes within minutes.
Exit code 1 if an error exceeds its limit: throughput 7 %, medians 15 %, p99 25 %.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from penstock import EngineError
from penstock_lab.bench.datasets import Dataset, Vocabulary, draw_samples
from penstock_lab.bench.http_client import HttpClient
from penstock_lab.bench.outcomes import Load
from penstock_lab.bench.record_history import unpack
from penstock_lab.bench.serving import Target, measure_serving
from penstock_lab.simulator.costs import LinearCosts, MeasuredStep, fit_costs
from penstock_lab.simulator.recorded import measure_steps, measured_steps
from penstock_lab.simulator.run import Options, run

SHARES = (0.5, 0.8, 1.0)
START_S = 300.0
COSTS_HELP = (
    "costs of steps: of an engine alone (this), or of the server under other loads, with text and HTTP (served)"
)
MIX = (  # loads: the dataset, the number of requests, and requests per second
    (Dataset(input_len=512, output_len=16), 24, 2.0),
    (Dataset(input_len=40, output_len=100), 64, float("inf")),
    (Dataset(input_len=200, output_len=50), 48, 6.0),
)
LIGHT, LIGHT_SHARE, LIGHT_COUNT = Dataset(input_len=100, output_len=24), 0.3, 48  # a load with hardly any queue
# The name in `bench serve`, the path in the simulator's figures, and the largest error allowed.
FIGURES = {
    "tokens per second": ("output_throughput", ("output_tokens_per_s",), 0.07),
    "TTFT p50": ("median_ttft_ms", ("ttft_ms", "p50"), 0.15),
    "TTFT p99": ("p99_ttft_ms", ("ttft_ms", "p99"), 0.25),
    "ITL p50": ("median_itl_ms", ("itl_ms", "p50"), 0.15),
    "ITL p99": ("p99_itl_ms", ("itl_ms", "p99"), 0.25),
}


def main(argv: list[str] | None = None) -> int:
    """Print every figure beside its prediction. Return 1 if an error exceeds its limit."""
    parser = argparse.ArgumentParser(prog="penstock_lab.simulator.check", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--costs", choices=("this", "served"), default="this", help=COSTS_HELP)
    parser.add_argument("--quantization", help="how the weights are stored and multiplied")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, if MODEL has only a config.json")
    args = parser.parse_args(argv)
    dataset = Dataset(input_len=args.input_len, output_len=args.output_len)
    engine = {"model": args.model, "quantization": args.quantization, "load_format": args.load_format}
    with _server(engine) as address:
        is_served = args.costs == "served"
        calibrate = partial(_served_steps, address, args.model) if is_served else partial(measure_steps, engine)
        steps = calibrate()
        at_once = _simulated(engine, dataset, args.num_prompts, float("inf"), fit_costs(steps))
        rates = [*(share * at_once["request_throughput"] for share in SHARES), float("inf")]
        measured = asyncio.run(_measured(address, args.model, dataset, args.num_prompts, rates))
        costs = fit_costs(steps + calibrate())
        if is_served:
            costs = replace(costs, request=_request_seconds(address, engine, costs))
    found = [
        _compare(rate, there, _simulated(engine, dataset, args.num_prompts, rate, costs))
        for rate, there in zip(rates, measured, strict=True)
    ]
    return 0 if all(found) else 1


def _served_steps(address: str, model: str) -> list[MeasuredStep]:
    """Measure the steps of a server, under loads of other lengths than those that are compared."""
    began = time.time()
    for dataset, count, rate in MIX:
        asyncio.run(_measured(address, model, dataset, count, [rate]))
    with urllib.request.urlopen(f"{address}/status/record", data=b"") as answer:
        return measured_steps(unpack(answer.read()), began)


def _request_seconds(address: str, engine: dict[str, Any], costs: LinearCosts) -> float:
    """Measure how much longer than simulated a first token takes, under a light load of other lengths."""
    rate = LIGHT_SHARE * _simulated(engine, LIGHT, LIGHT_COUNT, float("inf"), costs)["request_throughput"]
    (light,) = asyncio.run(_measured(address, engine["model"], LIGHT, LIGHT_COUNT, [rate]))
    simulated = _simulated(engine, LIGHT, LIGHT_COUNT, rate, costs)
    return max(0.0, float(light["median_ttft_ms"]) - float(simulated["ttft_ms"]["p50"])) / 1000


def _simulated(engine: dict[str, Any], dataset: Dataset, count: int, rate: float, costs: LinearCosts) -> dict[str, Any]:
    options = Options(dataset=dataset, rates=[rate], num_prompts=count)
    result = run(engine, options, costs, lambda what, total: nullcontext(lambda number: None))
    (figures,) = result["runs"]
    return dict(figures)


async def _measured(address: str, model: str, dataset: Dataset, count: int, rates: list[float]) -> list[dict[str, Any]]:
    samples = draw_samples(dataset, Vocabulary(model), count, 0, as_text=False)
    target = Target(HttpClient(address, {}), "openai", None, {"temperature": 0.0, "ignore_eos": True})
    loads = [Load(rate) for rate in rates]
    return await measure_serving(
        target, samples, loads, [99], num_warmups=8,
        progress=lambda what, total: nullcontext(lambda number: None),
    )  # fmt: skip


def _compare(rate: float, measured: dict[str, Any], simulated: dict[str, Any]) -> bool:
    """Print the figures of a rate. Return whether all errors are within their limits."""
    print(f"{rate:.4g} requests per second")
    is_near = True
    for name, (here, path, limit) in FIGURES.items():
        predicted: Any = simulated
        for key in path:
            predicted = predicted[key]
        error = predicted / measured[here] - 1
        is_near &= abs(error) <= limit
        verdict = "" if abs(error) <= limit else f"  more than {limit:.0%}"
        print(f"  {name:<18} measured {measured[here]:10.2f}  simulated {predicted:10.2f}  {error:+8.1%}{verdict}")
    return is_near


@contextmanager
def _server(engine: dict[str, Any]) -> Iterator[str]:
    """Serve the model of engine options on a free port, and yield the server's address.

    Raises:
        EngineError: the server is not ready within START_S.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = str(engine["model"])
    words = ["serve", model, "--port", str(port), "--log-level", "error", "--load-format", engine["load_format"]]
    if engine["quantization"] is not None:
        words += ["--quantization", engine["quantization"]]
    words.append("--no-enable-prefix-caching")  # the same prompts come at every rate
    server = subprocess.Popen([sys.executable, "-m", "penstock", *words])
    try:
        ended_at = time.monotonic() + START_S
        while not _is_ready(port):
            if server.poll() is not None or time.monotonic() > ended_at:
                raise EngineError(f"the server of {model} did not become ready")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    async def ask() -> int:
        client = HttpClient(f"http://127.0.0.1:{port}", {})
        try:
            return (await client.request("GET", "/health")).status
        except OSError:
            return 0
        finally:
            client.close()

    return asyncio.run(ask()) == 200


if __name__ == "__main__":
    sys.exit(main())
