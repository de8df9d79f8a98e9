"""Append the figures of `penstock bench ops --json` to a history of kernel figures, docs/perf_log.md.

python -m penstock_lab.bench.perf_log ops.json docs/perf_log.md

An entry names the processor, the instruction set, the commit and the command. It shows each figure beside the figure in
the last entry of the same machine, so that regressions are visible.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from penstock_lab.bench.products import DOWN_1B, DOWN_7B, UP_1B, UP_7B
from penstock_lab.bench.report import LIMITS, MACHINE

READING = "{ms:.3f} ms, {bw_fraction:.0%} of reading"
MULTIPLYING = "{ms:.3f} ms, {flop_fraction:.0%} of multiplying"
BOTH = READING + ", {flop_fraction:.0%} of multiplying"
ROW = re.compile(r"^\| (?P<figure>[^|]+) \| (?P<before>[^|]+) \| (?P<now>[^|]+) \|$")


def figures(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for every figure of the log that the run has measured."""
    keys = ("dtype", "n", "k", "leaves", "m")
    linear = {tuple(row[key] for key in keys): row for row in result["rows"] if row["op"] == "linear"}
    for (n, k), leaves in ((UP_1B, 1), (DOWN_1B, 8), (UP_7B, 1), (DOWN_7B, 8)):
        shape = f"{n} x {k}" + (f", {leaves} leaves" if leaves > 1 else "")
        for m in (1, 8, 32, 512):
            row = linear.get(("bf16", n, k, leaves, m))
            if row is not None:
                yield f"bf16 {shape}, M = {m}", f"{BOTH.format_map(row)}, {row['torch_ms'] / row['ms']:.2f} x torch"
        for dtype in ("int8", "int8-x2", "int4", "int4-a16", "f32"):
            for m in (1, 64, 512):
                row, plain = (linear.get((name, n, k, leaves, m)) for name in (dtype, "bf16"))
                if row is not None and plain is not None:
                    yield f"{dtype} {shape}, M = {m}", f"{BOTH.format_map(row)}, {plain['ms'] / row['ms']:.2f} x bf16"
    for row in result["rows"]:
        if row["op"].startswith("attend_"):
            heads = f"{row['heads']}/{row['kv_heads']} heads of {row['head_dim']}"
            threads = "" if row["speedup"] is None else f", {row['threads']} threads"
            name = f"{row['op']} {row['dtype']} {heads}, {row['seqs']} x {row['tokens']}{threads}"
            limit = READING if row["op"] == "attend_decode" else MULTIPLYING
            yield name, f"{limit.format_map(row)}, {row['torch_ms'] / row['ms']:.2f} x torch"


def last_values(log: str, machine: str) -> dict[str, str]:
    """Read {figure: value} from the last entry of this machine (report.MACHINE); empty if it has no entry."""
    for part in reversed(log.split("\n## ")[1:]):
        if machine in part:
            found = (ROW.match(line) for line in part.splitlines())
            return {match["figure"]: match["now"] for match in found if match and match["figure"] != "figure"}
    return {}


def entry(result: dict[str, Any], log: str, title: str) -> str:
    """Write the text to append to the log."""
    machine = MACHINE.format_map(result["machine"])
    before = last_values(log, machine)
    lines = [
        f"\n## {title}",
        "",
        f"{machine}; torch {result['torch']}; `{result['command']}`.",
        f"Limits: {LIMITS.format_map(result['machine'])}.",
        "",
        "| figure | before | now |",
        "|---|---|---|",
    ]
    lines += [f"| {figure} | {before.get(figure, '-')} | {now} |" for figure, now in figures(result)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Append the figures of bench ops to the log.")
    parser.add_argument("result", type=Path, help="JSON that penstock bench ops wrote")
    parser.add_argument("log", type=Path, help="the Markdown file")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    log = args.log.read_text()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    title = f"{date.today().isoformat()}, {commit.stdout.strip() or 'no commit'}"
    args.log.write_text(log + entry(result, log, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
