"""Prints the figures of a benchmark as tables. It knows their names, not how they are measured."""

from typing import Any

from rich.console import Console
from rich.table import Table

MEASURED = ("ms", "GB/s", "of read", "GFLOP/s", "of mult", "x torch")


def print_offline(result: dict[str, Any]) -> None:
    """Print the figures of bench.offline: the whole run, prefill and decode."""
    console = Console()
    table = Table(
        title=f"{result['model']}: {result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    )
    for column in ("", "whole run", "prefill", "decode"):
        table.add_column(column, justify="left" if not column else "right")
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
    machine = result["machine"]
    console.print(
        f"{machine['processor']}, {machine['threads']} threads, kernels {machine['level']}: "
        f"reads {machine['read_gb_s']:.1f} GB/s, multiplies {machine['bf16_gflop_s']:.0f} GFLOP/s bf16, "
        f"{machine['f32_gflop_s']:.0f} GFLOP/s f32, {machine['int8_gop_s']:.0f} GOP/s int8"
    )
    products = [row for row in result["rows"] if row["op"] in ("linear", "experts")]
    if products:
        console.print(_product_table(products))
    attention = [row for row in result["rows"] if row["op"].startswith("attend")]
    if attention:
        console.print(_attention_table(attention))
        _print_attention_notes(console, attention)


def _product_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("op", "dtype", "n x k", "leaves", "m", *MEASURED)
    for row in rows:
        shape = f"{row['n']} x {row['k']}"
        table.add_row(row["op"], row["dtype"], shape, str(row["leaves"]), str(row["m"]), *_measured(row))
    return table


def _attention_table(rows: list[dict[str, Any]]) -> Table:
    """Return the table; its rows are numbered for the notes below it."""
    table = Table("#", "attend", "cache", "tokens", "heads", "D", "thr", *MEASURED, box=None, padding=(0, 1, 0, 0))
    for number, row in enumerate(rows, start=1):
        table.add_row(
            str(number),
            row["op"].removeprefix("attend_"),
            row["dtype"],
            f"{row['seqs']}x{row['tokens']}",
            f"{row['heads']}/{row['kv_heads']}",
            str(row["head_dim"]),
            str(row["threads"]),
            *_measured(row),
        )
    return table


def _print_attention_notes(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print why these kernels ran, and the speed-up of more threads."""
    keys: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        keys.setdefault(row["key"], []).append(str(number))
        if row["speedup"] is not None and row["threads"] > 1:
            console.print(f"{number}: {row['speedup']:.2f} times as fast as with one thread")
    for key, numbers in keys.items():
        console.print(f"{', '.join(numbers)}: {key}", style="dim")


def _measured(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['ms']:.3f}",
        f"{row['gb_s']:.1f}",
        f"{row['bw_fraction']:.0%}",
        f"{row['gflop_s']:.0f}",
        f"{row['flop_fraction']:.0%}",
        f"{row['torch_ms'] / row['ms']:.2f}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
