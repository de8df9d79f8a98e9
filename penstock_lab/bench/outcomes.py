"""Loads, the results of their requests, and the figures of a run, also as text in vLLM's form and as a picture.

The figures have the names and the meanings of vLLM's `bench serve`, so that results of several engines can be compared:

    ttft   time to first token: from sending a request to the first part of its answer that carries a token
    itl    inter-token latency: from one part that carries a token to the next
    tpot   time per output token: (e2el - ttft) / (output tokens - 1), one figure per request
    e2el   end-to-end latency: from sending a request to the end of its answer
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import check_choice, check_float, check_int, invalid, missing

METRICS = {"ttft": "Time to first token", "tpot": "Time per output token (but for the first)",
           "itl": "Inter-token latency", "e2el": "End-to-end latency"}  # fmt: skip
GOALS = ("ttft", "tpot", "e2el")  # metrics that have one figure per request
MAX_ERRORS = 5  # maximum number of different errors that are kept
WIDTH = 50
COUNTS = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Request rate configured (RPS)", "request_rate"),
    ("Maximum request concurrency", "max_concurrency"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
SWEEP = {"rate": "request_rate", "req/s": "request_throughput", "goodput": "request_goodput", "failed": "failed",
         "tok/s": "output_throughput", "TTFT p50": "median_ttft_ms", "ITL p50": "median_itl_ms",
         "TPOT p50": "median_tpot_ms"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """The way in which the requests of a run arrive.

    Attributes:
        request_rate: mean requests per second; inf sends all at once.
        burstiness: shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, less comes in
            bursts, more is steadier.
        max_concurrency: maximum number of requests under way; further ones wait in the client, and their time does not
            run yet.
        goals: {metric: milliseconds}; a request that stays within all of them is good (goodput).
        seed: of the arrivals.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    goals: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate != math.inf:
            check_float("request_rate", self.request_rate, 0.0, 1e6, low_open=True)
        check_float("burstiness", self.burstiness, 0.0, 1e6, low_open=True)
        check_int("max_concurrency", self.max_concurrency, 1, 10**6, optional=True)
        for name, goal in self.goals.items():
            check_choice("goodput", name, GOALS)
            check_float("goodput", goal, 0.0, 1e9, low_open=True)

    def gaps(self, count: int) -> Iterator[float]:
        """Yield the seconds before each request. They sum to count / request_rate, so that all runs take equally long.

        The gaps are drawn twice, and not kept, because a simulation has millions of them.
        """
        if self.request_rate == math.inf:
            yield from repeat(0.0, count)
            return
        scale = count / self.request_rate / (sum(self._drawn(count)) or 1.0)
        yield from (gap * scale for gap in self._drawn(count))

    def _drawn(self, count: int) -> Iterator[float]:
        rng = random.Random(self.seed)
        return (rng.gammavariate(self.burstiness, 1.0) for _ in range(count))


@dataclass(slots=True)
class Outcome:
    """The result of a request; times in seconds."""

    prompt_len: int
    sent_at: float
    ended_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # arrival times of the parts that carry tokens
    output_len: int = 0
    error: str = ""

    def milliseconds(self) -> dict[str, list[float]]:
        """List the values of each of METRICS."""
        e2el, ttft = self.ended_at - self.sent_at, self.arrivals[0] - self.sent_at
        gaps = [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
        tpot = [(e2el - ttft) / (self.output_len - 1)] if self.output_len > 1 else []
        found = {"ttft": [ttft], "tpot": tpot, "itl": gaps, "e2el": [e2el]}
        return {name: [1000 * value for value in values] for name, values in found.items()}


def figures(outcomes: Sequence[Outcome], load: Load, percentiles: Sequence[float]) -> dict[str, Any]:
    """Compute the figures of a run, with vLLM's names.

    Args:
        percentiles: of the latencies, in percent.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    began, ended = min(outcome.sent_at for outcome in outcomes), max(outcome.ended_at for outcome in outcomes)
    duration = max(ended - began, 1e-9)
    times = [outcome.milliseconds() for outcome in good]
    input_tokens, output_tokens = sum(one.prompt_len for one in good), sum(one.output_len for one in good)
    within = sum(all(one[name][0] <= goal for name, goal in load.goals.items() if one[name]) for one in times)
    errors = dict.fromkeys(outcome.error for outcome in outcomes if outcome.error)
    result = {
        "num_prompts": len(outcomes),
        "request_rate": load.request_rate if load.request_rate < math.inf else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": within / duration if load.goals else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        **_peaks(good, began),
        "errors": list(errors)[:MAX_ERRORS],
    }
    for name in METRICS:
        result |= _latency(name, [value for one in times for value in one[name]], percentiles)
    return result


def _peaks(outcomes: Sequence[Outcome], began: float) -> dict[str, float]:
    """Find the largest number of tokens in a second of the run, and of requests under way at once."""
    tokens: dict[int, float] = {}
    for outcome in outcomes:
        for arrival in outcome.arrivals:
            second = int(arrival - began)
            tokens[second] = tokens.get(second, 0.0) + outcome.output_len / len(outcome.arrivals)
    changes = sorted([(one.sent_at, 1) for one in outcomes] + [(one.ended_at, -1) for one in outcomes])
    under_way = accumulate(change for _, change in changes)
    return {
        "max_output_tokens_per_s": max(tokens.values(), default=0.0),
        "max_concurrent_requests": max(under_way, default=0),
    }


def _latency(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Compute mean, median, standard deviation and percentiles in milliseconds; None where nothing was measured."""
    chosen = {f"p{share:g}": share for share in percentiles}
    if not values:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", *chosen)}
    array = np.array(values)
    found = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    found |= {label: np.percentile(array, share) for label, share in chosen.items()}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def check_percentiles(percentiles: Sequence[float]) -> None:
    """Raise InvalidRequestError for a value that is not a percentage."""
    for share in percentiles:
        check_float("metric_percentiles", share, 0.0, 100.0)


def block(result: dict[str, Any], metrics: Sequence[str]) -> str:
    """Print the figures of one run as a block of text, without those that do not apply to the run."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(label, result[name]) for label, name in COUNTS if result[name] is not None]
    for metric in metrics:
        lines.append(f"{METRICS[metric]:-^{WIDTH}}")
        kinds = [name.removesuffix(f"_{metric}_ms") for name in result if name.endswith(f"_{metric}_ms")]
        for kind in kinds:
            if kind != "std" and (value := result[f"{kind}_{metric}_ms"]) is not None:
                lines.append(_line(f"{kind.capitalize()} {metric.upper()} (ms)", value))
    lines += [*(f"error: {error}" for error in result["errors"]), "=" * WIDTH]
    return "\n".join(lines)


def _line(label: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<{WIDTH - 10}}{shown:>10}"


def print_serving(results: Sequence[dict[str, Any]], metrics: Sequence[str]) -> None:
    """Print a block per run and, for several runs, a table that compares them."""
    for result in results:
        print(block(result, metrics))
    if len(results) > 1:
        from rich.console import Console
        from rich.table import Table

        table = Table(*SWEEP, title="By request rate; latencies in ms")
        for result in results:
            values = [result[name] for name in SWEEP.values()]
            table.add_row(*("-" if value is None else _short(value) for value in values))
        Console().print(table)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw throughput and latencies against the request rate. The file's suffix selects the format (svg, png, pdf).

    Raises:
        InvalidRequestError: matplotlib is not installed, or the file cannot be written in this format.
    """
    drawn = picture(results)
    try:
        drawn.savefig(path, facecolor="white")
    except (OSError, ValueError) as error:
        raise invalid("plot", f"cannot write {str(path)!r}: {error}") from None


def picture(results: Sequence[dict[str, Any]]) -> Any:
    """Make the Figure that `draw` writes."""
    figure_class = figure()
    rates = [str(result["request_rate"]) for result in results]
    drawn = figure_class(figsize=(9, 6), layout="constrained")
    panels = drawn.subplots(2, 2).flat
    first = results[0]
    drawn.suptitle(f"{first['model_id']}: {first['num_prompts']} requests for each rate")
    for panel, (title, names) in zip(panels, _curves(first).items(), strict=False):
        for label, name in names.items():
            panel.plot(rates, [result[name] for result in results], marker="o", label=label)
        panel.set(title=title, xlabel="requests per second")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    return drawn


def _curves(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Choose what to draw: {title of a panel: {label of a curve: figure}}."""
    throughput = {"output tokens/s": "output_throughput"}
    requests = {"finished": "request_throughput", "good": "request_goodput"}
    if result["request_goodput"] is None:
        del requests["good"]
    percentiles = [name.split("_")[0] for name in result if name.startswith("p") and name.endswith("_ttft_ms")]
    latencies = {
        f"{METRICS[metric]} (ms)": {kind: f"{kind}_{metric}_ms" for kind in ("median", *percentiles)}
        for metric in ("ttft", "itl")
    }
    return {"Throughput (tokens/s)": throughput, "Requests per second": requests, **latencies}


def figure() -> Any:
    """Make matplotlib's Figure, which draws without a screen.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise invalid("plot", missing("it", "matplotlib")) from None
    return Figure
