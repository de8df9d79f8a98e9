"""The text and the pictures of a simulation: a file for a document, or a page that needs no network."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import invalid
from penstock_lab.bench.outcomes import draw, figure, picture
from penstock_lab.planner.picture import page
from penstock_lab.planner.picture import table as html_table
from penstock_lab.simulator.figures import PERCENTILES

FIGURES = {
    "Requests per second, sent": "request_rate",
    "Replicas": "replicas",
    "Replicas, on average": "mean_replicas",
    "Replicas added": "replicas_added",
    "Failures of replicas": "replica_failures",
    "Requests per second, answered": "request_throughput",
    "Requests per second, good": "goodput",
    "Target met": "meets_target",
    "Requests rejected": "rejected",
    "Requests failed": "failed",
    "Output tokens per second": "output_tokens_per_s",
    "Share of the time that a replica is busy": "utilization",
    "Share of prompt tokens found in the cache": "prefix_hit_rate",
    "Preemptions": "preemptions",
    "Cost per hour": "cost_per_hour",
    "Cost per million output tokens": "cost_per_million_output_tokens",
}
ROUND = 1000.0  # figures from this one on are shown without decimals
CHANGES = ("Replicas added", "Failures of replicas", "Requests failed")  # left out if all runs have 0
LATENCIES = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2e": "End-to-end latency"}
PICTURE = """<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">
<img alt="{alt}" src="{light}"></picture>"""
ALT = "Four panels against the request rate: throughput in tokens and in requests, time to first token, gaps"


def print_simulation(result: dict[str, Any]) -> None:
    """Print a table with a column for each run."""
    rows = table(result)
    label_width = max(len(row[0]) for row in rows)
    widths = [max(len(row[index]) for row in rows) for index in range(1, len(rows[0]))]
    print(about(result))
    for label, *cells in rows:
        print(
            f"{label:<{label_width}}",
            *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)),
            sep="  ",
        )


def about(result: dict[str, Any]) -> str:
    """Describe in one line what was simulated."""
    costs = result["costs"]
    if "hardware" in costs:
        steps = f"steps as planned on {costs['devices']} of {costs['hardware']}"
    else:
        steps = "seconds of a step: " + ", ".join(f"{name} {value:.3g}" for name, value in costs.items() if value)
    return f"{result['model']}, simulated: {result['runs'][0]['requests']} requests per run; {steps}"


def table(result: dict[str, Any]) -> list[list[str]]:
    """List rows of a label and the figure of each run. Figures that no run has are left out."""
    runs = result["runs"]
    found = [(label, [run.get(name) for run in runs]) for label, name in FIGURES.items()]
    found = [(label, values) for label, values in found if label not in CHANGES or any(values)]
    found += [
        (f"{title}, p{share} (ms)", [run[f"{name}_ms"][f"p{share}"] for run in runs])
        for name, title in LATENCIES.items()
        for share in PERCENTILES
    ]
    return [[label, *map(_shown, values)] for label, values in found if any(value is not None for value in values)]


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= ROUND and math.isfinite(value) else f"{value:.4g}"


def check_plot(path: Path) -> None:
    """Raise InvalidRequestError if no picture can be written to the path. Called before anything is simulated."""
    figure()
    try:
        path.open("a").close()
    except OSError as error:
        raise invalid("plot", f"cannot write {str(path)!r}: {error.strerror}") from None


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw all runs: as a page if the name ends with .html, otherwise as svg, png or pdf.

    Raises:
        InvalidRequestError: matplotlib is not installed, or the file cannot be written in this format.
    """
    runs = [_as_measured(result, run) for run in result["runs"]]
    if path.suffix != ".html":
        draw(runs, path)
        return
    drawn = PICTURE.format(alt=ALT, light=_image(runs), dark=_image(runs, dark=True))
    text = page(f"{result['model']}: a simulated load", about(result), drawn + html_table(table(result)))
    path.write_text(text, encoding="utf-8")


def _as_measured(result: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Rename the figures of a run as `penstock bench serve` has them, whose picture shows it."""
    latencies = {
        f"{'median' if share == 50 else f'p{share}'}_{name}_ms": run[f"{name}_ms"][f"p{share}"] or 0.0
        for name in ("ttft", "itl")
        for share in PERCENTILES
    }
    return {
        "model_id": f"{result['model']}, simulated",
        "num_prompts": run["requests"],
        "request_rate": run["request_rate"],
        "request_throughput": run["request_throughput"],
        "request_goodput": run["goodput"],
        "output_throughput": run["output_tokens_per_s"],
        **latencies,
    }


def _image(runs: Sequence[dict[str, Any]], *, dark: bool = False) -> str:
    """Encode the picture as a data URL."""
    from matplotlib import style

    with style.context("dark_background" if dark else "default"), io.BytesIO() as file:
        picture(runs).savefig(file, format="svg", transparent=True)
        return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
