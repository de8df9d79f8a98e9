"""Print the figures of a benchmark as tables. This module knows the names of the figures, not their measurement."""

from typing import Any

from rich.console import Console
from rich.table import Table

# {heading: format of the cell, with the names of the row's figures}
MEASURED = {
    "ms": "{ms:.3f}",
    "GB/s": "{gb_s:.1f}",
    "of read": "{bw_fraction:.0%}",
    "GFLOP/s": "{gflop_s:.0f}",
    "of mult": "{flop_fraction:.0%}",
    "x torch": "{times_torch:.2f}",
}
PRODUCTS = {"op": "{op}", "dtype": "{dtype}", "n x k": "{n} x {k}", "leaves": "{leaves}", "m": "{m}", **MEASURED}
ATTENTION = {
    "#": "{number}",
    "attend": "{attend}",
    "cache": "{dtype}",
    "tokens": "{seqs}x{tokens}",
    "heads": "{heads}/{kv_heads}",
    "D": "{head_dim}",
    "thr": "{threads}",
    **MEASURED,
}
MACHINE = "{processor}, {threads} threads, kernels {level}"
LIMITS = (
    "reads {read_gb_s:.1f} GB/s, multiplies {bf16_gflop_s:.0f} GFLOP/s bf16, {f32_gflop_s:.0f} GFLOP/s f32, "
    "{int8_gop_s:.0f} GOP/s int8"
)


def print_offline(result: dict[str, Any]) -> None:
    """Print the figures of bench.offline: the whole run, prefill and decode."""
    console = Console()
    workload = f"{result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    table = Table("", title=f"{result['model']}: {workload}")
    for column in ("whole run", "prefill", "decode"):
        table.add_column(column, justify="right")
    parts = (result, result["prefill"], result["decode"])
    table.add_row("seconds", *(f"{part['seconds']:.2f}" for part in parts))
    for name in ("output_tokens_per_s", "total_tokens_per_s"):
        table.add_row(name, *(_number(part[name]) for part in parts))
    for name in ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction"):
        table.add_row(name, *("-" if part[name] is None else f"{part[name]:.1%}" for part in parts))
    console.print(table)
    for name in ("ttft_ms", "itl_ms"):
        console.print(f"{name}: p50 {_number(result[name]['p50'])}, p99 {_number(result[name]['p99'])}")
    for plan, count in result["attention"].items():
        console.print(f"attention, {count} times: {plan}", style="dim", soft_wrap=True)
    console.print(f"peak memory: {result['peak_rss_bytes'] / 2**20:.0f} MiB, threads: {result['threads']}")
    for name, reason in result["reason"].items():
        console.print(f"{name} is unknown: {reason}", style="dim")


def print_ops(result: dict[str, Any]) -> None:
    """Print the figures of bench.ops."""
    console = Console()
    console.print(f"{MACHINE}: {LIMITS}".format_map(result["machine"]))
    attention = [row for row in result["rows"] if row["op"].startswith("attend")]
    products = [row for row in result["rows"] if not row["op"].startswith("attend")]
    if products:
        console.print(_fill(Table(*PRODUCTS), PRODUCTS, products))
    if attention:
        console.print(_fill(Table(*ATTENTION, box=None, padding=(0, 1, 0, 0)), ATTENTION, attention))
        _print_attention_notes(console, attention)


def _fill(table: Table, columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    for number, row in enumerate(rows, start=1):
        more = {
            "number": number,
            "attend": row["op"].removeprefix("attend_"),
            "times_torch": row["torch_ms"] / row["ms"],
        }
        table.add_row(*(cell.format_map(row | more) for cell in columns.values()))
    return table


def _print_attention_notes(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the speed-up by threads and the plan of each kernel, by the rows' numbers in the table."""
    keys: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        keys.setdefault(row["key"], []).append(str(number))
        if row["speedup"] is not None and row["threads"] > 1:
            console.print(f"{number}: {row['speedup']:.2f} times as fast as with one thread")
    for key, numbers in keys.items():
        console.print(f"{', '.join(numbers)}: {key}", style="dim")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
