"""Keeps a history of kernel figures: appends what `penstock bench ops --json` measured to docs/perf_log.md.

python -m penstock.bench.perf_log ops.json docs/perf_log.md

An entry names the processor, the level, the commit and the command, and shows each figure beside that of the last entry
of the same processor and level, so that regressions are seen.
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

UP, DOWN = (14336, 4096), (4096, 14336)  # of a 7B
SMALL_UP, SMALL_DOWN = (5632, 2048), (2048, 5632)  # of a 1.1B
ROW = re.compile(r"^\| (?P<figure>[^|]+) \| (?P<before>[^|]+) \| (?P<now>[^|]+) \|$")


def figures(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (what, how much) for every figure of the log that the run has measured."""
    keys = ("dtype", "n", "k", "leaves", "m")
    linear = {tuple(row[key] for key in keys): row for row in result["rows"] if row["op"] == "linear"}
    for (n, k), leaves in ((SMALL_UP, 1), (SMALL_DOWN, 8), (UP, 1), (DOWN, 8)):
        shape = f"{n} x {k}" + (f", {leaves} leaves" if leaves > 1 else "")
        for m in (1, 8, 32, 512):
            row = linear.get(("bf16", n, k, leaves, m))
            if row is not None:
                yield f"bf16 {shape}, M = {m}", f"{_both_limits(row)}, {row['torch_ms'] / row['ms']:.2f} x torch"
        for dtype in ("int8", "int8-x2", "int4", "int4-a16", "f32"):
            for m in (1, 64, 512):
                row, plain = (linear.get((name, n, k, leaves, m)) for name in (dtype, "bf16"))
                if row is not None and plain is not None:
                    yield f"{dtype} {shape}, M = {m}", f"{_both_limits(row)}, {plain['ms'] / row['ms']:.2f} x bf16"
    for row in result["rows"]:
        if row["op"].startswith("attend_"):
            heads = f"{row['heads']}/{row['kv_heads']} heads of {row['head_dim']}"
            threads = "" if row["speedup"] is None else f", {row['threads']} threads"
            yield f"{row['op']} {row['dtype']} {heads}, {row['seqs']} x {row['tokens']}{threads}", _attend(row)


def _both_limits(row: dict[str, Any]) -> str:
    return f"{row['ms']:.3f} ms, {row['bw_fraction']:.0%} of reading, {row['flop_fraction']:.0%} of multiplying"


def _attend(row: dict[str, Any]) -> str:
    """Return the figures of attention: decode is limited by reading, prefill by multiplying."""
    decode = row["op"] == "attend_decode"
    limit = f"{row['bw_fraction']:.0%} of reading" if decode else f"{row['flop_fraction']:.0%} of multiplying"
    return f"{row['ms']:.3f} ms, {limit}, {row['torch_ms'] / row['ms']:.2f} x torch"


def machine_line(result: dict[str, Any]) -> str:
    """Return the processor, threads and level that an entry belongs to."""
    machine = result["machine"]
    return f"{machine['processor']}, {machine['threads']} threads, kernels {machine['level']}"


def last_values(log: str, machine: str) -> dict[str, str]:
    """Return figure -> value of the last entry of that machine; empty if there is none."""
    for part in reversed(log.split("\n## ")[1:]):
        if machine in part:
            found = (ROW.match(line) for line in part.splitlines())
            return {match["figure"]: match["now"] for match in found if match and match["figure"] != "figure"}
    return {}


def entry(result: dict[str, Any], log: str, title: str) -> str:
    """Return the text to append."""
    machine = machine_line(result)
    before = last_values(log, machine)
    limits = result["machine"]
    lines = [
        f"\n## {title}",
        "",
        f"{machine}; torch {result['torch']}; `{result['command']}`.",
        f"Limits: reads {limits['read_gb_s']:.1f} GB/s; multiplies {limits['bf16_gflop_s']:.0f} GFLOP/s bf16, "
        f"{limits['f32_gflop_s']:.0f} GFLOP/s f32, {limits['int8_gop_s']:.0f} GOP/s int8.",
        "",
        "| figure | before | now |",
        "|---|---|---|",
    ]
    lines += [f"| {figure} | {before.get(figure, '-')} | {now} |" for figure, now in figures(result)]
    return "\n".join(lines) + "\n"


def current_commit() -> str:
    """Return the short name of the current commit, or "no commit" outside a repository."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no commit"


def main() -> int:
    parser = argparse.ArgumentParser(description="Append the figures of bench ops to the log.")
    parser.add_argument("result", type=Path, help="JSON that penstock bench ops wrote")
    parser.add_argument("log", type=Path, help="the Markdown file")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    log = args.log.read_text()
    title = f"{date.today().isoformat()}, {current_commit()}"
    args.log.write_text(log + entry(result, log, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
