"""Draw the speed table of a page: ``python -m benchmarks.picture [PAGE [PICTURE]]``, by default docs/speed.svg.

There is one panel, with its own scale, per figure in tokens per second. Each engine has a bar with its median as a
number and a thin line from its lowest to its highest sample. The picture has its own background in light and dark mode,
because a page cannot style it.
"""

import re
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "speed.svg"
OURS = "Penstock"
UNIT = ", tokens/s"
NUMBERS = re.compile(r"([\d.]+)(?: \(([\d.]+)-([\d.]+)\))?([*~]*)")
WIDTH, MARGIN, TITLE = 820, 16, 28
USUAL_INDENT = 36  # of the engines' names, beside "int8"
NAME_WIDTH, BAR_WIDTH, ROW, GROUP_GAP = 142, 170, 19, 8
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 13px }
  .quiet { fill: #59636e }
  .page { fill: #ffffff }
  .ours { fill: #0969da }
  .other { fill: #818b98 }
  .range { stroke: #1f2328; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .page { fill: #0d1117 }
    .ours { fill: #4493f8 }
    .other { fill: #6e7681 }
    .range { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True)
class Bar:
    """One engine's figure: median, lowest and highest sample, in tokens per second."""

    workload: str
    weights: str
    engine: str
    median: float
    low: float
    high: float
    label: str


def read_table(page: str) -> tuple[str, list[Bar]]:
    """Return the caption of the page's speed table, and its bars. A cell without a figure has no bar.

    Raises:
        ValueError: the page has no speed table.
    """
    found = re.search(r"<!-- speed: (.*?) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    if found is None:
        raise ValueError("the page has no speed table")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[2].strip().split("\n"))
    bars = []
    for workload, weights, *figures in (row[:-1] for row in rows if row[0].endswith(UNIT)):
        for engine, text in zip(header[2:-1], figures, strict=True):
            if numbers := NUMBERS.fullmatch(text):
                median = float(numbers[1])
                low, high = float(numbers[2] or median), float(numbers[3] or median)
                label = numbers[1] + numbers[4]
                bars.append(Bar(workload.removesuffix(UNIT), weights, engine, median, low, high, label))
    return found[1], bars


def draw(caption: str, bars: list[Bar]) -> str:
    """Return the SVG. The panels fill two columns; each goes into the column that is shorter so far."""
    bottoms, panels = [MARGIN, MARGIN], []
    for workload in dict.fromkeys(bar.workload for bar in bars):
        mine = [bar for bar in bars if bar.workload == workload]
        column = bottoms.index(min(bottoms))
        panels += _panel(workload, mine, MARGIN + column * WIDTH // 2, bottoms[column] + TITLE)
        groups = len({bar.weights for bar in mine})
        bottoms[column] += TITLE + len(mine) * ROW + (groups - 1) * GROUP_GAP + MARGIN
    lines = ["Tokens per second, higher is better: medians, and lines from the lowest to the highest round.", caption]
    top = max(bottoms) + 10
    height = top + 18 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        '<title id="title">Tokens per second of Penstock and other engines</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        *panels,
        *(f'<text class="quiet" x="16" y="{top + 18 * i}">{escape(line)}</text>' for i, line in enumerate(lines)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(workload: str, bars: list[Bar], left: int, top: int) -> list[str]:
    """Return the SVG lines of one figure, with its bars grouped by type of weights."""
    indent = 12 + 6 * max(len(bar.weights) for bar in bars)
    names = NAME_WIDTH - USUAL_INDENT + indent
    scale = (BAR_WIDTH + NAME_WIDTH - names) / max(bar.high for bar in bars)
    lines = [f'<text class="title" x="{left}" y="{top - 8}">{escape(workload)}</text>']
    y, weights = top, None
    for bar in bars:
        y += GROUP_GAP if weights not in (None, bar.weights) else 0
        kind = "ours" if bar.engine == OURS else "other"
        shown = "" if bar.weights == weights else bar.weights
        start, middle = left + names, y + ROW / 2 - 1.5
        low, median, high = (start + value * scale for value in (bar.low, bar.median, bar.high))
        lines += [
            f'<text class="quiet" x="{left}" y="{y + 12}">{shown}</text>',
            f'<text x="{left + indent}" y="{y + 12}">{escape(bar.engine)}</text>',
            f'<rect class="{kind}" x="{start}" y="{y + 1}" width="{median - start:.1f}" height="{ROW - 5}" rx="2"/>',
            f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{max(median, high) + 6:.1f}" y="{y + 12}">{bar.label}</text>',
        ]
        y, weights = y + ROW, bar.weights
    return lines


def write_picture(page: Path, picture: Path) -> None:
    """Draw the table of a page."""
    picture.write_text(draw(*read_table(page.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    write_picture(*map(Path, (sys.argv[1:] + [str(TABLE), str(PICTURE)][len(sys.argv) - 1 :])[:2]))
