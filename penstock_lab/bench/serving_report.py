"""The figures of `penstock bench serve`, as text in vLLM's form and as a picture of a sweep of loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import InvalidRequestError
from penstock_lab.bench.outcomes import METRICS

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


def block(result: dict[str, Any], metrics: Sequence[str]) -> str:
    """Return the block of one run. Figures that do not apply to the run are left out."""
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
        raise InvalidRequestError(f"plot: cannot write {str(path)!r}: {error}", param="plot") from None


def picture(results: Sequence[dict[str, Any]]) -> Any:
    """Return the Figure that `draw` writes."""
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
    """Return {title of a panel: {label of a curve: figure}}."""
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
    """Return matplotlib's Figure, which draws without a screen.

    Raises:
        InvalidRequestError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        message = "plot: needs matplotlib: pip install 'penstock[plot]'"
        raise InvalidRequestError(message, param="plot") from None
    return Figure
