"""The part of `penstock bench` that measures a running server."""

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_model, parse_object, parse_size
from penstock.client.prompts import progress
from penstock.errors import invalid

if TYPE_CHECKING:
    from penstock_lab.bench.datasets import Dataset

EXAMPLES = """examples:
  penstock bench serve demo --num-prompts 200 --request-rate 20 --ignore-eos
  penstock bench serve demo --request-rate 5 10 20 40 inf --goodput ttft:500 tpot:50 --plot sweep.svg
  penstock bench serve demo --dataset-name prefix_repetition --prefix-len 256 --num-prefixes 4
  penstock bench serve MODEL --backend openai-chat --dataset-name sharegpt --dataset-path FILE
MODEL is the model that the server serves: its config.json or tokenizer makes the prompts.
"""
METRICS = "ttft,tpot,itl"


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    server = parser.add_argument_group("server")
    help_text = "address of the server (default: http://127.0.0.1:8000)"
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help=help_text)
    help_text = "openai (completions) or openai-chat (default: openai)"
    server.add_argument("--backend", default="openai", metavar="NAME", help=help_text)
    help_text = "name of the model on the server (default: the first that it lists)"
    server.add_argument("--served-model-name", metavar="NAME", help=help_text)
    help_text = "sent as a bearer token (default: $PENSTOCK_API_KEY or $OPENAI_API_KEY, which other users cannot see)"
    server.add_argument("--api-key", metavar="KEY", help=help_text)
    help_text = "a header to send with every request (repeatable)"
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help=help_text)
    requests = parser.add_argument_group("requests")
    requests.add_argument("--num-prompts", type=parse_size, default=100, metavar="N", help="how many (default: 100)")
    add_dataset(requests)
    help_text = "ask for answers of full length; servers other than Penstock and vLLM may refuse it"
    requests.add_argument("--ignore-eos", action="store_true", help=help_text)
    requests.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of the answers (default: 0)")
    help_text = "additional fields of every request body"
    requests.add_argument("--extra-body", type=parse_object, default={}, metavar="JSON", help=help_text)
    requests.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals (default: 0)")
    help_text = "requests before the measurement, one after another (default: 1)"
    requests.add_argument("--num-warmups", type=parse_size, default=1, metavar="N", help=help_text)
    _configure_load(parser)


def _configure_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load and figures")
    add_arrivals(load)
    load.add_argument("--max-concurrency", type=parse_size, metavar="N", help="maximum number of concurrent requests")
    help_text = "limits in milliseconds within which a request is good, like ttft:500 tpot:50 e2el:5000"
    load.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=help_text)
    help_text = f"latencies to print: ttft,tpot,itl,e2el (default: {METRICS})"
    load.add_argument("--percentile-metrics", default=METRICS, metavar="NAMES", help=help_text)
    load.add_argument(
        "--metric-percentiles", default="99", metavar="P", help="percentiles to print, like 50,90,99 (default: 99)"
    )
    load.add_argument("--plot", metavar="FILE", help="draw the figures by request rate, as svg, png or pdf")


def add_dataset(group: Any) -> None:
    """Add the options that define the prompts; `read_dataset` reads them."""
    help_text = "random, prefix_repetition, repetitive or sharegpt (default: random)"
    group.add_argument("--dataset-name", default="random", metavar="NAME", help=help_text)
    group.add_argument("--dataset-path", metavar="FILE", help="JSON file of conversations, for sharegpt")
    group.add_argument(
        "--input-len", type=parse_size, default=128, metavar="N", help="tokens per prompt (default: 128)"
    )
    group.add_argument("--output-len", type=parse_size, metavar="N", help="tokens per answer (default: 128)")
    help_text = "draw lengths from 1 - R to 1 + R times these (default: 0)"
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help=help_text)
    help_text = "length of a prefix that prompts share, in addition to these tokens (default: 0)"
    group.add_argument("--prefix-len", type=parse_size, default=0, metavar="N", help=help_text)
    help_text = "number of different prefixes, for prefix_repetition (default: 1)"
    group.add_argument("--num-prefixes", type=parse_size, default=1, metavar="N", help=help_text)


def read_dataset(args: argparse.Namespace) -> "Dataset":
    from penstock_lab.bench.datasets import Dataset

    names = ("input_len", "output_len", "prefix_len", "num_prefixes")
    lengths = {name: getattr(args, name) for name in names}
    return Dataset(args.dataset_name, args.dataset_path, range_ratio=args.random_range_ratio, **lengths)


def add_arrivals(group: Any) -> None:
    """Add the options that define when requests arrive."""
    help_text = (
        "mean arrivals per second, or inf: all at once (the default); several rates are measured one after another"
    )
    group.add_argument("--request-rate", type=float, nargs="+", default=[float("inf")], metavar="R", help=help_text)
    help_text = "1: a Poisson process (the default); below 1: in bursts; above 1: steadier"
    group.add_argument("--burstiness", type=float, default=1.0, metavar="X", help=help_text)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """Make a function that measures, and one that prints the result; see cli/bench.py."""
    from penstock.errors import check_choice
    from penstock_lab.bench.datasets import Vocabulary, draw_samples
    from penstock_lab.bench.http_client import HttpClient
    from penstock_lab.bench.outcomes import METRICS as ALL_METRICS
    from penstock_lab.bench.outcomes import Load, draw, figure, print_serving
    from penstock_lab.bench.serving import Target, measure_serving

    metrics = args.percentile_metrics.split(",")
    for name in metrics:
        check_choice("percentile_metrics", name, tuple(ALL_METRICS))
    percentiles = [_number("metric_percentiles", text) for text in args.metric_percentiles.split(",")]
    if args.plot:
        figure()  # a missing library must fail now, not after the run
    load = {"burstiness": args.burstiness, "max_concurrency": args.max_concurrency, "goals": _goals(args.goodput)}
    loads = [Load(rate, **load, seed=args.seed) for rate in args.request_rate]
    dataset = read_dataset(args)
    fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body}
    client = HttpClient(args.base_url, _headers(args))
    target = Target(client, args.backend, args.served_model_name, fields)

    def measure() -> dict[str, Any]:
        as_text = args.backend == "openai-chat"
        samples = draw_samples(dataset, Vocabulary(args.model), args.num_prompts, args.seed, as_text=as_text)
        work = measure_serving(target, samples, loads, percentiles, num_warmups=args.num_warmups, progress=progress)
        results = _run(work)
        if args.plot:
            draw(results, Path(args.plot))
        head = {"dataset_name": dataset.name, "input_len": dataset.input_len, "output_len": dataset.output_len}
        return {**head, **(results[0] if len(results) == 1 else {"runs": results})}

    return measure, lambda result: print_serving(result.get("runs", [result]), metrics)


def _run(work: Any) -> Any:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(work)
    return uvloop.run(work)


def _headers(args: argparse.Namespace) -> dict[str, str]:
    key = args.api_key or os.environ.get("PENSTOCK_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for text in args.header:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise invalid("header", f"{text!r} is not NAME=VALUE")
        headers[name] = value
    return headers


def _goals(texts: list[str]) -> dict[str, float]:
    pairs = [text.partition(":") for text in texts]
    return {name: _number("goodput", value) for name, _, value in pairs}


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise invalid(option, f"{json.dumps(text)} is not a number") from None
