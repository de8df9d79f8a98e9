"""Prints the figures of a benchmark for people. Knows their names and nothing of how they came about."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_offline(result: dict[str, Any]) -> None:
    """The figures of bench.offline as a table: the whole run, prefill and decode."""
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
    for name in result["reason"]:
        table.add_row(name, *(_number(part[name]) for part in parts))
    console.print(table)
    for name in ("ttft_ms", "itl_ms"):
        console.print(f"{name}: p50 {_number(result[name]['p50'])}, p99 {_number(result[name]['p99'])}")
    console.print(f"peak memory: {result['peak_rss_bytes'] / 2**20:.0f} MiB, threads: {result['threads']}")
    for name, reason in result["reason"].items():
        console.print(f"{name} is not known: {reason}", style="dim")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
