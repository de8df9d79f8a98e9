"""Print the figures of a benchmark as tables. This module knows the names of the figures, not their measurement."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

# {heading: format of the cell, with the names of the row's figures}. A table is at most 80 columns wide.
MEASURED = {
    "ms": "{ms:.3f}",
    "GB/s": "{gb_s:.1f}",
    "read": "{bw_fraction:.0%}",
    "GFLOP/s": "{gflop_s:.0f}",
    "mult": "{flop_fraction:.0%}",
    "spread": "{low:.0%}-{high:.0%}",
    "torch": "{times_torch:.2f}",
    "left": "{unsettled}",
}
PRODUCTS = {"type": "{dtype}", "n x k/leaves": "{n}x{k}{pieces}", "m": "{m}", **MEASURED}
EXPERTS = {"type": "{dtype}", "experts": "{chosen} of {experts}", "m": "{m}", **MEASURED}
ATTENTION = {
    "#": "{number}",
    "cache": "{dtype}",
    "tokens": "{seqs}x{tokens}",
    "heads": "{heads}/{kv_heads}",
    "D": "{head_dim}",
    "thr": "{threads}",
    **MEASURED,
}
TITLES = {
    "linear": "Products with a weight",
    "experts": "Mixtures of experts",
    "attend_decode": "Attention, decoding",
    "attend_prefill": "Attention, prefill",
}
COLUMNS = {"linear": PRODUCTS, "experts": EXPERTS, "attend_decode": ATTENTION, "attend_prefill": ATTENTION}
LEGEND = (
    "read, mult: median shares of the limits of reading and multiplying at the moment; spread: p10 to p90 of the "
    "larger one; torch: times as fast as torch; left: unsettled samples of {rounds}, left out"
)
MACHINE = "{processor}, {threads} threads, kernels {level}"
LIMITS = (
    "reads {read_gb_s:.1f} GB/s, multiplies {bf16_gflop_s:.0f} GFLOP/s bf16, {f32_gflop_s:.0f} GFLOP/s f32, "
    "{int8_gop_s:.0f} GOP/s int8"
)


def print_offline(result: dict[str, Any]) -> None:
    """Print the figures of bench.offline for the whole run, for prefill and for decode."""
    console = Console()
    workload = f"{result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    if result["prefix_len"]:
        workload += f", {result['prefix_len']} shared and {'' if result['prefix_caching'] else 'not '}cached"
    parts = _parts(result)
    table = Table("", title=f"{result['model']}: {workload}")
    for column in parts:
        table.add_column(column, justify="right")
    table.add_row("seconds", *(f"{part['seconds']:.2f}" for part in parts.values()))
    for name in ("output_tokens_per_s", "total_tokens_per_s"):
        table.add_row(name, *(_number(part[name]) for part in parts.values()))
    for name in ("bandwidth_fraction", "compute_fraction", "python_overhead_fraction"):
        table.add_row(name, *(_percent(part[name]) for part in parts.values()))
    console.print(table)
    _print_shares(console, result)
    for name in ("ttft_ms", "itl_ms"):
        console.print(f"{name}: p50 {_number(result[name]['p50'])}, p99 {_number(result[name]['p99'])}")
    python = result["decode"]["python_ms_per_step"]
    console.print(f"python of a decode step, ms: p10 {_number(python['p10'], 2)}, p50 {_number(python['p50'], 2)}")
    for plan, count in result["attention"].items():
        console.print(f"attention, {count} times: {plan}", style="dim", soft_wrap=True)
    console.print(f"peak memory: {result['peak_rss_bytes'] / 2**20:.0f} MiB, threads: {result['threads']}")
    if "between_processes" in result:
        _print_between(console, result["between_processes"])
    for name, reason in result["reason"].items():
        console.print(f"{name} is unknown: {reason}", style="dim")
    if "profile" in result:
        print_profile(result["profile"])


def _print_between(console: Console, found: dict[str, Any]) -> None:
    """Print how many bytes the processes received from each other, and how long the stages of a pipeline stood idle."""
    each, whole, predicted = (
        found[name] for name in ("bytes_received_per_step", "bytes_received", "predicted_bytes_received")
    )
    console.print(f"rank 0 of each stage got {each:,.0f} bytes per step, {whole:,} in total; predicted: {predicted:,}")
    if found["bubble"] is not None:
        console.print(f"bubble: the stages were idle for {found['bubble']:.1%} of the time")


def print_speculation(result: dict[str, Any]) -> None:
    """Print the figures of bench.speculation."""
    console = Console()
    workload = f"{result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    if result["dataset"] != "random":
        workload = f"{result['num_prompts']} of {result['dataset']}, at most {result['output_len']} out"
    table = Table("decoding", "tokens/s", "steps", title=f"{result['model']}: {workload}")
    for name, shown in (("plain", "without drafts"), ("drafted", "with drafts")):
        table.add_row(shown, _number(result[f"{name}_tokens_per_s"]), str(result[f"{name}_steps"]))
    console.print(table)
    low, high = result["speedup_low"], result["speedup_high"]
    console.print(f"speedup: {result['speedup']:.2f} ({low:.2f} to {high:.2f} over the rounds)")
    if result["draft_tokens"]:
        drafts, accepted = result["draft_tokens"], result["accepted_tokens"]
        console.print(f"draft tokens: {drafts}, accepted: {accepted}, warm-up included")
    else:
        console.print("no draft promised to pay, so none was computed: both runs did the same, and the ratio is noise")


def print_forms(result: dict[str, Any]) -> None:
    """Print the figures of bench.forms."""
    console = Console()
    workload = f"{result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    table = Table("answers", "tokens/s", "steps", "ms per step", title=f"{result['model']}: {workload}")
    for name, shown in (("plain", "without the form"), ("formed", "with the form")):
        speed, steps, step_ms = (result[f"{name}_{unit}"] for unit in ("tokens_per_s", "steps", "step_ms"))
        table.add_row(shown, _number(speed), str(steps), _number(step_ms))
    console.print(table)
    low, high = result["throughput_low"], result["throughput_high"]
    console.print(f"throughput with the form: {result['throughput']:.1%} ({low:.1%} to {high:.1%} over the rounds)")
    first, extra = result["first_token_ms"], result["extra_first_token_ms"]
    console.print(f"first token of one request: {first:.1f} ms, with the form {extra:+.1f} ms")


def print_lora(result: dict[str, Any]) -> None:
    """Print the figures of bench.lora."""
    console, count = Console(), result["adapters"]
    workload = f"{result['num_prompts']} x {result['input_len']} in, {result['output_len']} out"
    title = f"{result['model']}: {workload}, adapters of rank {result['rank']}"
    table = Table("requests", "ms per step", "throughput", title=title)
    shown = {
        "plain": "an engine without LoRA",
        "none": "an engine with LoRA: without adapters",
        "one": "all with the same adapter",
        "all": f"in turns with {count} adapters",
    }
    for name, text in shown.items():
        table.add_row(text, _number(result[f"{name}_step_ms"]), f"{result[f'{name}_throughput']:.1%}")
    console.print(table)


def _print_shares(console: Console, result: dict[str, Any]) -> None:
    """Print the spread of the shares of the stretches between probes, and their medians by the machine's state."""
    parts = {name: part["stretches"] for name, part in _parts(result).items() if part["stretches"] is not None}
    if not parts:
        return
    table = _table(["between probes", "number", "unsettled", "of reading", "of multiplying", "fast", "slow"])
    for name, part in parts.items():
        states = (f"{part[state]['samples']} at {_median(part[state])}" for state in ("fast", "slow"))
        spreads = (_range(part["spread"][share]) for share in ("bw_fraction", "flop_fraction"))
        table.add_row(name, str(part["samples"]), str(part["unsettled"]), *spreads, *states)
    console.print(table)


def _range(spread: dict[str, float]) -> str:
    return f"{spread['p50']:.0%} ({100 * spread['p10']:.0f}-{100 * spread['p90']:.0f})"


def _median(state: dict[str, Any]) -> str:
    """Show the larger of a state's median shares."""
    return f"{max(state['bw_fraction'], state['flop_fraction']):.0%}" if state["samples"] else "-"


def _parts(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"whole run": result, "prefill": result["prefill"], "decode": result["decode"]}


def print_profile(profile: dict[str, Any], *, stderr: bool = False) -> None:
    """Print the operations of each phase (bench.profile)."""
    console = Console(stderr=stderr)
    for phase, figures in profile.items():
        steps, seconds = figures["steps"], figures["seconds"]
        console.print(f"\n{phase}: {steps} steps, {1000 * seconds / steps:.2f} ms each", style="bold")
        table = _table(["operation", "calls", "ms/step", "share", "MB", "GB/s", "read", "GOP/s", "mult"])
        for row in figures["operations"]:
            table.add_row(
                row["operation"],
                f"{row['calls'] / steps:.4g}",
                f"{1000 * row['seconds'] / steps:.3f}",
                f"{row['share']:.1%}",
                _number(row["read_bytes"] / steps / 1e6 or None),
                _number(row["gb_s"]),
                _percent(row["bw_fraction"]),
                _number(row["gop_s"]),
                _percent(row["flop_fraction"]),
            )
        console.print(table)
    console.print(
        "calls, MB: per step; read, mult: shares of the limits that were probed around the calls", style="dim"
    )


def print_ops(result: dict[str, Any]) -> None:
    """Print the figures of bench.ops."""
    console = Console()
    console.print(f"{MACHINE}: {LIMITS}".format_map(result["machine"]))
    for op, title in TITLES.items():
        rows = [row for row in result["rows"] if row["op"] == op]
        if rows:
            console.print(f"\n{title}", style="bold")
            console.print(_fill(COLUMNS[op], rows))
            if op.startswith("attend"):
                _print_attention_notes(console, rows)
    console.print(LEGEND.format(rounds=result["rows"][0]["samples"]), style="dim")


def _table(headings: Iterable[str]) -> Table:
    """Make a table whose columns are never cut; all but the first are aligned to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _fill(columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    table = _table(columns)
    for number, row in enumerate(rows, start=1):
        binding = max(("bw_fraction", "flop_fraction"), key=lambda name: row[name])
        bounds = row["spread"][binding]
        more = {"number": number, "low": bounds["p10"], "high": bounds["p90"], "pieces": _pieces(row["leaves"])}
        table.add_row(*(cell.format_map(row | more) for cell in columns.values()))
    return table


def _pieces(leaves: int) -> str:
    return f"/{leaves}" if leaves > 1 else ""


def _print_attention_notes(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the speed-up by threads and the plan of each kernel, with the row numbers of the table."""
    keys: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        keys.setdefault(row["key"], []).append(str(number))
        if row["speedup"] is not None and row["threads"] > 1:
            console.print(f"{number}: {row['speedup']:.2f} times as fast as with one thread")
    for key, numbers in keys.items():
        console.print(f"{', '.join(numbers)}: {key}", style="dim")


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def print_machine(result: dict[str, Any]) -> None:
    """Print what simulator.this_machine measured."""
    console = Console()
    table = Table("weights", "read GB/s", "multiply 10^9/s", title=result["source"])
    reads, operations = result["read_bytes_per_s"], result["operations_per_s"]
    for kind in reads | operations:
        read = f"{reads[kind] / 1e9:.1f}" if kind in reads else ""
        table.add_row(kind, read, f"{operations[kind] / 1e9:.0f}" if kind in operations else "")
    console.print(table)
    for name, what in (("prompt", "prompts"), ("streams", "streams")):
        measured = result.get(f"attend_{name}_operations_per_s", {})
        if rates := ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in measured.items()):
            console.print(f"attention of {what}, 10^9/s by the type of the cache: {rates}")
    if "step_s" in result:  # not of a GPU
        console.print(
            f"a step takes {1e3 * result['step_s']:.2f} ms, a sequence {1e6 * result['sequence_s']:.0f} us more"
        )
    if result["unsettled"]:
        changes = ", ".join(f"{name} {change:+.0%}" for name, change in result["unsettled"].items())
        console.print(f"[yellow]still changing from the first half of the rounds to the second: {changes}[/]")
        console.print("[yellow]the machine is busy, or its speed varies; medians were kept: measure again[/]")
