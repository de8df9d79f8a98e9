"""Turn samples into rows with medians, spreads, marks and ratios, as a terminal table, Markdown and JSON."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import OURS
from benchmarks.runner import DISTURBED, MOVED, PRECISIONS
from benchmarks.store import Store
from benchmarks.workloads import FIGURES, Figure, Sample, Workload

TITLES = {"penstock": "Penstock", "vllm": "vLLM", "openvino": "OpenVINO GenAI", "transformers": "Transformers"}
NOTHING = "–"
COMPUTED = ("weights", "activations", "cache", "head", "notes")


@dataclass(frozen=True)
class Cell:
    """The result of one engine in one row.

    Attributes:
        median, low, high: of the unmarked samples or, if there are none, of all. None: there are no samples.
        samples: how many samples these are.
        marks: "*" and "~" if all samples are marked.
        cap: seconds after which the engine was ended; median is then the best that it could have reached, if known.
        error: why there is no figure.
    """

    median: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    marks: str = ""
    cap: float | None = None
    error: str = ""

    def text(self) -> str:
        if self.error:
            return "error"
        if self.cap is not None:
            return "ended" if self.median is None else f"> {self.cap:.0f} s"
        if self.median is None or self.low is None or self.high is None:
            return NOTHING
        spread = f" ({number(self.low)}-{number(self.high)})" if self.samples > 1 else ""
        return f"{number(self.median)}{spread}{self.marks}"

    def short(self) -> str:
        """Return the text without the spread."""
        return re.sub(r" \(.*\)", "", self.text())


@dataclass(frozen=True)
class Row:
    """One figure for one type of weights.

    Attributes:
        cells: the results by engine.
        ratio: how many times as good Penstock is as the best other engine; None: nothing to compare with.
        at_least: whether the ratio is a lower bound, because all other engines were ended before they finished.
    """

    figure: Figure
    work: Workload
    precision: str
    cells: dict[str, Cell]
    ratio: float | None
    at_least: bool

    def label(self) -> str:
        return f"{self.figure.name}, {self.figure.unit}"

    def ratio_text(self) -> str:
        return NOTHING if self.ratio is None else f"{'> ' if self.at_least else ''}{self.ratio:.2f}"


def number(value: float) -> str:
    """Return a figure with two or three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def make_rows(store: Store, engines: Sequence[str], workloads: Sequence[Workload]) -> list[Row]:
    """Return the rows that have a sample from at least one engine."""
    rows = []
    for figure in FIGURES:
        for work in (work for work in workloads if work.name == figure.workload):
            for precision in PRECISIONS:
                samples = {engine: store.of(engine, precision, work) for engine in engines}
                if any(samples.values()):
                    cells = {engine: make_cell(figure, work, samples[engine]) for engine in engines}
                    rows.append(Row(figure, work, precision, cells, *find_ratio(figure, cells)))
    return rows


def make_cell(figure: Figure, work: Workload, samples: Sequence[Sample]) -> Cell:
    """Return the result of one engine's samples for a figure."""
    if not samples:
        return Cell()
    if "error" in samples[-1]:
        return Cell(error=samples[-1]["error"])
    if caps := [sample["cap"] for sample in samples if "cap" in sample]:
        ended = {"seconds": caps[-1], "first_s": caps[-1]}
        try:
            return Cell(median=figure.read(work, ended), cap=caps[-1])
        except KeyError:  # the figure is not known before the end
            return Cell(cap=caps[-1])
    clean = [sample for sample in samples if not sample["marks"]]
    used = clean or samples
    values = [figure.read(work, sample) for sample in used]
    marks = "" if clean else "".join(mark for mark in (DISTURBED, MOVED) if any(mark in one["marks"] for one in used))
    return Cell(statistics.median(values), min(values), max(values), len(values), marks)


def find_ratio(figure: Figure, cells: Mapping[str, Cell]) -> tuple[float | None, bool]:
    """Return how many times as good as the best other median Penstock's is, and whether that is a lower bound."""
    ours = cells.get(OURS, Cell())
    others = [cell for engine, cell in cells.items() if engine != OURS and cell.median is not None]
    whole = [cell for cell in others if cell.cap is None]
    if ours.median is None or ours.cap is not None or not others:
        return None, False
    values = [cell.median for cell in whole or others if cell.median is not None]
    if figure.better == "higher":
        return ours.median / max(values), not whole
    return min(values) / ours.median, not whole


def print_table(rows: Sequence[Row], engines: Sequence[str]) -> None:
    """Print the medians on the terminal, in 80 columns."""
    table = Table("", "", *engines, "ratio", padding=(0, 0, 0, 1))
    for row, following in zip(rows, [*rows[1:], *rows[-1:]], strict=True):
        cells = (row.cells[engine].short() for engine in engines)
        label = f"{row.figure.name.partition(' ')[0]} {row.figure.unit}"
        last = row.figure != following.figure
        table.add_row(label, row.precision, *cells, row.ratio_text(), end_section=last)
    Console().print(table)


def write_markdown(rows: Sequence[Row], engines: Sequence[str], store: Store) -> str:
    """Return the part of docs/performance.md that `python -m benchmarks.picture` draws, with its notes."""
    heads = ["figure", "weights", *(TITLES.get(engine, engine) for engine in engines), "Penstock / best other"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        cells = (row.cells[engine].text() for engine in engines)
        lines.append(f"| {' | '.join([row.label(), row.precision, *cells, row.ratio_text()])} |")
    caption = f"{store.run['model']}, random weights. {machine_text(store.run)}."
    return "\n".join([f"<!-- speed: {caption} -->", *lines, "<!-- end -->", "", *_notes(rows, engines, store), ""])


def machine_text(run: Mapping[str, Any]) -> str:
    """Return a description of the machine in one line."""
    machine = run["machine"]
    features = ", ".join(machine["features"])
    return f"{machine['processor']} ({features}), {machine['cores']} cores, {machine['threads']} threads per engine"


def _notes(rows: Sequence[Row], engines: Sequence[str], store: Store) -> Iterator[str]:
    yield "Medians of the rounds, in brackets the lowest and the highest. Last column: how many times as good Penstock"
    yield "is as the best other engine of the same width."
    yield f"`{DISTURBED}`: others used the machine in every sample; `{MOVED}`: its limits moved during every sample."
    yield "`> N s`: ended after N seconds, its figure unknown: `ended`. A dash: not offered, or not run."
    yield ""
    sizes = {row.work.name: row.work.size for row in rows}
    yield f"Sizes (requests x prompt + output tokens): {', '.join(f'{name} {size}' for name, size in sizes.items())}."
    yield f"Machine: {machine_text(store.run)}. Penstock: {store.run['build']}."
    yield ""
    yield f"| engine | version | {' | '.join(COMPUTED)} |"
    yield f"|{' --- |' * (2 + len(COMPUTED))}"
    for engine in engines:
        for precision in PRECISIONS:
            if facts := store.facts.get((engine, precision)):
                cells = [TITLES.get(engine, engine), facts["version"], *(facts.get(name, "") for name in COMPUTED)]
                yield f"| {' | '.join(cell.replace('|', ',') for cell in cells)} |"
    errors = {(e, row.precision, cell.error) for row in rows for e, cell in row.cells.items() if cell.error}
    for engine, precision, error in sorted(errors):
        yield f"\n{TITLES.get(engine, engine)}, {precision}: error: `{error}`"


def to_json(rows: Sequence[Row], store: Store) -> dict[str, Any]:
    """Return everything that the table and its notes say, and the sampled limits of the machine."""
    return {
        "run": store.run,
        "engines": [
            {"engine": engine, "precision": precision, **facts} for (engine, precision), facts in store.facts.items()
        ],
        "rows": [
            {
                "figure": row.figure.name,
                "workload": row.work.name,
                "size": row.work.size,
                "unit": row.figure.unit,
                "better": row.figure.better,
                "weights": row.precision,
                "engines": {engine: asdict(cell) for engine, cell in row.cells.items()},
                "ratio": row.ratio,
                "ratio_is_lower_bound": row.at_least,
            }
            for row in rows
        ],
        "limits": _limits(store.samples),
    }


def _limits(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return the range of each limit over all samples: 10^9 bytes or operations per second."""
    seen = [limits for sample in samples for limits in sample.get("limits", ())]
    names = seen[0] if seen else ()
    return {
        name: {
            "low": min(one[name] for one in seen),
            "median": statistics.median(one[name] for one in seen),
            "high": max(one[name] for one in seen),
        }
        for name in names
    }
