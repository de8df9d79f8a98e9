"""Draw docs/speed.svg from the table in docs/performance.md: ``python3 tools/draw_speed.py``.

One panel per workload with a scale of its own; one bar per engine. A bar is solid up to the lower of two rounds and
pale up to the higher one. The picture has its own background in light and dark mode, because a page cannot style it.
"""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "speed.svg"
OURS = "Penstock"
PANELS = {"one stream": (16, 36), "prompt of 1024 tokens": (430, 36), "32 streams": (430, 170)}  # left, top
NAME_WIDTH, BAR_WIDTH, ROW, GROUP_GAP = 112, 190, 19, 8
WIDTH, HEIGHT = 820, 364
CAPTION = (
    "Tokens per second, higher is better; pale: the better of two rounds.",
    "Llama shape with 1.1 billion parameters, random weights.",
    "Intel Xeon with AMX, 2 cores, two threads per engine.",
)
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 13px }
  .quiet { fill: #59636e }
  .page { fill: #ffffff }
  .ours { fill: #0969da }
  .other { fill: #818b98 }
  .upper { opacity: 0.45 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .page { fill: #0d1117 }
    .ours { fill: #4493f8 }
    .other { fill: #6e7681 }
  }
"""


@dataclass(frozen=True)
class Bar:
    """One engine's figure: the lower and the higher of its rounds, in tokens per second."""

    workload: str
    weights: str
    engine: str
    low: float
    high: float
    label: str


def read_table(page: str) -> list[Bar]:
    """Return the bars of the page's speed table; a dash has none."""
    found = re.search(r"<!-- speed: .*?-->\n(.*?)<!-- end -->", page, re.DOTALL)
    if found is None:
        raise SystemExit(f"{TABLE} has no speed table")
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[1].strip().split("\n"))
    bars = []
    for workload, weights, *figures in rows:
        for engine, label in zip(header[2:], figures, strict=True):
            if label != "–":
                numbers = [float(number) for number in label.split("-")]
                bars.append(Bar(workload, weights, engine, numbers[0], numbers[-1], label.replace("-", "–")))
    return bars


def draw(bars: list[Bar]) -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">Tokens per second of Penstock and other engines</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        *(line for workload, place in PANELS.items() for line in _panel(workload, bars, *place)),
        *(f'<text class="quiet" x="16" y="{304 + 18 * i}">{line}</text>' for i, line in enumerate(CAPTION)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(workload: str, bars: list[Bar], left: int, top: int) -> list[str]:
    """Return the lines of one workload, its figures grouped by type of weights."""
    mine = [bar for bar in bars if bar.workload == workload]
    scale = BAR_WIDTH / max(bar.high for bar in mine)
    lines = [f'<text class="title" x="{left}" y="{top - 12}">{escape(workload.capitalize())}</text>']
    y, weights = top, None
    for bar in mine:
        y += GROUP_GAP if weights not in (None, bar.weights) else 0
        kind = "ours" if bar.engine == OURS else "other"
        name = bar.engine.split(" ")[0] if bar.engine != "vLLM 0.32 (CPU)" else "vLLM"
        shown = "" if bar.weights == weights else bar.weights
        start, low, high = left + NAME_WIDTH, bar.low * scale, bar.high * scale
        lines += [
            f'<text class="quiet" x="{left}" y="{y + 12}">{shown}</text>',
            f'<text x="{left + 36}" y="{y + 12}">{escape(name)}</text>',
            f'<rect class="{kind} upper" x="{start}" y="{y + 1}" width="{high:.1f}" height="{ROW - 5}" rx="2"/>',
            f'<rect class="{kind}" x="{start}" y="{y + 1}" width="{low:.1f}" height="{ROW - 5}" rx="2"/>',
            f'<text x="{start + high + 6:.1f}" y="{y + 12}">{bar.label}</text>',
        ]
        y, weights = y + ROW, bar.weights
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw(read_table(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
