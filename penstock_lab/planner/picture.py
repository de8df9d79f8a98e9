"""The picture of a plan: one SVG, or a page with its tables, legible in light and dark mode without network access.

    memory by device     what each device holds, compared with its budget
    placement            what each chip computes in each epoch, and the peak of its memory
    a step in time       reading and multiplying in parallel, then exchange and host: each bar is one whole step

Everything is drawn from the JSON of `penstock plan`.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from penstock_lab.planner.machines import size_text

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #1d2126 }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #16191d; --ink: #e8ebee }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink) }}
img, svg {{ width: 100%; height: auto }} .wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th {{ font-weight: normal; text-align: left }} td {{ text-align: right }}
td, th {{ padding: .2rem .8rem; white-space: nowrap; border-bottom: 1px solid #8886 }}
</style>
<h1>{title}</h1><p>{about}</p>
{body}
</html>
"""
WIDTH, LEFT, RIGHT = 980, 150, 230  # widths of the drawing, and of the text on both sides of a bar
ROOM = WIDTH - LEFT - RIGHT
ROW = 24
MEMORY_KINDS = ("weights", "cache", "workspace", "runtime")
PARTS = ("read", "multiply", "exchange", "host")
OPERATIONS = ("attention", "mlp", "lm_head")
MAX_STEPS = 12
STYLE = """svg.plan { --paper: #ffffff; --ink: #1d2126; --soft: #5d6670; --line: #c9cfd6; --rest: #eceff2;
  --a: #3568a8; --b: #c4701c; --c: #4b8a3a; --d: #8a5fb0; --bad: #b3261e;
  font: 13px system-ui, sans-serif; background: var(--paper) }
@media (prefers-color-scheme: dark) { svg.plan { --paper: #16191d; --ink: #e8ebee; --soft: #a3adb8; --line: #48515b;
  --rest: #262c33; --a: #6ea3e6; --b: #e39a4f; --c: #82bd6e; --d: #b795dc; --bad: #f2857c } }
svg.plan text { fill: var(--ink) } svg.plan .soft { fill: var(--soft) } svg.plan .head { font-size: 16px }
svg.plan .bad { fill: var(--bad) } svg.plan .end { text-anchor: end } svg.plan .middle { text-anchor: middle }
svg.plan .a { fill: var(--a) } svg.plan .b { fill: var(--b) } svg.plan .c { fill: var(--c) }
svg.plan .d { fill: var(--d) } svg.plan .rest { fill: var(--rest) }
svg.plan path { stroke: var(--line); fill: none } svg.plan path.thin { stroke-width: .4 }
svg.plan path.budget { stroke: var(--ink); stroke-width: 2 }"""


def page(title: str, about: str, body: str) -> str:
    """Fill in the template of a page. Title and `about` are text, the body is HTML."""
    return PAGE.format(title=html.escape(title), about=html.escape(about), body=body)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows, each a label followed by cells, as an HTML table."""
    lines = (
        f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>\n"
        for label, *cells in rows
    )
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>\n'


def plan_page(model: str, result: dict[str, Any]) -> str:
    """Write a page with the picture of a plan and its tables."""
    tables = {
        "Memory": [_device_row(item) for item in result["devices"]],
        "What fits": [_largest_row(item) for item in result["largest"]],
        "Times": [_time_row("", item) for item in result["predictions"]],
        "Decode, if": [_time_row(name, item) for name, found in result["what_if"].items() for item in found],
    }
    parts = [
        f"<h2>{title}</h2>{table([list(rows[0]), *(list(row.values()) for row in rows)])}"
        for title, rows in tables.items()
        if rows
    ]
    return page(f"{model} on {result['hardware']}", about(result), picture(result) + "".join(parts))


def about(result: dict[str, Any]) -> str:
    """State in one line whether the model fits."""
    parts, verdict = result["tensor_parallel_size"], "It fits" if result["fits"] else "It does not fit"
    split = f", split over {parts} devices" if parts > 1 else ""
    stages = result["pipeline_parallel_size"]
    split += f", in {stages} stages" if stages > 1 else ""
    change = f" With {result['smallest_change']} it would." if result["smallest_change"] else ""
    return f"{verdict}{split}, with max_model_len = {result['max_model_len']}.{change}"


def picture(result: dict[str, Any]) -> str:
    """Draw a plan as a self-contained SVG."""
    sheet = _Sheet()
    _draw_memory(sheet, result["devices"])
    if "placement" in result:
        _draw_placement(sheet, result["placement"])
    _draw_steps(sheet, result["predictions"])
    label = html.escape(f"Memory by device and times on {result['hardware']}. {about(result)}")
    size = f'viewBox="0 0 {WIDTH} {sheet.y}" width="{WIDTH}" height="{sheet.y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plan" role="img" aria-label="{label}" {size}>'
    return "\n".join((head, f"<style>{STYLE}</style>", *sheet.shapes, "</svg>\n"))


@dataclass(slots=True)
class _Sheet:
    """A drawing that grows downwards; `y` is its lower end."""

    shapes: list[str] = field(default_factory=list)
    y: int = 10

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """Draw a rectangle; `title` is shown when the pointer is over it."""
        inner = f"<title>{html.escape(title)}</title>" if title else ""
        place = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.0):.2f}" height="{height:.2f}"'
        self.shapes.append(f'<rect {place} class="{kind}">{inner}</rect>')

    def line(self, x: float, y: float, down: float, kind: str = "") -> None:
        self.shapes.append(f'<path d="M{x:.2f} {y:.2f}v{down:.2f}" class="{kind}"/>')

    def grid(self, x: float, y: float, width: float, places: Sequence[float]) -> None:
        """Draw horizontal lines, one at each of `places` below y."""
        strokes = "".join(f"M{x:.1f} {y + place:.1f}h{width:.1f}" for place in places)
        self.shapes.append(f'<path d="{strokes}" class="thin"/>')

    def heading(self, text: str, legend: Sequence[str]) -> None:
        """Begin a panel with its title and the legend of its colours."""
        self.text(10, self.y + 20, text, "head")
        x = LEFT + 80.0
        for name, kind in zip(legend, "abcd", strict=False):
            self.bar(x, self.y + 10, 11, 11, kind)
            self.text(x + 16, self.y + 20, name, "soft")
            x += 34 + 7.2 * len(name)
        self.y += 36


def _draw_memory(sheet: _Sheet, devices: Sequence[dict[str, Any]]) -> None:
    sheet.heading("Memory by device", MEMORY_KINDS)
    longest = max(max(item["total_bytes"], item["budget_bytes"]) for item in devices)
    for item in devices:
        total, budget = item["total_bytes"], item["budget_bytes"]
        sheet.text(LEFT - 10, sheet.y + 15, item["name"], "end")
        sheet.bar(LEFT, sheet.y + 3, ROOM * budget / longest, 16, "rest")
        x = float(LEFT)
        for name, kind in zip(MEMORY_KINDS, "abcd", strict=True):
            size = item[f"{name}_bytes"]
            sheet.bar(x, sheet.y + 3, ROOM * size / longest, 16, kind, f"{name}: {size_text(size)}")
            x += ROOM * size / longest
        sheet.line(LEFT + ROOM * budget / longest, sheet.y, 22, "budget")
        words = f"{size_text(total)} of {size_text(budget)}"
        sheet.text(LEFT + ROOM + 12, sheet.y + 15, words, "bad" if total > budget else "")
        sheet.y += ROW
    sheet.y += 14


def _draw_placement(sheet: _Sheet, found: dict[str, Any]) -> None:
    """Draw a column for each chip and a row for each epoch, and the peak of each chip's memory."""
    chips, areas = len(found["sram_bytes_by_chip"]), found["areas"]
    epochs = max(item["last_epoch"] for item in areas) + 1
    column, row = ROOM / chips, min(10.0, 330 / epochs)
    sheet.heading("Placement", OPERATIONS)
    sheet.bar(LEFT, sheet.y, ROOM, row * epochs, "rest")
    for item in areas:
        first, count = item["first_epoch"], item["last_epoch"] - item["first_epoch"] + 1
        kind = "abc"[OPERATIONS.index(item["operation"].partition(".")[0])]
        for run in _runs(item["chips"]):
            title = f"{item['operation']}: epochs {first} to {item['last_epoch']}, chips {run[0]} to {run[-1]}"
            place = LEFT + column * run[0], sheet.y + row * first
            sheet.bar(*place, column * len(run), row * count, kind, title)
    for chip in range(0, chips + 1, max(1, chips // 32)):
        sheet.line(LEFT + column * chip, sheet.y, row * epochs)
    if row >= 3:
        sheet.grid(LEFT, sheet.y, ROOM, [row * epoch for epoch in range(1, epochs)])
    for epoch in sorted({0, epochs - 1}):
        sheet.text(LEFT - 10, sheet.y + row * epoch + row / 2 + 4, f"epoch {epoch}", "end soft")
    sheet.y += round(row * epochs) + 6
    for name in ("sram", "dram"):
        _draw_chips(sheet, name.upper(), found[f"{name}_bytes_by_chip"], found[f"{name}_bytes_per_chip"])
    for chip in range(0, chips, max(1, chips // 8)):
        sheet.text(LEFT + column * (chip + 0.5), sheet.y + 12, f"{chip}", "middle soft")
    sheet.text(LEFT - 10, sheet.y + 12, "chip", "end soft")
    sheet.y += 26
    for problem in found["problems"]:
        sheet.text(LEFT, sheet.y + 12, f"It is impossible: {problem}"[:120], "bad")
        sheet.y += 18
    sheet.y += 8


def _draw_chips(sheet: _Sheet, name: str, sizes: Sequence[int], budget: int) -> None:
    column, height, most = ROOM / len(sizes), 34, max(*sizes, budget)
    sheet.text(LEFT - 10, sheet.y + height / 2 + 4, name, "end")
    sheet.bar(LEFT, sheet.y + height * (1 - budget / most), ROOM, height * budget / most, "rest")
    for chip, size in enumerate(sizes):
        tall, kind = height * size / most, "bad" if size > budget else "d"
        title = f"chip {chip}: {size_text(size)}"
        sheet.bar(LEFT + column * chip + 0.5, sheet.y + height - tall, column - 1, tall, kind, title)
    words = f"at most {size_text(max(sizes))} of {size_text(budget)}"
    sheet.text(LEFT + ROOM + 12, sheet.y + height / 2 + 4, words, "bad" if max(sizes) > budget else "")
    sheet.y += height + 8


def _draw_steps(sheet: _Sheet, predictions: Sequence[dict[str, Any]]) -> None:
    """Draw the times of a step, or of the steps of a prompt. Each bar has its own scale."""
    if not predictions:
        return
    sheet.heading("A step in time", ("read", "multiply", "exchange", "host"))
    for item in predictions[:MAX_STEPS]:
        read, multiply, exchange, host = (item["parts"][name] / item["seconds"] * ROOM for name in PARTS)
        tokens = item["prompt_len"] or item["context"]
        sheet.text(LEFT - 10, sheet.y + 15, f"{item['phase']} {item['batch']} × {tokens}", "end")
        sheet.bar(LEFT, sheet.y + 3, ROOM, 16, "rest")
        sheet.bar(LEFT, sheet.y + 3, read, 8, "a", f"read: {_seconds(item['parts']['read'])}")
        sheet.bar(LEFT, sheet.y + 11, multiply, 8, "b", f"multiply: {_seconds(item['parts']['multiply'])}")
        both = LEFT + max(read, multiply)
        sheet.bar(both, sheet.y + 3, exchange, 16, "c", f"exchange: {_seconds(item['parts']['exchange'])}")
        sheet.bar(both + exchange, sheet.y + 3, host, 16, "d", f"host: {_seconds(item['parts']['host'])}")
        sheet.text(LEFT + ROOM + 12, sheet.y + 15, f"{_seconds(item['seconds'])}, {item['bound']}")
        sheet.y += ROW
    if len(predictions) > MAX_STEPS:
        sheet.text(LEFT, sheet.y + 14, f"and {len(predictions) - MAX_STEPS} more", "soft")
        sheet.y += ROW
    sheet.y += 8


def _runs(chips: Sequence[int]) -> list[list[int]]:
    """Group the chips into runs of consecutive numbers."""
    counted = enumerate(sorted(chips))
    return [[chip for _, chip in run] for _, run in groupby(counted, key=lambda pair: pair[1] - pair[0])]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"


def _device_row(item: dict[str, Any]) -> dict[str, str]:
    names = (*MEMORY_KINDS, "total", "budget")
    return {"device": item["name"], **{name: size_text(item[f"{name}_bytes"]) for name in names}}


def _largest_row(item: dict[str, Any]) -> dict[str, str]:
    return {
        "weights": item["precision"],
        "cache": item["kv_cache_dtype"],
        "of weights": size_text(item["weights_bytes"]),
        "longest context": f"{item['context']}",
        "rows at max_model_len": f"{item['rows']}",
    }


def _time_row(change: str, item: dict[str, Any]) -> dict[str, str]:
    return {
        ("change" if change else "phase"): change or item["phase"],
        "batch": f"{item['batch']}",
        "tokens": f"{item['prompt_len'] or item['context']}",
        "time": _seconds(item["seconds"]),
        "tokens/s": f"{item['tokens_per_s']:.1f}",
        "bound by": item["bound"],
    }
